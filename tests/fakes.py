"""A session over tiny models, its screen in memory: what the transcript tests type into."""

import json
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from tiny import tiny_llama, tiny_t5, tiny_tokenizer

import infer
from utils.caching import context_length
from utils.commands import default_registry
from utils.kinds import Limits
from utils.printing import Renderer
from utils.records import RecordFile
from utils.settings import Settings
from utils.workbench import Tools, Workbench

VOCABULARY = 300


@dataclass
class Screen:
    """What was written: results and messages apart."""

    out: StringIO
    messages: StringIO
    renderer: Renderer

    def take(self) -> tuple[str, str]:
        """Results and messages since the last look."""
        texts = self.out.getvalue(), self.messages.getvalue()
        for buffer in (self.out, self.messages):
            buffer.seek(0)
            buffer.truncate()
        return texts


def screen(width: int = 120, colour: bool = False) -> Screen:
    out, messages = StringIO(), StringIO()
    consoles = [
        Console(file=buffer, width=width, no_color=not colour, force_terminal=colour or None, highlight=False, markup=False)
        for buffer in (out, messages)
    ]
    return Screen(out, messages, Renderer(*consoles, colour=colour))


def tiny_pair(*, drafter: bool = True, chat: bool = True, kind: str = "llama", **overrides: Any) -> SimpleNamespace:
    """A pair as utils.models.loading.Pair describes it."""
    build = {"llama": tiny_llama, "t5": tiny_t5}[kind]
    tokenizer = tiny_tokenizer(VOCABULARY, chat=chat)
    return SimpleNamespace(
        target=build(seed=0, vocab_size=VOCABULARY, **overrides),
        drafter=build(seed=1, vocab_size=VOCABULARY, **overrides) if drafter else None,
        tokenizer=tokenizer,
        end_ids=frozenset({tokenizer.eos_token_id}),
        target_name="tiny-target",
        drafter_name="tiny-drafter" if drafter else None,
        drafter_kind="model" if drafter else None,
        device="cpu",
        dtype="float32",
        quantize="none",
        drafter_quantize="none" if drafter else None,
        notes=(),
    )


def workbench(view: Screen, pair: Any = None, records: Path | None = None, strategies: Any = infer.STRATEGIES) -> Workbench:
    pair = tiny_pair() if pair is None else pair
    limits = Limits(context_length(pair.target) or 1_000_000, VOCABULARY)
    file = None if records is None else RecordFile(records)
    tools = Tools(strategies, default_registry(), view.renderer, infer.make_storage, file)
    return Workbench(pair, tools, Settings(), limits)


def records_of(path: Path) -> list[dict[str, Any]]:
    """The JSON records of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
