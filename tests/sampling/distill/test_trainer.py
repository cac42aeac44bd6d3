"""The optimizer of a training in float32."""

import pytest
import torch
from torch.nn.functional import cosine_similarity

from sampling.distill.trainer import Muon

STEPS = 3


def trained(kind: type[torch.optim.Muon], shape: tuple[int, int]) -> list[torch.Tensor]:
    """The weights after each step."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(shape, generator=generator))
    optimizer, found = kind([weight], lr=0.1, weight_decay=0.2), [weight.detach().clone()]
    for _ in range(STEPS):
        weight.grad = torch.randn(shape, generator=generator) * torch.arange(1, shape[1] + 1)
        optimizer.step()
        found.append(weight.detach().clone())
    return found


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_muon_is_that_of_torch_up_to_the_rounding_of_bfloat16(shape: tuple[int, int]) -> None:
    ours, theirs = trained(Muon, shape), trained(torch.optim.Muon, shape)
    for place in range(1, STEPS + 1):
        own, other = (weights[place] - weights[place - 1] for weights in (ours, theirs))
        assert cosine_similarity(own.flatten(), other.flatten(), dim=0) > 0.999
        assert float(own.norm()) == pytest.approx(float(other.norm()), rel=0.01)
