"""Noise is a function of its key: reproducible, independent of order, uniform, and never 0 or 1."""

import numpy as np
import pytest
import torch

from utils.seeding import Domain, Noise, fix_seeds, resolve_seed


def test_uniforms_are_keyed_not_drawn_in_turn() -> None:
    noise = Noise(7)
    first = [noise.uniform(Domain.DRAFT, position, 0) for position in range(50)]
    again = [noise.uniform(Domain.DRAFT, position, 0) for position in reversed(range(50))][::-1]
    assert first == again and len(set(first)) == 50


def test_every_part_of_the_key_matters() -> None:
    keys = [(seed, domain, position, start) for seed in (1, 2) for domain in Domain for position in (0, 1) for start in (0, 1)]
    values = {Noise(seed).uniform(domain, position, start) for seed, domain, position, start in keys}
    assert len(values) == len(keys)


def test_uniforms_fill_the_open_interval() -> None:
    """20,000 values: mean within 5 sigma of 1/2, none at an end; largest possible value below 1."""
    values = np.array([Noise(seed).uniform(Domain.ACCEPT, 3, 1) for seed in range(20_000)])
    assert values.min() > 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 5 * (1 / 12 / 20_000) ** 0.5
    assert ((2**52 - 1) + 0.5) * 2.0**-52 < 1.0


def test_the_targets_token_depends_on_the_law_at_its_own_ids_only() -> None:
    """Adding a token of no weight, or scaling the law, changes no draw: noise is indexed by token id, not by rank."""
    law = torch.tensor([0.2, 0.0, 0.5, 0.3], dtype=torch.float64)
    for seed in range(200):
        drawn = Noise(seed).sample(law, 4)
        assert drawn == Noise(seed).sample(torch.cat([law, torch.zeros(5, dtype=torch.float64)]) * 0.3, 4) != 1


def test_the_draw_over_a_few_ids_equals_the_draw_over_all() -> None:
    """The shortcut for laws of small support against the whole race: padding with zeros switches between them."""
    for seed in range(100):
        law = torch.softmax(torch.randn(30, generator=torch.Generator().manual_seed(seed)).double(), 0)
        padded = torch.cat([law, torch.zeros(500, dtype=torch.float64)])
        assert Noise(seed).sample(law, seed) == Noise(seed).sample(padded, seed)


def test_draws_follow_their_weights() -> None:
    """10,000 draws each; every frequency within 5 sigma (false alarm under 1e-5)."""
    law = torch.tensor([0.05, 0.6, 0.0, 0.35], dtype=torch.float64)
    for draw in (lambda seed: Noise(seed).sample(law, 2), lambda seed: Noise(seed).pick(law, Domain.DRAFT, 2, 0)):
        counts = np.bincount([draw(seed) for seed in range(10_000)], minlength=4)
        for count, probability in zip(counts, law.tolist(), strict=True):
            assert abs(count - 10_000 * probability) <= 5 * (10_000 * probability * (1 - probability)) ** 0.5


@pytest.mark.parametrize("token", [0, 3])
def test_a_one_hot_law_needs_no_noise(token: int) -> None:
    law = torch.zeros(4).scatter_(0, torch.tensor(token), 1.0)
    assert Noise(0).sample(law, 0) == Noise(0).pick(law, Domain.DRAFT, 0, 0) == token


def test_fixing_seeds_puts_every_source_into_the_same_state() -> None:
    import random

    def state() -> tuple[float, float, float]:
        fix_seeds(11)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert state() == state()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark


def test_no_seed_draws_one_and_moves_torch_on() -> None:
    torch.manual_seed(0)
    first, second = resolve_seed(None), resolve_seed(None)
    torch.manual_seed(0)
    assert resolve_seed(None) == first != second
    assert resolve_seed(5) == 5
