"""The engine: verify passes have the bits of single decode steps, and its self-test notices if they do not."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from fakes import Screen, checked, open_session, tiny_pair
from fixed_speeds import only_engines, prefer
from logit_paths import assert_bits_of_single_steps, stepwise_logits
from tiny import tiny_llama, tiny_mamba, tiny_sliding, tiny_t5
from torch import nn

from sampling import autoregressive_generate, speculative_generate
from utils.bounds import ENGINES
from utils.decode.engine_forward import engine_forward
from utils.decode.layer_cut import first_layers
from utils.engine import Engine, attention, invariant, openvino_support, selftest
from utils.engine.block_kernels import Int8Kernel
from utils.engine.engine_table import LAYER_ENGINES
from utils.engine.kernels import PackedKernel
from utils.engine.module_swap import EngineLinear, restore_linears
from utils.engine.row_attention import RowAttention
from utils.engine.torch_segments import TorchSegments
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError
from utils.logits_processor import MultinomialProcessor
from utils.repl.runner import Verdict

llama = partial(tiny_llama, vocab_size=96)
MODELS = {
    "grouped heads": llama,
    "tied, with biases": partial(llama, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "one key head per query head": partial(llama, num_key_value_heads=4, hidden_size=48, head_dim=16),
    "three query heads per group": partial(
        llama, num_attention_heads=6, num_key_value_heads=2, hidden_size=48, head_dim=8
    ),
    "sliding window": partial(tiny_sliding, vocab_size=96),
}


@pytest.fixture(autouse=True)
def _invariant_is_fastest() -> None:
    prefer("invariant")


def test_every_engine_has_a_name_that_can_be_chosen() -> None:
    assert set(ENGINES) == {"auto", *LAYER_ENGINES}


@pytest.mark.parametrize("engine", [name for name, row in LAYER_ENGINES.items() if row.build.promise])
@pytest.mark.parametrize("name", MODELS)
def test_verify_passes_at_random_positions_have_the_bits_of_single_steps(name: str, engine: str) -> None:
    model, random = MODELS[name](), Random(name)
    state = Engine([model]).use(engine, 1)
    assert state.kind == engine and state.verified, state
    for length in (30, 60, 100):
        assert_bits_of_single_steps(model, [random.randrange(96) for _ in range(length)], random)


def test_auto_takes_the_fastest_engine() -> None:
    state = Engine([llama()]).use("auto", 1)
    assert (state.kind, state.verified, state.threads, state.reason) == ("invariant", True, 1, "")
    prefer("plain")
    state = Engine([llama()]).use("auto", 1)
    assert (state.kind, state.verified) == ("plain", False) and "invariant" in state.reason


def test_the_comparison_notices_a_row_that_depends_on_the_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    Engine([model]).use("invariant", 1)
    product = PackedKernel.product
    monkeypatch.setattr(PackedKernel, "product", lambda self, x: product(self, x) * (1 + 1e-6 * (x.shape[-2] > 1)))
    with pytest.raises(AssertionError):
        assert_bits_of_single_steps(model, list(range(60)), Random(1))


def test_a_lean_forward_that_differs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    read = invariant.read_decoder
    monkeypatch.setattr(invariant, "read_decoder", lambda model: replace(read(model), logit_scale=1.01))
    model = llama()
    plain = stepwise_logits(model, [7 * index % 96 for index in range(50)])
    assert Engine([model]).use("invariant", 1).verified
    assert engine_forward(model) is None
    assert torch.allclose(stepwise_logits(model, [7 * index % 96 for index in range(50)]), plain, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_the_plain_engine(name: str) -> None:
    model, context = MODELS[name](), [7 * index % 96 for index in range(50)]
    plain = stepwise_logits(model, context)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    engine = Engine([model])
    engine.use("invariant", 1)
    assert any(isinstance(part, EngineLinear) for part in model.modules())
    assert not any(type(part) is nn.Linear for part in model.modules())
    assert torch.allclose(stepwise_logits(model, context), plain, atol=1e-4)
    engine.use("plain", 1)
    assert not any(isinstance(part, EngineLinear) for part in model.modules())
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
    assert torch.equal(stepwise_logits(model, context), plain)


def test_models_that_share_weights_still_share_them() -> None:
    model = MODELS["tied, with biases"]()
    cut = first_layers(model, 1)
    engine = Engine([model, cut])
    engine.use("invariant", 1)
    ours, theirs = model.model.layers[0].mlp.up_proj, cut.model.layers[0].mlp.up_proj
    assert ours is not theirs and ours.fused is theirs.fused
    engine.use("plain", 1)
    assert cut.model.layers[0].mlp.up_proj.weight is model.model.layers[0].mlp.up_proj.weight
    assert cut.lm_head.weight is model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_formats_are_computed_in_full_blocks(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    assert Engine([model]).use("invariant", 1).verified
    assert_bits_of_single_steps(model, [5 * index % 96 for index in range(70)], Random(2))


UNSUPPORTED = [
    (tiny_t5, "encoder-decoder"),
    (tiny_mamba, "full nor sliding attention"),
    (partial(tiny_llama, attn_implementation="eager"), "eager"),
]


@pytest.mark.parametrize(("build", "reason"), UNSUPPORTED)
def test_unsupported_models_stay_plain_for_a_reason(build: Any, reason: str) -> None:
    engine = Engine([build()])
    if reason == "eager" and openvino_support.unsupported("float32") is None:  # it has an attention of its own
        assert engine.use("auto", 1).kind in ("plain", "openvino")
    else:
        assert engine.use("auto", 1).kind == "plain" and reason in engine.state.reason
    with pytest.raises(UserError, match=reason):
        engine.use("invariant", 1)


def break_rows(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an error that shows only at one verify width, or in every logit ("scale")."""
    product, join = PackedKernel.product, torch.cat
    logits, attend = TorchSegments.logits, RowAttention.attend
    if part == "head":
        monkeypatch.setattr(
            TorchSegments,
            "logits",
            lambda self, x, prefill: logits(self, x, prefill=prefill) * (1 + 1e-6 * (len(x) == 6)),
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


def test_one_layer_engine_replaces_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYER_ENGINES, "second", LAYER_ENGINES["invariant"])
    model = llama()
    engine, weight = Engine([model]), model.lm_head.weight.clone()
    for name, kind in (("second", "second"), ("auto", "invariant"), ("second", "second"), ("plain", "plain")):
        assert engine.use(name, 1).kind == kind
        assert isinstance(model.lm_head, EngineLinear) is (kind != "plain")
    assert torch.equal(model.lm_head.weight, weight) and model.config._attn_implementation == "sdpa"


def test_an_interrupted_installation_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any, **options: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest, "width_dependence", interrupt)
    model = tiny_llama()
    engine = Engine([model])
    with pytest.raises(KeyboardInterrupt):
        engine.use("invariant", 1)
    assert engine.state.kind == "plain"
    assert not any(isinstance(part, EngineLinear) for part in model.modules())
    assert model.config._attn_implementation == "sdpa"


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


def test_int8_weights_cannot_be_taken_back() -> None:
    model = llama()
    engine = Engine([model], weights=EngineWeights("int8"))
    state = engine.use("auto", 1)
    assert (state.kind, state.weights, state.verified) == ("invariant", "int8", True)
    assert_bits_of_single_steps(model, [5 * index % 96 for index in range(70)], Random(3))
    assert not isinstance(model.lm_head.fused.kernel, Int8Kernel)  # the output head decides the tokens
    with pytest.raises(UserError, match="--engine-weights"):
        engine.use("plain", 1)
    assert engine.state == state
    with pytest.raises(UserError, match="encoder-decoder"):
        Engine([tiny_t5()], weights=EngineWeights("int8"))


def test_the_drafter_does_not_change_greedy_or_coupled_texts() -> None:
    target, drafter = llama(), llama(seed=1)
    Engine([target, drafter]).use("invariant", 1)
    for seed in range(6):
        processor = MultinomialProcessor(0.5 + 0.2 * seed) if seed else None
        plain = autoregressive_generate([3, seed, 5], target, 36, processor, None, seed=seed)
        options = {"gamma": (1, 4, 9)[seed % 3], "logits_processor": processor, "max_gen_len": 36, "seed": seed}
        drafted = speculative_generate([3, seed, 5], drafter, target, eos_tokens_id=None, verify="coupled", **options)
        assert drafted[0] == plain


def test_commands_change_the_engine_and_records_name_it(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", tiny_pair()
    session = open_session(view, pair, records=file)
    record = checked(session, file, "/engine auto", "/threads 1", "/length 5", "Hello there")
    table = record["engine"].pop("table")
    assert record["engine"].pop("faster_baseline") is None
    assert table["invariant"]["verified"] and table["invariant"]["nbytes"] >= table["plain"]["nbytes"] > 0
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
    widths = next(row for row in checked(session, file, "/audit 2")["findings"] if row["mode"] == "width")
    assert widths["largest_logit_difference"] == 0
    view.take()
    session.handle("/engine")
    assert pair.engine.state.sentence() in view.take()[1]
    assert checked(session, file, "/engine plain", "Hello there")["engine"]["kind"] == "plain"
    for line in ("/engine fast", "/threads 0", "/threads many"):
        assert session.handle(line) is Verdict.FAILED


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


def test_an_engine_that_is_not_available_changes_nothing(view: Screen) -> None:
    session = open_session(view, tiny_pair(kind="t5", chat=False))
    assert session.handle("/engine invariant") is Verdict.FAILED
    assert "encoder-decoder" in view.take()[1]
    assert session.settings.engine == "plain"
    assert session.handle("Hello there") is Verdict.DONE
