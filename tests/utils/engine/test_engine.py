"""The engine: what can be chosen, installed, replaced and undone, and the commands that do so."""

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from fakes import Screen, checked, open_session, tiny_pair
from fixed_speeds import prefer
from logit_paths import assert_bits_of_single_steps
from tiny import tiny_llama, tiny_mamba, tiny_t5

from utils.bounds import ENGINES
from utils.engine import Engine
from utils.engine.engine import LAYER_ENGINES
from utils.engine.module_swap import EngineLinear
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError
from utils.repl.repl_session import Verdict

llama = partial(tiny_llama, vocab_size=96)


@pytest.fixture(autouse=True)
def _invariant_is_fastest() -> None:
    prefer("invariant")


def test_every_engine_has_a_name_that_can_be_chosen() -> None:
    assert set(ENGINES) == {"auto", *LAYER_ENGINES}


def test_auto_takes_the_fastest_engine() -> None:
    state = Engine([llama()]).use("auto", 1)
    assert (state.kind, state.verified, state.threads, state.reason) == ("invariant", True, 1, "")
    prefer("plain")
    state = Engine([llama()]).use("auto", 1)
    assert (state.kind, state.verified) == ("plain", False) and "equal bits" in state.reason


UNSUPPORTED = [
    (tiny_t5, "encoder-decoder"),
    (tiny_mamba, "full nor sliding attention"),
    (partial(tiny_llama, attn_implementation="eager"), "eager"),
]


@pytest.mark.parametrize(("build", "reason"), UNSUPPORTED)
def test_unsupported_models_stay_plain_for_a_reason(build: Any, reason: str) -> None:
    engine = Engine([build()])
    assert engine.use("auto", 1).kind == "plain" and reason in engine.state.reason
    with pytest.raises(UserError, match=reason):
        engine.use("invariant", 1)


def test_one_layer_engine_replaces_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYER_ENGINES, "second", LAYER_ENGINES["invariant"])
    model = llama()
    engine, weight = Engine([model]), model.lm_head.weight.clone()
    for name, kind in (("second", "second"), ("auto", "invariant"), ("second", "second"), ("plain", "plain")):
        assert engine.use(name, 1).kind == kind
        assert isinstance(model.lm_head, EngineLinear) is (kind != "plain")
    assert torch.equal(model.lm_head.weight, weight) and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["auto", "invariant"])
def test_a_wrapper_that_hides_the_arguments_of_the_forward_pass_stays_in_place(name: str) -> None:
    prefer("invariant")
    model = tiny_llama(vocab_size=96)
    forward = model.forward
    wrapper = model.forward = lambda *arguments, **options: forward(*arguments, **options)
    engine = Engine([model])
    state = engine.use(name, 1)
    assert (state.kind, state.verified) == ("invariant", True)
    assert engine.use("plain", 1).kind == "plain" and vars(model)["forward"] is wrapper


def test_int8_weights_cannot_be_taken_back() -> None:
    model = llama()
    engine = Engine([model], weights=EngineWeights("int8"))
    state = engine.use("auto", 1)
    assert (state.kind, state.weights, state.verified) == ("invariant", "int8", True)
    assert_bits_of_single_steps(model, [5 * index % 96 for index in range(70)], Random(3))
    with pytest.raises(UserError, match="--engine-weights"):
        engine.use("plain", 1)
    assert engine.state == state
    with pytest.raises(UserError, match="encoder-decoder"):
        Engine([tiny_t5()], weights=EngineWeights("int8"))


def test_commands_change_the_engine_and_records_name_it(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", tiny_pair()
    session = open_session(view, pair, records=file)
    record = checked(session, file, "/engine auto", "/threads 1", "/length 5", "Hello there")
    table = record["engine"].pop("table")
    assert record["engine"].pop("faster_baseline") is None
    assert table["invariant"]["verified"] and not table["plain"]["verified"]
    assert record["engine"] == {
        "kind": "invariant",
        "weights": "float32",
        "verified": True,
        "threads": 1,
        "reason": "",
        "tested_on": "",
    }
    assert record["settings"]["engine"] == "auto"
    assert pair.engine.state.sentence() in view.take()[1]
    logits = next(row for row in checked(session, file, "/audit 2")["findings"] if row["mode"] == "logits")
    assert logits["largest_logit_difference"] == 0
    view.take()
    session.handle("/engine")
    assert pair.engine.state.sentence() in view.take()[1]
    assert checked(session, file, "/engine plain", "Hello there")["engine"]["kind"] == "plain"
    for line in ("/engine fast", "/threads -1", "/threads many"):
        assert session.handle(line) is Verdict.FAILED


def test_an_engine_that_is_not_available_changes_nothing(view: Screen) -> None:
    session = open_session(view, tiny_pair(kind="t5", chat=False))
    assert session.handle("/engine invariant") is Verdict.FAILED
    assert "encoder-decoder" in view.take()[1]
    assert session.settings.engine == "plain"
    assert session.handle("Hello there") is Verdict.DONE
