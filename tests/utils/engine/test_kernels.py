"""Kernels of linear layers: the form in which weights are held, and layers that share an input."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import tiny_llama
from torch import Tensor, nn

from utils.engine import compiled_products
from utils.engine.compiled_products import CompiledKernel
from utils.engine.invariant import CompiledBuilder
from utils.engine.layer_engine import unreported
from utils.engine.module_swap import restore_linears, swap_linears
from utils.engine.weight_blocks import BlockWeight, round_int4
from utils.engine.weight_format import EngineWeights

KINDS = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8", "int4": "uint4", "gguf": "int8"}


def eight_bits(weight: Tensor) -> BlockWeight:
    """Like Q8_0."""
    groups = weight.detach().unflatten(1, (-1, 32))
    scales = groups.abs().amax(-1) / 127
    return BlockWeight((groups / scales[..., None]).round().to(torch.int8).flatten(1), scales, None, 32, 8)


def kernels_of(model: Any, weights: EngineWeights) -> dict[str, Any]:
    """The kernels of a model in a format, by the names of their layers."""
    swap_linears([model], CompiledBuilder(weights, [model]), unreported)
    return {name: part.kernel for name, part in model.named_modules() if hasattr(part, "kernel")}


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_every_format_has_its_kernels_and_leaves_its_weights_behind(name: str) -> None:
    """Output heads and the last weights of MLPs keep 8 bits."""
    model = tiny_llama(hidden_size=64)
    linears = linears_of(model)
    blocks = {layer: eight_bits(part.weight) for layer, part in linears.items()}
    if name == "gguf":  # of the values that the model holds
        for layer, part in linears.items():
            part.weight.data.copy_(blocks[layer].dense())
    weights = EngineWeights(name, blocks if name == "gguf" else None)
    kernels = kernels_of(model, weights)
    assert kernels.keys() == linears.keys()
    for layer, kernel in kernels.items():
        has_8_bits = name == "int4" and layer.endswith(("lm_head", "down_proj"))
        assert kernel.form.kind == ("int8" if has_8_bits else KINDS[name]), layer
    ids = torch.arange(1, 13)[None]
    ours = model(ids).logits
    restore_linears([model])  # now with rounded weights
    for layer, part in linears_of(model).items():
        exact = weights.rounded(layer, linears[layer].weight, is_head=layer == "lm_head")
        assert part.weight.dtype == torch.float32 and torch.equal(part.weight, exact.float())
    assert torch.allclose(ours, model(ids).logits, atol=1e-2)  # inputs may be rounded to 16 bits


@pytest.mark.parametrize("short", ["bfloat16", "float16"])
def test_values_of_16_bits_are_held_in_two_bytes(short: str) -> None:
    torch.manual_seed(0)
    exact, narrow = torch.randn(32, 64), torch.randn(16, 64).to(getattr(torch, short))
    narrow[:2, 0] = torch.tensor([3e-5, 65504.0])  # the first one is a subnormal number in float16
    rounded = narrow.float()
    almost = torch.cat([rounded, exact[:1]])
    for weight, kind in ((exact, "float32"), (rounded, short), (narrow, short), (almost, "float32")):
        model: Any = tiny_llama()
        model.lm_head = linear(weight)
        (kernel,) = CompiledBuilder(EngineWeights(), [model])([model.lm_head])
        assert kernel.form.kind == kind and torch.equal(kernel.weight(), weight.float())
        assert torch.equal(kernel(torch.eye(64)), weight.float().T), "a product with a unit vector is a column"


def test_float16_is_widened_for_processors_without_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM would call a function that is not there."""
    monkeypatch.setattr(compiled_products, "cpu_features", lambda: frozenset({"sse2"}))
    monkeypatch.setattr(compiled_products.platform, "machine", lambda: "AMD64")
    torch.manual_seed(0)
    narrow = torch.randn(32, 64).half()
    block = eight_bits(narrow.float())
    halves = replace(block, scales=block.scales.half())
    for weight, exact in ((narrow, narrow.float()), (halves, halves.dense())):
        kernel = CompiledKernel([weight], None)
        assert torch.float16 not in {part.dtype for part in kernel.tensors()} and torch.equal(kernel.weight(), exact)


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return layer


@pytest.mark.parametrize("forms", ["equal", "of two kinds", "of two widths"])
def test_layers_with_the_same_input_are_one_kernel_in_each_form(forms: str) -> None:
    torch.manual_seed(1)
    first, second, x = torch.randn(20, 64), torch.randn(7, 64), torch.randn(5, 64)
    blocks, biases = {}, (torch.randn(20), torch.randn(7))
    if forms == "of two kinds":  # Only one is in the file.
        blocks = {"gate_proj": round_int4(first)}
    elif forms == "of two widths":
        blocks = {"gate_proj": round_int4(first), "up_proj": eight_bits(second)}
    weights = [
        blocks[name].dense() if name in blocks else part for name, part in (("gate_proj", first), ("up_proj", second))
    ]
    layers = [linear(*parts) for parts in zip(weights, biases, strict=True)]
    model: Any = nn.ModuleDict(dict(zip(("gate_proj", "up_proj"), layers, strict=True)))
    model.get_output_embeddings = lambda: nn.Embedding(1, 1)
    exact = [layer(x) for layer in layers]
    swap_linears([model], CompiledBuilder(EngineWeights("gguf", blocks), [model]), unreported)
    assert len({part.kernel for part in model.children()}) == (1 if forms == "equal" else 2)
    assert all(torch.allclose(part(x), own, atol=2e-3) for part, own in zip(model.children(), exact, strict=True))
    assert all(torch.equal(part.weight, own) for part, own in zip(model.children(), weights, strict=True))
    restore_linears([model])
    assert all(torch.equal(part.weight, own) for part, own in zip(model.children(), weights, strict=True))


def test_blocks_that_are_not_the_weights_of_a_layer_are_not_used() -> None:
    """A drafter may have layers with the target's names."""
    model, other = tiny_llama(hidden_size=64), tiny_llama(hidden_size=64, seed=1)
    blocks = {name: eight_bits(part.weight) for name, part in linears_of(other).items()}
    weights = EngineWeights("gguf", blocks)
    layer = "model.layers.0.mlp.up_proj"
    own = model.get_parameter(f"{layer}.weight")
    assert torch.equal(weights.form(layer, own, is_head=False), own)  # type: ignore[arg-type]
    part = blocks[layer].dense()[8:24]
    assert torch.equal(weights.form(f"{layer}[8:24]", part, is_head=False).dense(), part)  # type: ignore[operator]
    assert {kernel.form.kind for kernel in kernels_of(model, weights).values()} == {"float32"}


def test_fused_layers_use_their_own_input_and_release_it() -> None:
    torch.manual_seed(3)
    first, second = nn.Linear(8, 4, bias=False), nn.Linear(8, 6, bias=False)
    fused = CompiledKernel([first.weight, second.weight], None)
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    assert torch.allclose(fused.output(x, 0), x @ first.weight.T, atol=1e-5)
    # A different input, although the product with the first one is still there.
    assert torch.allclose(fused.output(y, 1), y @ second.weight.T, atol=1e-5)
    released = [weakref.ref(x), weakref.ref(y)]
    del x, y
    assert [reference() for reference in released] == [None, None]
