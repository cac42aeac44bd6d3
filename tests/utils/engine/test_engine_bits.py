"""The engine's logits: those of the plain engine, with the bits of single decode steps in every verify pass."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch
from fixed_speeds import prefer
from logit_paths import assert_bits_of_single_steps, stepwise_logits
from tiny import tiny_llama, tiny_sliding
from torch import nn

from sampling import autoregressive_generate, speculative_generate
from utils.bounds import ENGINE_WEIGHTS
from utils.decode.engine_forward import MAX_WIDTH, engine_forward
from utils.decode.layer_cut import first_layers
from utils.decode.model_session import ModelSession
from utils.engine import Engine, invariant
from utils.engine.compiled_products import CompiledKernel
from utils.engine.engine import LAYER_ENGINES
from utils.engine.module_swap import EngineLinear
from utils.engine.weight_blocks import round_int4
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError
from utils.logits_processor import MultinomialProcessor

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


@pytest.mark.parametrize("engine", [name for name, row in LAYER_ENGINES.items() if row.promise])
@pytest.mark.parametrize("name", MODELS)
def test_verify_passes_at_random_positions_have_the_bits_of_single_steps(name: str, engine: str) -> None:
    model, random = MODELS[name](), Random(name)
    state = Engine([model]).use(engine, 1)
    assert state.kind == engine and state.verified, state
    for length in (30, 70):
        assert_bits_of_single_steps(model, [random.randrange(96) for _ in range(length)], random)


def test_the_comparison_notices_a_row_that_depends_on_the_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    Engine([model]).use("invariant", 1)
    product = CompiledKernel.__call__
    monkeypatch.setattr(CompiledKernel, "__call__", lambda self, x: product(self, x) * (1 + 1e-6 * (len(x) > 1)))
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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if index % 2 else ()) for index, name in enumerate(MODELS)]
)
def test_the_logits_are_those_of_the_plain_engine(name: str) -> None:
    torch.set_num_threads(1)
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
    assert ours is not theirs and ours.kernel is theirs.kernel
    engine.use("plain", 1)
    assert cut.model.layers[0].mlp.up_proj.weight is model.model.layers[0].mlp.up_proj.weight
    assert cut.lm_head.weight is model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("kind", "threads"),
    [
        pytest.param(kind, threads, marks=() if threads == 1 + index % 2 else pytest.mark.full)
        for index, kind in enumerate(ENGINE_WEIGHTS)
        for threads in (1, 2)
    ],
)
@torch.no_grad()
def test_every_width_has_the_bits_of_single_steps_in_every_format(kind: str, threads: int) -> None:
    torch.set_num_threads(threads)
    model = llama(hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    blocks = {name: round_int4(part.weight) for name, part in linears.items()}
    if kind == "gguf":
        for name, part in linears.items():
            part.weight.copy_(blocks[name].dense())
    engine = invariant.InvariantEngine([model], [], EngineWeights(kind, blocks if kind == "gguf" else None))
    assert engine.install() == ""
    context = [7 * index % 96 for index in range(5 + MAX_WIDTH)]
    session = ModelSession(model)
    session.feed(context[:5], keep=1)
    other = session.fork()
    alone = torch.cat([other.feed(context[: end + 1], keep=1) for end in range(5, len(context))])
    for width in range(1, MAX_WIDTH + 1):
        assert torch.equal(session.feed(context[: 5 + width], keep=width), alone[:width]), width
        session.rewind(5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_models_in_16_bits_have_the_logits_of_the_same_weights_in_float32(name: str, dtype: torch.dtype) -> None:
    narrow = MODELS[name]().to(dtype)
    wide, context = deepcopy(narrow).float(), [5 * index % 96 for index in range(70)]
    before = {key: part.clone() for key, part in narrow.state_dict().items()}
    engine = Engine([narrow])
    assert engine.use("invariant", 1).verified and Engine([wide]).use("invariant", 1).verified
    assert torch.equal(stepwise_logits(narrow, context), stepwise_logits(wide, context))
    assert_bits_of_single_steps(narrow, context, Random(2))
    with torch.no_grad():
        states = narrow(torch.tensor([context]), output_hidden_states=True).hidden_states
    assert {state.dtype for state in states} == {dtype}, "as their drafters compute"
    engine.use("plain", 1)
    after = narrow.state_dict()
    assert all(after[key].dtype == dtype and torch.equal(after[key], part) for key, part in before.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_16_bits_that_cannot_be_read_have_equal_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant, "read_decoder", lambda model: "its family is not known")
    model, context = llama().to(dtype), [5 * index % 96 for index in range(70)]
    plain = stepwise_logits(model, context)
    assert Engine([model]).use("invariant", 1).verified and engine_forward(model) is None
    assert_bits_of_single_steps(model, context, Random(2))
    ours = stepwise_logits(model, context)
    assert ours.dtype == dtype
    assert torch.dist(ours.float(), plain.float()) < 0.05 * plain.float().norm(), "the same up to rounding"


def test_models_in_float64_are_refused() -> None:
    with pytest.raises(UserError, match="float64"):
        Engine([llama().double()]).use("invariant", 1)


def test_the_drafter_does_not_change_greedy_or_coupled_texts() -> None:
    target, drafter = llama(), llama(seed=1)
    Engine([target, drafter]).use("invariant", 1)
    for seed in range(3):
        processor = MultinomialProcessor(0.5 + 0.4 * seed) if seed else None
        plain = autoregressive_generate([3, seed, 5], target, 36, processor, None, seed=seed)
        options = {"gamma": (1, 4, 9)[seed % 3], "logits_processor": processor, "max_gen_len": 36, "seed": seed}
        drafted = speculative_generate([3, seed, 5], drafter, target, eos_tokens_id=None, verify="coupled", **options)
        assert drafted[0] == plain
