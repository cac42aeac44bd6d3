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
