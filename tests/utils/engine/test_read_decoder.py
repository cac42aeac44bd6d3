"""Reading models as a DecoderSpec: the same logits as transformers' forward, or a reason why not."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoder_families import FAMILIES, FAMILY_CONFIGS, in_turn, reference_logits, tiny_model
from tiny import tiny_mamba, tiny_t5
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from utils.decode.layer_cut import first_layers
from utils.engine.decoder_spec import DecoderSpec, LayerSpec, Linear, Norm
from utils.engine.read_decoder import FAMILIES as KNOWN_TYPES
from utils.engine.read_decoder import read_decoder

TOKENS = torch.randint(160, (24,), generator=torch.Generator().manual_seed(1))  # more than any sliding window
# In float64 only the norms round, which transformers computes in float32. Gemma 2 also rounds its attention.
ROUNDING = 1e-5


def read(model: Any) -> DecoderSpec:
    spec = read_decoder(model)
    assert isinstance(spec, DecoderSpec), spec
    return spec


def difference(first: Tensor, second: Tensor) -> float:
    """The largest difference, relative to the spread of the logits."""
    return float((first - second).abs().max() / second.std())


@torch.no_grad()
def differs(spec: DecoderSpec, model: Any) -> float:
    return difference(reference_logits(spec, TOKENS), model(TOKENS[None]).logits[0])


def linears(spec: DecoderSpec) -> Iterator[Linear]:
    yield spec.head
    for layer in spec.layers:
        yield from (layer.query, layer.key, layer.value, layer.output, layer.gate, layer.up, layer.down)


def test_every_known_type_is_tested() -> None:
    assert {model_type for model_type, _ in FAMILY_CONFIGS.values()} == set(KNOWN_TYPES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_read(name: str) -> None:
    """Whole, as a layer cut, and in two number formats."""
    model = tiny_model(name)
    narrow = tiny_model(name).bfloat16()
    check_names(model)
    check_names(narrow)
    check_rotary_tables(read(model), read(narrow))
    model.double()
    assert differs(read(model), model) < ROUNDING
    cut = first_layers(model, 1)
    spec = read(cut)
    assert len(spec.layers) == 1
    assert differs(spec, cut) < ROUNDING


def check_names(model: Any) -> None:
    """Weights are shared with the model, and named as there."""
    spec, state = read(model), model.state_dict()
    assert spec.embedding is model.get_input_embeddings().weight
    assert (spec.head.weight is spec.embedding) == model.config.tie_word_embeddings
    for linear in linears(spec):
        whole, _, rows = linear.name.removesuffix("]").partition("[")
        first, _, last = rows.partition(":")
        for tensor, kind in ((linear.weight, "weight"), (linear.bias, "bias")):
            stored = state.get(f"{whole}.{kind}")
            assert (tensor is None) == (stored is None)
            if tensor is not None:
                part = stored[int(first or 0) : int(last or len(stored))]
                assert (tensor.data_ptr(), tensor.shape, tensor.dtype) == (part.data_ptr(), part.shape, model.dtype)


def check_rotary_tables(exact: DecoderSpec, narrow: DecoderSpec) -> None:
    """They are float32 in every format."""
    for first, second in zip(exact.ropes, narrow.ropes, strict=True):
        for one, other in zip(first(torch.arange(9)), second(torch.arange(9)), strict=True):
            assert one.shape == other.shape == (9, exact.rotary_dim)
            assert one.dtype == other.dtype == torch.float32


def test_hidden_states_have_been_read_before() -> None:
    """Transformers keeps its hooks for hidden states; they change nothing."""
    model = tiny_model("llama").double()
    model(TOKENS[None, :3], output_hidden_states=True)
    assert differs(read(model), model) < ROUNDING


def test_the_scale_of_an_embedding_is_rounded_as_the_model_does() -> None:
    model = tiny_model("gemma", hidden_size=96)
    assert read(model).embedding_scale == pytest.approx(96**0.5)
    model.bfloat16().model.embed_tokens.embed_scale = torch.tensor(96**0.5)
    assert read(model).embedding_scale == 9.8125


def ones(norm: Norm) -> Norm:
    return replace(norm, weight=torch.ones_like(norm.weight))


def layer_mistakes(layer: LayerSpec, ropes: int) -> Iterator[dict[str, Any]]:
    """Fields of a layer as a mistaken reader could return them."""
    for field in ("input_norm", "query_norm", "key_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm"):
        if norm := getattr(layer, field):
            yield {field: ones(norm)}
    # Without rotary positions, the bias of the keys adds the same to all scores of a query.
    for field in ("query", "value", "output", "gate", "up", "down"):
        if getattr(layer, field).bias is not None:
            yield {field: replace(getattr(layer, field), bias=None)}
    if layer.window:
        yield from ({"window": window} for window in (layer.window - 1, layer.window + 1, None))
    yield from ({"rope": rope} for rope in (None, *range(ropes)) if rope != layer.rope)
    yield {"activation": "relu" if layer.activation != "relu" else "silu"}
    yield {"scaling": layer.scaling * 1.1}
    yield {"residual_scale": layer.residual_scale * 1.1}
    yield {"gate": layer.up, "up": layer.gate}


def mistakes(spec: DecoderSpec) -> Iterator[tuple[str, DecoderSpec]]:
    """The specs that a mistaken reader could return, and what is wrong with them."""
    for index, layer in enumerate(spec.layers):
        for wrong in layer_mistakes(layer, len(spec.ropes)):
            layers = (*spec.layers[:index], replace(layer, **wrong), *spec.layers[index + 1 :])
            yield f"{', '.join(wrong)} of layer {index}", replace(spec, layers=layers)
    yield "final norm", replace(spec, final_norm=ones(spec.final_norm))
    for field, neutral in (("embedding_scale", 1.0), ("logit_scale", 1.0), ("logit_softcap", None)):
        if getattr(spec, field) != neutral:
            yield field, replace(spec, **{field: neutral})


@pytest.mark.parametrize("name", in_turn((name,) for name in FAMILIES))
def test_every_part_of_the_spec_is_visible_in_the_logits(name: str) -> None:
    """Without this, a mistake of the reader could stay below the rounding of the comparison."""
    model = tiny_model(name).double()
    with torch.no_grad():
        exact = model(TOKENS[None]).logits[0]
        for mistake, wrong in mistakes(read(model)):
            assert difference(reference_logits(wrong, TOKENS), exact) > 100 * ROUNDING, mistake


class QuantizedLinear(nn.Linear):
    """Not nn.Linear itself, so its weight may mean something else."""


class RemoteCode(LlamaForCausalLM):
    """A class of the same name parts, but not of transformers."""


def with_module(path: str, module: nn.Module) -> Any:
    model = tiny_model("llama")
    model.set_submodule(path, module)
    return model.eval()


def with_sinks() -> Any:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(6))
    return model


def with_hook() -> Any:
    model = tiny_model("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * 2)
    return model


def with_other_forward() -> Any:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.forward = lambda *inputs, **options: None
    return model


def with_mixed_formats() -> Any:
    model = tiny_model("llama")
    model.model.norm.bfloat16()
    return model


def with_parameter(path: str, parameter: nn.Parameter) -> Any:
    model = tiny_model("llama")
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, parameter)
    return model


class QuantizedTensor(Tensor):
    """A tensor whose operations may mean something else."""


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0} | fields}


LONGROPE = rope(
    "longrope",
    partial_rotary_factor=1.0,
    short_factor=[1.0] * 8,
    long_factor=[2.0] * 8,
    factor=2.0,
    original_max_position_embeddings=32,
)

# (what the reason must name, the model)
UNREADABLE: list[tuple[str, Callable[[], Any]]] = [
    ("mamba", tiny_mamba),
    ("t5", tiny_t5),
    ("RemoteCode is not one of transformers", lambda: RemoteCode(tiny_model("llama").config).eval()),
    ("QuickGELU", lambda: tiny_model("qwen2", hidden_act="quick_gelu")),
    ("scores are capped", lambda: tiny_model("gemma2", attn_logit_softcapping=30.0)),
    ("not causal", lambda: tiny_model("gemma3_text", use_bidirectional_attention=True)),
    ("longrope depend on the length", lambda: tiny_model("phi3", **LONGROPE)),
    ("dynamic depend on the length", lambda: tiny_model("llama", **rope("dynamic", factor=2.0))),
    ("proportional", lambda: tiny_model("llama", **rope("proportional"))),
    ("a part of each head", lambda: tiny_model("llama", **rope("linear", factor=2.0, partial_rotary_factor=0.5))),
    ("model.layers.1.mlp.up_proj", lambda: with_module("model.layers.1.mlp.up_proj", QuantizedLinear(96, 96))),
    ("model.layers.0.mlp", lambda: with_module("model.layers.0.mlp", nn.Sequential(nn.Linear(96, 96)))),
    ("model.layers.1.self_attn.sinks", with_sinks),
    ("model.layers.1.mlp", with_hook),
    ("model.layers.1.self_attn", with_other_forward),
    # A module of the same name that another library has put there.
    ("model.layers.0.mlp", lambda: with_module("model.layers.0.mlp", type("LlamaMLP", (nn.Linear,), {})(96, 96))),
    ("LayerNorm", lambda: with_module("model.norm", nn.LayerNorm(96))),
    ("model.layers.0.mlp.up_proj.weight", lambda: with_module("model.layers.0.mlp.up_proj", nn.Linear(96, 32))),
    ("lm_head.weight", lambda: with_parameter("lm_head.weight", nn.Parameter(QuantizedTensor(160, 96)))),
    ("lm_head.weight", lambda: with_parameter("lm_head.weight", nn.Parameter(torch.ones(160, 96).char(), False))),
    ("several devices", lambda: with_parameter("lm_head.weight", nn.Parameter(torch.ones(160, 96, device="meta")))),
    ("number formats", with_mixed_formats),
    ("not in memory", lambda: tiny_model("llama").to("meta")),
    ("training", lambda: tiny_model("llama").train()),
    ("sliding window", lambda: tiny_model("llama", sliding_window=8)),
]


@pytest.mark.parametrize(("part", "build"), UNREADABLE)
def test_what_is_not_known_is_refused_by_name(part: str, build: Callable[[], Any]) -> None:
    reason = read_decoder(build())
    assert isinstance(reason, str)
    assert part in reason
