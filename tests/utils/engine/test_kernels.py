"""Linear kernels: rows that do not depend on other rows, alone and fused."""

import weakref

import pytest
import torch
from tiny import tiny_llama
from torch import Tensor, nn

from utils.engine import kernels
from utils.engine.kernels import BlockedKernel, PackedKernel, is_row_invariant
from utils.engine.module_swap import FusedKernel, by_weight, swap_linears


@pytest.mark.parametrize("shape", [(64, 32), (96, 576), (50, 1536), (33, 4096)])
def test_packed_kernels_are_row_invariant(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    kernel = kernels.packed_kernel_builder([1], {})(weight, bias)
    assert kernel is not None
    x = torch.randn(3, 37, shape[1])
    assert torch.allclose(kernel(x), nn.functional.linear(x, weight, bias), atol=1e-2)
    assert torch.equal(kernel(x).flatten(0, 1), torch.cat([kernel(row) for row in x.flatten(0, 1).split(1)]))
    assert torch.equal(kernel.weight(), weight)


def test_a_layer_stays_if_no_packing_is_row_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_row_invariant", lambda *arguments: False)
    model = tiny_llama()
    linears = [part for part in model.modules() if type(part) is nn.Linear]
    assert swap_linears([model], by_weight(kernels.packed_kernel_builder([1], {}))) == len(linears)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_parts_add_up_to_the_whole_product(parts: int) -> None:
    torch.manual_seed(1)
    weight, bias, x = torch.randn(24, 96), torch.randn(24), torch.randn(5, 96)
    assert torch.allclose(PackedKernel(weight, bias, parts)(x), x @ weight.T + bias, atol=1e-4)


def test_a_kernel_that_depends_on_the_number_of_rows_is_noticed() -> None:
    weight = torch.randn(16, 32)
    assert is_row_invariant(BlockedKernel(weight, None), 32, [1])

    class Drifting(BlockedKernel):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) + 1e-6 * (len(x) > 8)

    assert not is_row_invariant(Drifting(weight, None), 32, [1])


def test_fused_layers_use_their_own_input_and_release_it() -> None:
    torch.manual_seed(3)
    first, second = nn.Linear(8, 4, bias=False), nn.Linear(8, 6, bias=False)
    weight = torch.cat([first.weight, second.weight]).detach()
    fused = FusedKernel(PackedKernel(weight, None, 1), [4, 6])
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    assert torch.allclose(fused.output(x, 0), x @ first.weight.T, atol=1e-5)
    # A different input, although the product with the first one is still there.
    assert torch.allclose(fused.output(y, 1), y @ second.weight.T, atol=1e-5)
    released = [weakref.ref(x), weakref.ref(y)]
    del x, y
    assert [reference() for reference in released] == [None, None]
