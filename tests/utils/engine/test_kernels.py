"""Linear kernels: rows that do not depend on their company, one by one and fused."""

import pytest
import torch
from tiny import tiny_llama
from torch import Tensor, nn

from utils.engine.kernels import ROWS, Blocked, Bytes, Packed, bits_agree, packing
from utils.engine.module_swap import Fused, swap


@pytest.mark.parametrize("shape", [(64, 32), (96, 576), (50, 1536), (33, 4096)])
def test_packing_finds_a_way_that_keeps_the_bits(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    kernel = packing([1])(weight, bias)
    assert kernel is not None
    x = torch.randn(3, 37, shape[1])
    assert torch.allclose(kernel(x), nn.functional.linear(x, weight, bias), atol=1e-2)
    assert torch.equal(kernel(x).flatten(0, 1), torch.cat([kernel(row) for row in x.flatten(0, 1).split(1)]))
    assert torch.equal(kernel.weight(), weight)


def test_where_no_way_keeps_the_bits_the_layer_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.engine.kernels.bits_agree", lambda *arguments: False)
    model = tiny_llama()
    assert swap([model], packing([1])) == len([part for part in model.modules() if type(part) is nn.Linear])


def test_parts_are_added_to_the_whole() -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(24, 96), torch.randn(5, 96)
    for parts in (1, 2, 3, 4):
        assert torch.allclose(Packed(weight, None, parts)(x), x @ weight.T, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5, ROWS, ROWS + 1, 100])
def test_bytes_are_near_the_weights_and_rows_keep_their_bits(rows: int) -> None:
    torch.manual_seed(2)
    weight, bias, x = torch.randn(64, 128), torch.randn(64), torch.randn(rows, 128)
    kernel = Bytes(weight, bias)
    assert float((kernel.weight() - weight).abs().max()) <= float(weight.abs().max()) / 127
    exact = nn.functional.linear(x, kernel.weight(), bias)
    assert float((kernel(x) - exact).abs().max()) < 0.02 * float(exact.abs().max())
    assert torch.equal(kernel(x), torch.cat([kernel(row) for row in x.split(1)]))


def test_bits_agree_tells_a_kernel_that_looks_at_the_width() -> None:
    weight = torch.randn(16, 32)
    assert bits_agree(Blocked(weight, None), 32, [1])

    class Drifting(Blocked):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) + 1e-6 * (len(x) > 8)

    assert not bits_agree(Drifting(weight, None), 32, [1])


def test_fused_layers_answer_for_their_own_input_only() -> None:
    torch.manual_seed(3)
    first, second = nn.Linear(8, 4, bias=False), nn.Linear(8, 6, bias=False)
    weight = torch.cat([first.weight, second.weight]).detach()
    fused = Fused(Packed(weight, None, 1), [4, 6])
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    assert torch.allclose(fused.output(x, 0), x @ first.weight.T, atol=1e-5)
    assert torch.allclose(
        fused.output(y, 1), y @ second.weight.T, atol=1e-5
    )  # another input, though the first one's is at hand
    assert fused._input is None and fused._outputs == ()
