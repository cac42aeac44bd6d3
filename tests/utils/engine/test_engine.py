"""The engine: windows that give the very bits of single steps, held against plain stepping, and the self-test that says so."""

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from fakes import Screen, checked, tiny_pair, workbench
from tiny import tiny_llama, tiny_mamba, tiny_sliding, tiny_t5
from torch import Tensor, nn

from sampling import autoregressive_generate, speculative_generate
from utils.decode.layer_cut import first_layers
from utils.decode.model_session import ModelSession
from utils.engine import Engine, attention, selftest
from utils.engine.kernels import Bytes, Packed
from utils.engine.module_swap import EngineLinear, restore
from utils.errors import UserError
from utils.logits_processor import MultinomialProcessor
from utils.repl.runner import Verdict

MODELS = {
    "grouped heads": lambda: tiny_llama(vocab_size=96),
    "tied, with biases": lambda: tiny_llama(
        vocab_size=96, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "every head its own": lambda: tiny_llama(vocab_size=96, num_key_value_heads=4, hidden_size=48, head_dim=16),
    "three heads a group": lambda: tiny_llama(
        vocab_size=96, num_attention_heads=6, num_key_value_heads=2, hidden_size=48, head_dim=8
    ),
    "sliding window": lambda: tiny_sliding(vocab_size=96),
}


def stepped(model: Any, context: list[int]) -> Tensor:
    """Logits (T, V), one forward per token."""
    session = ModelSession(model, rewinds=False)
    return torch.cat([session.feed(context[: end + 1], keep=1) for end in range(len(context))])


def walked(model: Any, context: list[int], source: Random) -> None:
    """Random windows, some of them with foreign drafts at their end that are rewound; every logit must be plain stepping's."""
    alone = stepped(model, context)
    session, known = ModelSession(model), 0
    while known < len(context):
        width, foreign = source.randint(1, min(40, len(context) - known)), source.randint(0, 3)
        drafts = [source.randrange(90) for _ in range(foreign)]
        logits = session.feed([*context[: known + width], *drafts], keep=width + foreign)
        known += width
        assert torch.equal(logits[:width], alone[known - width : known])
        session.rewind(known)


@pytest.mark.parametrize("name", MODELS)
def test_windows_at_random_places_have_the_bits_of_single_steps(name: str) -> None:
    model, source = MODELS[name](), Random(name)
    state = Engine([model]).use("auto", 1)
    assert state.kind == "invariant" and state.verified, state
    for _ in range(6):
        walked(model, [source.randrange(96) for _ in range(source.randint(30, 120))], source)


def test_the_walk_would_notice_a_row_that_depends_on_its_company(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["grouped heads"]()
    Engine([model]).use("invariant", 1)
    plain = Packed._product
    monkeypatch.setattr(Packed, "_product", lambda self, x: plain(self, x) * (1 + 1e-6 * (x.shape[-2] > 1)))
    with pytest.raises(AssertionError):
        walked(model, list(range(60)), Random(1))


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_the_plain_engine_computes(name: str) -> None:
    model, context = MODELS[name](), [7 * index % 96 for index in range(50)]
    plain = stepped(model, context)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    engine = Engine([model])
    engine.use("invariant", 1)
    assert any(isinstance(part, EngineLinear) for part in model.modules())
    assert not any(type(part) is nn.Linear for part in model.modules())
    assert torch.allclose(stepped(model, context), plain, atol=1e-4)
    engine.use("plain", 1)
    assert not any(isinstance(part, EngineLinear) for part in model.modules())
    assert {key: value.tolist() for key, value in model.state_dict().items()} == {
        key: value.tolist() for key, value in before.items()
    }
    assert torch.equal(stepped(model, context), plain)


def test_models_that_share_weights_go_on_sharing_them() -> None:
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
def test_other_formats_go_through_full_blocks_and_only_when_asked(dtype: torch.dtype) -> None:
    model = tiny_llama(vocab_size=96).to(dtype)
    engine = Engine([model])
    state = engine.use("auto", 1)
    assert state.kind == "plain" and not state.verified and "float32 only" in state.reason
    assert "bit-identical: not promised" in state.sentence()
    assert engine.use("invariant", 1).verified
    walked(model, [5 * index % 96 for index in range(70)], Random(2))


UNFIT = [
    (tiny_t5, "encoder-decoder"),
    (tiny_mamba, "not full or sliding"),
    (partial(tiny_llama, attn_implementation="eager"), "eager"),
]


@pytest.mark.parametrize(("build", "reason"), UNFIT)
def test_what_it_cannot_compute_stays_plain_with_a_reason(build: Any, reason: str) -> None:
    engine = Engine([build()])
    assert engine.use("auto", 1).kind == "plain"
    assert reason in engine.state.reason
    with pytest.raises(UserError, match=reason):
        engine.use("invariant", 1)


def mistaken(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a mistake that only some widths show."""
    if kind == "linear":  # in whole models only: the kernels' own test has rows without a batch
        plain = Packed._product
        monkeypatch.setattr(
            Packed, "_product", lambda self, x: plain(self, x) * (1 + 1e-6 * (x.dim() == 3 and x.shape[1] == 6))
        )
    elif kind == "attention":
        rows = torch.cat
        monkeypatch.setattr(
            attention.torch, "cat", lambda parts, dim=0: rows(parts, dim) * (1 + 1e-6 * (dim == 1 and len(parts) == 7))
        )
    elif kind == "another model":
        plain = Packed._product
        monkeypatch.setattr(Packed, "_product", lambda self, x: plain(self, x) * 1.01)


MISTAKES = [("linear", "window of 6"), ("attention", "window of 7"), ("another model", "not the plain engine's")]


@pytest.mark.parametrize(("kind", "said"), MISTAKES)
def test_the_self_test_notices(kind: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistaken(kind, monkeypatch)
    model = MODELS["grouped heads"]()
    engine = Engine([model])
    state = engine.use("auto", 1)
    assert (state.kind, state.verified) == ("plain", False)
    assert said in state.reason
    assert all(type(part) is not EngineLinear for part in model.modules())
    with pytest.raises(UserError, match=said):
        engine.use("invariant", 1)


def test_a_drafter_of_its_own_is_tested_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tested: list[tuple[Any, bool]] = []
    monkeypatch.setattr(selftest, "same_bits", lambda model, counts, every_width: tested.append((model, every_width)))
    target, other = tiny_llama(), tiny_llama(seed=1)
    for drafter, every_width in ((other, True), (first_layers(target, 1), False)):
        tested.clear()
        Engine([target, drafter]).use("invariant", 1)
        assert tested == [(target, True), (drafter, every_width)]
        restore([target, drafter])


# In a session.


def test_texts_are_one_under_greedy_and_coupled_sampling() -> None:
    target, drafter = tiny_llama(vocab_size=96), tiny_llama(seed=1, vocab_size=96)
    Engine([target, drafter]).use("invariant", 1)
    for seed in range(12):
        processor = MultinomialProcessor(0.5 + 0.1 * seed) if seed else None
        plain = autoregressive_generate([3, seed, 5], target, 48, processor, None, seed=seed)
        for gamma in (1, 4, 9):
            arguments = {
                "logits_processor": processor,
                "max_gen_len": 48,
                "eos_tokens_id": None,
                "seed": seed,
                "verify": "coupled",
            }
            assert speculative_generate([3, seed, 5], drafter, target, gamma=gamma, **arguments)[0] == plain


def test_commands_switch_engine_and_threads_and_records_say_so(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    bench = workbench(view, records=file)
    record = checked(bench, file, "/engine auto", "/threads 1", "/length 5", "Hello there")
    assert record["engine"] == {"kind": "invariant", "weights": "float32", "verified": True, "threads": 1, "reason": ""}
    assert record["settings"]["engine"] == "auto"
    messages = view.take()[1]
    assert "engine: invariant, float32 weights, 1 thread; bit-identical: verified" in messages
    bench.handle("/audit 2")
    assert "logits are bit-identical in every window" in view.take()[0]
    bench.handle("/engine")
    assert view.take()[1].startswith("engine: auto; now invariant, float32 weights, 1 thread; bit-identical: verified")
    assert checked(bench, file, "/engine plain", "Hello there")["engine"]["kind"] == "plain"
    for line in ("/engine fast", "/threads 0", "/threads many"):
        assert bench.handle(line) is Verdict.FAILED


def test_an_interrupted_exchange_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest, "same_bits", interrupted)
    model = tiny_llama()
    engine = Engine([model])
    with pytest.raises(KeyboardInterrupt):
        engine.use("invariant", 1)
    assert engine.state.kind == "plain"
    assert not any(isinstance(part, EngineLinear) for part in model.modules())
    assert model.config._attn_implementation == "sdpa"


def test_a_number_of_threads_that_was_not_tested_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        engine = Engine([tiny_llama()])
        engine.use("invariant", 1)
        asked: list[list[int]] = []
        monkeypatch.setattr(
            selftest, "same_bits", lambda model, counts, every_width: asked.append(counts) or "a window differs"
        )
        assert engine.use("invariant", 1).verified
        assert asked == []
        state = engine.use("invariant", 7)
        assert asked == [[7]]
        assert (state.threads, state.verified, state.reason) == (7, False, "a window differs")
        state = engine.use("invariant", 1)  # and back: what was promised of one thread still is
        assert (state.threads, state.verified, state.reason) == (1, True, "")
    finally:
        torch.set_num_threads(before)


def test_an_engine_that_cannot_be_had_leaves_everything_as_it_was(view: Screen) -> None:
    bench = workbench(view, tiny_pair(kind="t5", chat=False))
    assert bench.handle("/engine invariant") is Verdict.FAILED
    assert "The invariant engine cannot compute" in view.take()[1]
    assert bench.settings.engine == "plain"
    assert bench.handle("Hello there") is Verdict.DONE


def test_weights_of_one_byte_are_for_good() -> None:
    model = tiny_llama(vocab_size=96)
    engine = Engine([model], bytewise=True)
    state = engine.use("auto", 1)
    assert (state.kind, state.weights, state.verified) == ("invariant", "int8", True)
    assert "int8 weights" in state.sentence()
    walked(model, [5 * index % 96 for index in range(70)], Random(3))
    assert not isinstance(model.lm_head.fused.kernel, Bytes)  # the head decides the tokens
    with pytest.raises(UserError, match="start without --engine-weights"):
        engine.use("plain", 1)
    assert engine.state == state
    with pytest.raises(UserError, match="int8 engine weights cannot be had"):
        Engine([tiny_t5()], bytewise=True)
