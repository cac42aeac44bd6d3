"""Kernels for bfloat16, int8, int4 and the blocks of GGUF files: their weights, their rounding, their rows."""

from collections.abc import Callable

import pytest
import torch
from tiny import tiny_llama
from torch import nn

from utils.decode.engine_forward import prefill_pass
from utils.engine import block_kernels
from utils.engine.block_kernels import (
    Bfloat16Kernel,
    Int4Kernel,
    Int8Kernel,
    KnownLayers,
    bfloat16_kernel,
    block_kernel,
    format_builder,
)
from utils.engine.kernels import MAX_ROWS, BlockedKernel, Kernel, PackedKernel
from utils.engine.module_swap import restore_linears, swap_linears
from utils.engine.weight_blocks import BlockWeight, round_int4, round_int8
from utils.engine.weight_format import EngineWeights

Form = Callable[[torch.Tensor], BlockWeight]
ROWS = [1, 5, MAX_ROWS, MAX_ROWS + 1, 100]
NEEDS_BFLOAT16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no instructions for bfloat16"
)


def eight_bits(weight: torch.Tensor, group: int = 32) -> BlockWeight:
    """Like Q8_0."""
    groups = weight.unflatten(1, (-1, group))
    scales = groups.abs().amax(-1) / 127
    values = (groups / scales[..., None]).round().to(torch.int8).flatten(1)
    return BlockWeight(values, scales, None, group, 8)


def five_bits(weight: torch.Tensor) -> BlockWeight:
    """Like Q5_1."""
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(-1), groups.amax(-1)
    values = ((groups - low[..., None]) / ((high - low)[..., None] / 31)).round().to(torch.uint8).flatten(1)
    return BlockWeight(values, (high - low) / 31, low, 32, 5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", [round_int8, round_int4, eight_bits, five_bits])
def test_products_are_close_to_those_of_the_weights_and_row_invariant(form: Form, rows: int) -> None:
    torch.manual_seed(2)
    block, bias, x = form(torch.randn(67, 128)), torch.randn(67), torch.randn(rows, 128)
    kernel = block_kernel(block, bias)
    assert type(kernel) is (Int8Kernel if form is round_int8 else Int4Kernel)
    assert torch.equal(kernel.weight(), block.dense())
    exact = nn.functional.linear(x, block.dense(), bias)
    assert float((kernel(x) - exact).abs().max()) < 0.01 * float(exact.abs().max())
    assert torch.equal(kernel(x), torch.cat([kernel(row) for row in x.split(1)]))
    assert torch.equal(kernel(x[None]), kernel(x)[None])


@pytest.mark.parametrize("form", [round_int8, round_int4, eight_bits])
def test_only_a_long_prefill_unpacks_the_weights(form: Form) -> None:
    torch.manual_seed(5)
    block, bias, x = form(torch.randn(32, 64)), torch.randn(32), torch.randn(200, 64)
    kernel = block_kernel(block, bias)
    assert kernel is not None
    exact, steps = nn.functional.linear(x, block.dense(), bias), kernel(x)
    assert not torch.allclose(steps, exact, atol=1e-4)
    with prefill_pass():
        assert torch.allclose(kernel(x), exact, atol=1e-4)
        assert torch.equal(kernel(x[:70]), steps[:70])


@pytest.mark.parametrize("form", [round_int8, round_int4])
def test_rounded_weights_are_exact_in_the_kernel(form: Form) -> None:
    """Scales of the rounding are values of bfloat16, so the kernel rounds nothing but inputs and outputs."""
    torch.manual_seed(3)
    block = form(torch.randn(32, 64))
    kernel = block_kernel(block, None)
    assert kernel is not None
    assert torch.equal(kernel(torch.eye(64)).T, block.dense().bfloat16().float())


@NEEDS_BFLOAT16
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inputs", [64, 1536])
def test_bfloat16_kernels_are_row_invariant(inputs: int, rows: int) -> None:
    torch.manual_seed(4)
    weight, bias, x = torch.randn(33, inputs), torch.randn(33), torch.randn(rows, inputs)
    kernel = bfloat16_kernel(weight, bias, [1], {})
    assert torch.equal(kernel.weight(), weight.bfloat16().float())
    exact = nn.functional.linear(x, kernel.weight(), bias)
    assert float((kernel(x) - exact).abs().max()) < 0.02 * float(exact.abs().max())
    assert torch.equal(kernel(x), torch.cat([kernel(row) for row in x.split(1)]))


@NEEDS_BFLOAT16
def test_bfloat16_rows_are_padded_where_no_packing_is_row_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_kernels, "is_row_invariant", lambda *arguments: False)
    kernel = bfloat16_kernel(torch.randn(8, 64), None, [1], {})
    assert isinstance(kernel, Bfloat16Kernel) and isinstance(kernel._kernel, BlockedKernel)


def kernels_of(model: nn.Module, weights: EngineWeights) -> dict[str, Kernel]:
    """The kernels of a model in a format, by the names of their layers."""
    swap_linears([model], format_builder(weights, [1], {}, layers=KnownLayers.of([model])))
    return {name: part.fused.kernel for name, part in model.named_modules() if hasattr(part, "fused")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("bfloat16", Bfloat16Kernel, marks=NEEDS_BFLOAT16),
        *(("int8", Int8Kernel), ("int4", Int4Kernel), ("gguf", Int4Kernel)),
    ],
)
def test_every_format_has_its_kernels_and_a_head_in_float32(name: str, kind: type) -> None:
    model = tiny_llama(hidden_size=64)
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    blocks = {name: eight_bits(part.weight) for name, part in linears.items()}
    if name == "gguf":  # of the values that the model holds
        for layer, part in linears.items():
            part.weight.data.copy_(blocks[layer].dense())
    kernels = kernels_of(model, EngineWeights(name, blocks if name == "gguf" else None))
    assert kernels.keys() == linears.keys()
    of_mlps = {type(kernel) for layer, kernel in kernels.items() if layer.endswith("down_proj")}
    assert of_mlps == {Int8Kernel if name == "int4" else kind}
    others = {type(kernel) for layer, kernel in kernels.items() if not layer.endswith(("lm_head", "down_proj"))}
    assert others == {kind}
    assert type(kernels["lm_head"]) is PackedKernel
    ids = torch.arange(1, 13)[None]
    ours = model(ids).logits
    restore_linears([model])  # now with rounded weights
    exact = model(ids).logits
    assert not torch.equal(ours, exact)
    assert torch.nn.functional.cosine_similarity(ours, exact, dim=-1).min() > 0.995


def test_blocks_that_are_not_the_weights_of_a_layer_are_not_used() -> None:
    """A drafter may have layers with the target's names."""
    model, other = tiny_llama(hidden_size=64), tiny_llama(hidden_size=64, seed=1)
    blocks = {name: eight_bits(part.weight) for name, part in other.named_modules() if isinstance(part, nn.Linear)}
    weights = EngineWeights("gguf", blocks)
    layer = "model.layers.0.mlp.up_proj"
    own = model.get_parameter(f"{layer}.weight")
    assert torch.equal(weights.form(layer, own, is_head=False), own)
    part = blocks[layer].dense()[8:24]
    assert torch.equal(weights.form(f"{layer}[8:24]", part, is_head=False).dense(), part)
    assert {type(kernel) for kernel in kernels_of(model, weights).values()} == {PackedKernel}


def test_groups_that_no_kernel_has_are_unpacked() -> None:
    assert block_kernel(eight_bits(torch.randn(16, 64), group=16), None) is None
