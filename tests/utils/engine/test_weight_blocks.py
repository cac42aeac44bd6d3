"""Weights as small integers with scales: rounding, unpacking, and equal forms."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from utils.engine.weight_blocks import BlockWeight, have_one_form, round_int4, round_int8

Rounding = Callable[[Tensor], BlockWeight]


def test_dense_weights_are_values_times_scales_plus_shifts() -> None:
    values = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 15]], dtype=torch.uint8)
    block = BlockWeight(values, torch.tensor([[1.0, 10.0], [2.0, 0.5]]), torch.tensor([[0.0, 5.0], [-8.0, 1.0]]), 2, 4)
    assert block.dense().tolist() == [[0, 1, 25, 35], [0, 2, 4, 8.5]]
    assert block.rows(1, 2).dense().tolist() == [[0, 2, 4, 8.5]]
    signed = BlockWeight(torch.tensor([[-3, 4]], dtype=torch.int8), torch.tensor([[0.5]]), None, group=2, bits=8)
    assert signed.dense().tolist() == [[-1.5, 2]]
    moved = BlockWeight(values, torch.tensor([[2.0], [0.5]], dtype=torch.float16), None, 4, 4, offset=-8)
    assert moved.dense().tolist() == [[-16, -14, -12, -10], [-2, -1.5, -1, 3.5]]


@pytest.mark.parametrize(("rounding", "steps"), [(round_int8, 254), (round_int4, 15)])
def test_rounding_is_off_by_about_half_a_step(rounding: Rounding, steps: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 96) * torch.rand(24, 1)
    block = rounding(weight)
    assert block.dense().shape == weight.shape
    groups = weight.unflatten(1, (-1, block.group))
    span = 2 * groups.abs().amax(-1) if rounding is round_int8 else groups.amax(-1) - groups.amin(-1)
    error = (block.dense() - weight).abs().unflatten(1, (-1, block.group)).amax(-1)
    assert (error <= 0.75 * span / steps).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 97), (3, 5), (40, 16), (1, 1), (9, 160)])
def test_int8_is_the_nearest_of_254_steps_of_each_row(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Scales are rounded to bfloat16, and may be rounded down."""
    torch.manual_seed(sum(shape))
    weight = (torch.randn(shape) * torch.rand(shape[0], 1)).to(dtype)
    weight[-1] *= min(1, shape[0] - 1)
    rows = weight.float()
    scales = (rows.abs().amax(1, keepdim=True).clamp(min=256 * torch.finfo(torch.float32).tiny) / 127).bfloat16()
    for own in (weight, weight.T.contiguous().T):
        block = round_int8(own)
        assert torch.equal(block.scales, scales.float())
        assert torch.equal(block.values, (rows / scales).round().clamp(-127, 127).to(torch.int8))


@pytest.mark.parametrize("rounding", [round_int8, round_int4])
def test_rows_of_zeros_and_constants_stay(rounding: Rounding) -> None:
    weight = torch.zeros(2, 64)
    assert rounding(weight).dense().tolist() == weight.tolist()


def test_weights_of_one_form_have_equal_groups_bits_signs_and_factors() -> None:
    torch.manual_seed(1)
    first, second = torch.randn(8, 64), torch.randn(16, 64)
    block = round_int4(first)
    assert have_one_form([block, round_int4(second)])
    for other in (round_int8(second), replace(block, shifts=None), replace(block, bits=5), replace(block, offset=0)):
        assert not have_one_form([block, other])
    assert not have_one_form([block, replace(block, values=block.values.to(torch.int8))])


@pytest.mark.parametrize("rounding", [round_int8, round_int4])
def test_weights_that_are_rounded_again_stay_the_same(rounding: Rounding) -> None:
    """An engine that is removed leaves rounded weights, and the next engine must compute the same ones."""
    torch.manual_seed(2)
    once = rounding(torch.randn(200, 256) * torch.rand(200, 1)).dense()
    assert torch.equal(rounding(once).dense(), once)


def test_int4_has_clearly_smaller_errors_than_rounding_between_the_extremes() -> None:
    torch.manual_seed(3)
    weight = torch.randn(200, 256)
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    extremes = ((groups - low) / step).round() * step + low
    assert (round_int4(weight).dense() - weight).square().mean() < 0.9 * (extremes - groups).square().mean()


def plain_round_int4(weight: Tensor) -> BlockWeight:
    """The method of round_int4 with PyTorch's operations."""
    groups = weight.unflatten(1, (-1, 32))
    low, high, mean = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True), groups.mean(-1, keepdim=True)

    def integers(scale: Tensor, minimum: Tensor) -> Tensor:
        return ((groups - minimum) / scale).round().clamp(0, 15)

    def fitted(scale: Tensor, minimum: Tensor) -> list[Tensor]:
        scale = scale.bfloat16().float()
        middle = (minimum + 8 * scale).bfloat16().float()
        values = integers(scale, middle - 8 * scale)
        error = (values * scale + (middle - 8 * scale) - groups).square().sum(-1, keepdim=True)
        return [values, scale.expand_as(low), middle, error]

    best = fitted((high - low) / 15, low)
    for part in (1.0, 0.93, 0.86):
        width = part * (high - low)
        values = integers(width / 15, (low + high) / 2 - width / 2)
        centred = values - values.mean(-1, keepdim=True)
        scale = (centred * groups).sum(-1, keepdim=True) / centred.square().sum(-1, keepdim=True)
        other = fitted(scale, mean - scale * values.mean(-1, keepdim=True))
        best = [torch.where(other[3] < best[3], new, old) for new, old in zip(other, best, strict=True)]
    values, scales, middles, _ = (part.flatten(1) for part in best)
    return BlockWeight(values.to(torch.uint8), scales.bfloat16(), middles.bfloat16(), 32, 4, offset=-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_int4_rounds_as_plain_pytorch_does(dtype: torch.dtype, offset: float) -> None:
    """Sums in another order change the choice in some groups of nearly equal errors, most often if weights have few
    bits.
    """
    torch.manual_seed(4)
    weight = (torch.randn(300, 512) * torch.rand(300, 1) + offset).to(dtype)
    ours, plain = round_int4(weight), plain_round_int4(weight.float())
    for part, least in (("values", 0.99), ("scales", 0.9), ("shifts", 0.95)):
        assert (getattr(ours, part) == getattr(plain, part)).float().mean() > least
    errors = [(block.dense() - weight.float()).square().mean() for block in (ours, plain)]
    assert errors[0] <= errors[1] * 1.0001


@pytest.mark.parametrize("shape", [(1, 32), (3, 160), (1, 544), (37, 96), (1025, 32)])
def test_every_group_is_rounded_alone(shape: tuple[int, int]) -> None:
    """Groups are rounded several at once, and what is left of them with some that are rounded already."""
    torch.manual_seed(sum(shape))
    weight = torch.randn(shape) * torch.rand(shape[0], 1)
    whole = round_int4(weight)
    assert whole.shape == shape and whole.scales.shape == (shape[0], shape[1] // 32)
    for row, column in ((0, 0), (shape[0] - 1, shape[1] - 32), (shape[0] // 2, 0)):
        alone = round_int4(weight[row : row + 1, column : column + 32])
        assert torch.equal(whole.values[row, column : column + 32], alone.values[0])
        assert torch.equal(whole.dense()[row, column : column + 32], alone.dense()[0])


def test_int4_does_not_depend_on_the_number_of_threads() -> None:
    torch.manual_seed(5)
    weight, before = torch.randn(300, 64), torch.get_num_threads()
    try:
        rounded = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            rounded.append(round_int4(weight.bfloat16()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(rounded[0].dense(), rounded[1].dense())
