"""Single products in OpenVINO: float32, and small integers with scales, whose values are kept exactly."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from utils.engine.openvino_engine import unsupported
from utils.engine.openvino_segments import OpenVinoKernel
from utils.engine.weight_blocks import BlockWeight, round_int4, round_int8

INTEGERS = pytest.mark.skipif(bool(unsupported("int8")), reason="this processor has no integer products")
ROWS, INPUTS = 48, 192


def blocks(values: Tensor, group: int, bits: int, *, minimums: bool) -> BlockWeight:
    generator = torch.Generator().manual_seed(7)
    shape = (ROWS, INPUTS // group)
    scales = torch.rand(shape, generator=generator) * 0.02 + 0.01
    low = -torch.rand(shape, generator=generator) * scales * 15
    return BlockWeight(values, scales, low if minimums else None, group=group, bits=bits)


def integers(low: int, high: int, kind: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randint(low, high, (ROWS, INPUTS), generator=generator).to(kind)


# As in the blocks of GGUF files: Q4_0, Q4_1, Q8_0, Q6_K, Q5_1, and rows that share one scale.
FORMS = {
    "4 bits": blocks(integers(-8, 8, torch.int8), 32, 4, minimums=False),
    "4 bits and minimums": blocks(integers(0, 16, torch.uint8), 32, 4, minimums=True),
    "8 bits": blocks(integers(-127, 128, torch.int8), 32, 8, minimums=False),
    "6 bits in groups of 16": blocks(integers(-32, 32, torch.int8), 16, 6, minimums=False),
    "5 bits and minimums": blocks(integers(0, 32, torch.uint8), 32, 5, minimums=True),
    "rows": blocks(integers(-127, 128, torch.int8), INPUTS, 8, minimums=False),
    "larger groups": blocks(integers(0, 16, torch.uint8), 64, 4, minimums=True),
}


@INTEGERS
@pytest.mark.parametrize("name", FORMS)
def test_values_of_blocks_are_kept_exactly(name: str) -> None:
    weight = FORMS[name]
    # OpenVINO rounds inputs to int8. These are integers whose largest value is 127 in every group, so they stay equal.
    x = torch.randint(-126, 127, (5, INPUTS), generator=torch.Generator().manual_seed(9)).float()
    x[:, ::16] = 127
    exact = linear(x.double(), weight.dense().double()).float()
    assert torch.allclose(OpenVinoKernel(weight, None)(x), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


@INTEGERS
@pytest.mark.parametrize("round_weight", [round_int8, round_int4])
def test_bits_of_a_row_with_many_inputs_do_not_depend_on_other_rows(round_weight: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = round_weight(torch.randn(64, 8192, generator=generator))
    kernel, x = OpenVinoKernel(weight, None), torch.randn(12, 8192, generator=generator)
    alone = torch.cat([kernel(row) for row in x.split(1)])
    assert all(torch.equal(kernel(x[:rows]), alone[:rows]) for rows in (2, 4, 5, 9, 12))
    exact = linear(x, weight.dense())
    assert (alone - exact).norm() <= 0.05 * exact.norm()


@INTEGERS
def test_weights_are_still_there_after_passes_of_other_numbers_of_rows() -> None:
    weight = round_int8(torch.randn(960, 960, generator=torch.Generator().manual_seed(1)))
    kernel, x = OpenVinoKernel(weight, None), torch.randn(200, 960, generator=torch.Generator().manual_seed(2))
    exact = linear(x, weight.dense())
    for rows in (1, 3, 11, 12, 40, 65, 200):
        assert (kernel(x[:rows]) - exact[:rows]).norm() <= 0.05 * exact[:rows].norm(), rows


@INTEGERS
@pytest.mark.parametrize("name", FORMS)
def test_bits_of_a_row_do_not_depend_on_other_rows(name: str) -> None:
    kernel = OpenVinoKernel(FORMS[name], None)
    x = torch.randn(70, INPUTS, generator=torch.Generator().manual_seed(10))
    alone = torch.cat([kernel(row) for row in x.split(1)])
    for rows in (2, 3, 5, 9, 11, 24, 65, 70):
        assert torch.equal(kernel(x[-rows:]), alone[-rows:])


def test_float32_equals_pytorch_for_any_leading_dimensions() -> None:
    generator = torch.Generator().manual_seed(11)
    weight, bias = torch.randn(20, 36, generator=generator), torch.randn(20, generator=generator)
    kernel = OpenVinoKernel(weight, bias)
    for shape in [(36,), (3, 36), (2, 4, 36), (0, 36), (2, 100, 36)]:
        x = torch.randn(shape, generator=generator)
        assert torch.allclose(kernel(x), linear(x, weight, bias), atol=1e-4)
    assert torch.equal(kernel.weight(), weight)
    assert sum(part.nbytes for part in kernel.tensors()) == weight.nbytes + bias.nbytes


@INTEGERS
def test_rounded_kernels_are_close_and_name_what_they_keep() -> None:
    generator = torch.Generator().manual_seed(12)
    weight, bias = torch.randn(24, 64, generator=generator), torch.randn(24, generator=generator)
    x = torch.randn(6, 64, generator=generator)
    for rounded, allowed in [(round_int8(weight), 0.01), (round_int4(weight), 0.02)]:
        kernel, exact = OpenVinoKernel(rounded, bias), linear(x, rounded.dense(), bias)
        assert (kernel(x) - exact).norm() < allowed * exact.norm()
        assert torch.equal(kernel.weight(), rounded.dense())
        assert sum(part.nbytes for part in kernel.tensors()) == rounded.nbytes() + bias.nbytes
