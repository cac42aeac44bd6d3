"""The engine's self-test: which errors it notices, what it tests, and when it runs again."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Screen, checked, open_session, tiny_pair
from fixed_speeds import only_engines, prefer
from tiny import tiny_llama

from utils.decode.layer_cut import first_layers
from utils.engine import Engine, attention, invariant, selftest
from utils.engine.kernels import PackedKernel
from utils.engine.module_swap import EngineLinear, restore_linears
from utils.engine.row_attention import RowAttention
from utils.engine.torch_segments import TorchSegments
from utils.errors import UserError
from utils.repl.runner import Verdict

llama = partial(tiny_llama, vocab_size=96)


@pytest.fixture(autouse=True)
def _invariant_is_fastest() -> None:
    prefer("invariant")


def break_rows(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an error that shows only at one verify width, or in every logit ("scale")."""
    product, join = PackedKernel.product, torch.cat
    logits, attend = TorchSegments.logits, RowAttention.attend
    if part == "head":
        monkeypatch.setattr(
            TorchSegments,
            "logits",
            lambda self, x: logits(self, x) * (1 + 1e-6 * (len(x) == 6)),
        )
    elif part == "rows":
        monkeypatch.setattr(
            RowAttention,
            "attend",
            lambda self, query, *rest, prefill: (
                attend(self, query, *rest, prefill=prefill) * (1 + 1e-6 * (len(query) == 7))
            ),
        )
    elif part == "linear":  # only with a batch dimension, so that the tests of single kernels pass
        monkeypatch.setattr(
            PackedKernel,
            "product",
            lambda self, x: product(self, x) * (1 + 1e-6 * (x.dim() == 3 and x.shape[1] == 6)),
        )
    elif part == "attention":
        monkeypatch.setattr(
            attention.torch, "cat", lambda rows, dim=0: join(rows, dim) * (1 + 1e-6 * (dim == 1 and len(rows) == 7))
        )
    else:
        monkeypatch.setattr(PackedKernel, "product", lambda self, x: product(self, x) * 1.01)


ERRORS = [
    ("head", r"\b6 tokens", True),
    ("rows", r"\b7 tokens", True),
    ("linear", r"\b6 tokens", False),
    ("attention", r"\b7 tokens", False),
    ("scale", invariant.DIFFERENT_LOGITS, True),
]


@pytest.mark.parametrize(("part", "reason", "lean"), ERRORS)
def test_the_self_test_notices_an_error(part: str, reason: str, lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    only_engines(monkeypatch, "plain", "invariant")
    break_rows(part, monkeypatch)
    if not lean:  # transformers' forward over the same kernels
        monkeypatch.setattr(invariant, "read_decoder", lambda model: "its family is not known")
    model = llama()
    engine = Engine([model])
    with pytest.raises(UserError, match=reason):
        engine.use("invariant", 1)
    state = engine.use("auto", 1)
    assert (state.kind, state.verified) == ("plain", False)
    assert not any(isinstance(part, EngineLinear) for part in model.modules())


def test_a_separate_drafter_is_tested_at_every_width_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tested: list[tuple[Any, bool]] = []

    def record(model: Any, counts: list[int], *, every_width: bool, report: Any) -> str:
        tested.append((model, every_width))
        return ""

    monkeypatch.setattr(selftest, "width_dependence", record)
    target, other = tiny_llama(), tiny_llama(seed=1)
    for drafter, every_width in ((other, True), (first_layers(target, 1), False)):
        tested.clear()
        Engine([target, drafter]).use("invariant", 1)
        assert tested == [(target, True), (drafter, every_width)]
        restore_linears([target, drafter])


def test_a_new_number_of_threads_is_tested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        engine = Engine([tiny_llama()])
        engine.use("invariant", 1)
        tested: list[list[int]] = []

        def fail(model: Any, counts: list[int], *, every_width: bool, report: Any) -> str:
            tested.append(counts)
            return "logits differ"

        monkeypatch.setattr(selftest, "width_dependence", fail)
        assert engine.use("invariant", 1).verified
        assert tested == []
        state = engine.use("invariant", 7)
        assert tested == [[7]]
        assert (state.threads, state.verified, state.reason) == (7, False, "logits differ")
        state = engine.use("invariant", 1)  # back to a tested number: it is still verified
        assert (state.threads, state.verified, state.reason) == (1, True, "")
    finally:
        torch.set_num_threads(before)


def test_the_self_test_runs_again_on_request(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_engines(monkeypatch, "plain", "invariant")
    file, pair = tmp_path / "runs.jsonl", tiny_pair()
    session = open_session(view, pair, records=file)
    checked(session, file, "/engine auto", "/threads 1", "/length 5", "Hello there")
    costs = session.settings.costs
    break_rows("head", monkeypatch)
    assert session.handle("/engine test") is Verdict.DONE
    assert (pair.engine.state.kind, pair.engine.state.verified) == ("plain", False)
    assert pair.engine.state.sentence() in view.take()[1] and session.settings.costs == costs
    monkeypatch.undo()
    record = checked(session, file, "/engine test", "Hello there")
    assert record["engine"]["verified"] and record["settings"]["engine"] == "auto"
