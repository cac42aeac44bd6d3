"""A session with tiny models and a screen in memory, for tests that type lines."""

import json
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from table_model import TableConfig, TableModel
from tiny import build, tiny_llama, tiny_t5, tiny_tokenizer

from utils.commands import default_registry
from utils.comparison import warm_up
from utils.comparison.records import RecordFile
from utils.comparison.strategies import STRATEGIES, Job, Strategy
from utils.config.settings import Settings
from utils.engine import Engine, engine
from utils.engine.forward_timing import WIDTHS, ForwardProbe
from utils.pairs.pair import Pair, compare_models
from utils.pairs.request import PairRequest
from utils.repl import repl_session
from utils.repl.loaded_pair import SessionTools
from utils.repl.repl_session import ReplSession, Verdict
from utils.screen.renderer import Renderer

VOCABULARY = 300


@dataclass
class Screen:
    """What was written, results and messages separately."""

    out: StringIO
    messages: StringIO
    renderer: Renderer

    def take(self) -> tuple[str, str]:
        """Results and messages since the last call."""
        texts = self.out.getvalue(), self.messages.getvalue()
        for buffer in (self.out, self.messages):
            buffer.seek(0)
            buffer.truncate()
        return texts


def screen(width: int = 400, colour: bool = False) -> Screen:
    out, messages = StringIO(), StringIO()
    consoles = [
        Console(
            file=buffer, width=width, no_color=not colour, force_terminal=colour or None, highlight=False, markup=False
        )
        for buffer in (out, messages)
    ]
    return Screen(out, messages, Renderer(*consoles, colour=colour))


class TinyPair(SimpleNamespace):
    """A Pair whose attributes tests can replace."""

    feature_layers, memory, drafter_memory = Pair.feature_layers, Pair.memory, Pair.drafter_memory


def one_layer_llama(seed: int, **overrides: Any) -> Any:
    return tiny_llama(seed, **{"num_hidden_layers": 1} | overrides)


@cache
def _tables(seed: int, **overrides: Any) -> Any:
    return build(TableModel, TableConfig(**overrides), seed)


def table_model(seed: int, **overrides: Any) -> Any:
    """A model with a config of its own. Its tables are shared, because transformers takes long to make a model."""
    model = copy(_tables(seed, **overrides))
    model.config, model.generation_config = copy(model.config), copy(model.generation_config)
    return model


KINDS: dict[str, Callable[..., Any]] = {"table": table_model, "llama": one_layer_llama, "t5": tiny_t5}


def table_pair(**options: Any) -> TinyPair:
    """Two models that read their logits from tables: for tests of everything above models, layers and engines."""
    return tiny_pair(kind="table", **options)


def tiny_pair(*, drafter: bool = True, chat: bool = True, kind: str = "llama", **overrides: Any) -> TinyPair:
    """Two tiny models with random weights and, unless overridden, one layer."""
    tokenizer = tiny_tokenizer(VOCABULARY, chat=chat)
    models = [KINDS[kind](seed=seed, vocab_size=VOCABULARY, **overrides) for seed in range(2 if drafter else 1)]
    return TinyPair(
        target=models[0],
        drafter=models[1] if drafter else None,
        engine=Engine(models),
        tokenizer=tokenizer,
        end_ids=frozenset({tokenizer.eos_token_id}),
        target_name="tiny-target",
        drafter_name="tiny-drafter" if drafter else None,
        drafter_kind="model" if drafter else None,
        device="cpu",
        dtype="float32",
        quantize="none",
        drafter_quantize="none" if drafter else None,
        drafter_dtype="float32" if drafter else None,
        notes=(),
        drafter_tokenizer=None,
        compatibility=compare_models(models[0], tokenizer, models[-1], None),
        request=PairRequest("tiny-target", "tiny-drafter" if drafter else None, device="cpu"),
    )


def constant_costs(probe: ForwardProbe, **options: Any) -> tuple[float, tuple[float, ...]]:
    """A decode step of 1 ms, and a tenth more for each draft, instead of timings."""
    return 1e-3, tuple(0.1 * drafts for drafts in range(1, min(probe.max_width, WIDTHS[-1])))


def constant_drafter(seconds: Callable[[Job], float]) -> Callable[[Job, int], tuple[float, float, float]]:
    """A drafter that reads in no time, and drafts as fast in every context."""
    return lambda job, longer: (seconds(job), 0.0, 0.0)


def open_session(
    view: Screen,
    pair: Any = None,
    records: Path | None = None,
    strategies: Any = STRATEGIES,
    draft_seconds: Callable[..., Any] = lambda job: 0.0,
    load: Any = None,
) -> ReplSession:
    """A session on the plain engine whose costs are constant and for one context length. draft_seconds: replaces the
    timing of drafters.
    """
    pair = table_pair() if pair is None else pair
    file = None if records is None else RecordFile(records)
    tools = SessionTools(default_registry(), view.renderer, file, load=load, strategies=strategies)
    # These patches are stopped by a fixture in conftest.py.
    if draft_seconds is not warm_up.draft_seconds:
        mock.patch.object(warm_up, "draft_seconds", constant_drafter(draft_seconds)).start()
    mock.patch.object(engine, "verify_costs", constant_costs).start()
    mock.patch.object(ForwardProbe, "longer", lambda probe: None).start()
    return with_costs_of(ReplSession(pair, tools, Settings(engine="plain", gamma=4, length=8)))


def with_costs_of(session: ReplSession) -> ReplSession:
    """A session whose costs are measured, as they are behind the first prompt."""
    if session.harness.has_pair:
        session._loaded.measure_costs(lambda: False)
    return session


def records_of(path: Path) -> list[dict[str, Any]]:
    """The JSON records of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def checked(session: ReplSession, file: Path, *lines: str) -> dict[str, Any]:
    """Process lines, all of which must succeed. Returns the last record."""
    for line in lines:
        assert session.handle(line) is Verdict.DONE, line
    return records_of(file)[-1]


def reported(monkeypatch: Any) -> list[tuple[Any, Any]]:
    """The reports that will be shown, each with its rows."""
    shown: list[tuple[Any, Any]] = []
    show = repl_session.show_report

    def note(renderer: Renderer, report: Any, rows: Any, conclusion: Any) -> None:
        shown.append((report, rows))
        show(renderer, report, rows, conclusion)

    monkeypatch.setattr(repl_session, "show_report", note)
    return shown


def with_speculative(steps: Any) -> tuple[Strategy, ...]:
    """The table of strategies with a different decoder in the speculative row."""
    return tuple(replace(row, steps=steps) if row.name == "speculative" else row for row in STRATEGIES)


class Restless(torch.nn.Module):
    """A model whose logits depend on the call, the verify width or the cache."""

    def __init__(self, model: Any, *, by_call: float = 0, by_rows: float = 0, by_cache: float = 0) -> None:
        super().__init__()
        self.inner, self.config, self.generation_config, self.device = (
            model,
            model.config,
            model.generation_config,
            model.device,
        )
        self._moves, self._calls = (by_call, by_rows, by_cache), 0

    def forward(
        self, input_ids: Any = None, past_key_values: Any = None, logits_to_keep: int = 0, **arguments: Any
    ) -> Any:
        output = self.inner(
            input_ids=input_ids, past_key_values=past_key_values, logits_to_keep=logits_to_keep, **arguments
        )
        self._calls += 1
        moved = torch.arange(output.logits.shape[-1]) % 7
        causes = (self._calls % 5, input_ids.shape[-1] > 1, past_key_values is not None)
        output.logits = output.logits + moved * sum(
            move * cause for move, cause in zip(self._moves, causes, strict=True)
        )
        return output
