"""Noise is a function of its key: reproducible, independent of order, uniform, and never 0 or 1."""

from collections import Counter
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toys import statistic_of

from utils.decode.noise import Domain, Noise, fix_seeds, resolve_seed


def test_uniforms_depend_on_their_key_and_not_on_the_order() -> None:
    noise = Noise(7)
    first = [noise.uniform(Domain.DRAFT, position, 0) for position in range(50)]
    again = [noise.uniform(Domain.DRAFT, position, 0) for position in reversed(range(50))][::-1]
    assert first == again and len(set(first)) == 50


def test_every_part_of_the_key_matters() -> None:
    keys = list(product((1, 2), (0, 1), Domain, (0, 1), (0, 1)))
    values = {Noise(seed, turn).uniform(domain, position, start) for seed, turn, domain, position, start in keys}
    assert len(values) == len(keys)


def independent(noise: type[Noise], *keys: tuple[int, int, Domain, int, int]) -> bool:
    """A chi-square test on the uniforms at two keys (seed, turn, domain, position, start), in an 8 x 8 table.

    It uses 2,000 pairs of uniforms, at seeds that are added to those of the keys. Independent numbers fail with a
    probability below 1e-8 (df = 63, threshold df + 10 sqrt(2 df)). A statistic of 2,000 x 7 results if the two
    numbers are equal.
    """
    pairs = Counter(
        tuple(int(8 * noise(seed + shift, turn).uniform(*rest)) for seed, turn, *rest in keys)
        for shift in range(0, 10_000, 5)
    )
    cells = dict.fromkeys(product(range(8), repeat=2), 1 / 64)
    statistic, threshold, freedom = statistic_of(pairs, cells)
    assert freedom == 63
    return statistic < threshold


KEY = (0, 0, Domain.DRAFT, 2, 1)
OTHER_KEYS = {
    "seed": (1, 0, Domain.DRAFT, 2, 1),
    "turn": (0, 1, Domain.DRAFT, 2, 1),
    "domain": (0, 0, Domain.ACCEPT, 2, 1),
    "position": (0, 0, Domain.DRAFT, 3, 1),
    "start": (0, 0, Domain.DRAFT, 2, 2),
}


@pytest.mark.parametrize("other", OTHER_KEYS.values(), ids=OTHER_KEYS)
def test_uniforms_at_different_keys_are_independent(other: tuple[int, int, Domain, int, int]) -> None:
    """With test_sampled_distribution.py, which enumerates decoders with independent noise, this makes sampling
    exact.
    """
    assert independent(Noise, KEY, other)


class StartIgnored(Noise):
    """A mistake: rounds that overlap use the same numbers."""

    __slots__ = ()

    def uniform(self, domain: Domain, position: int, start: int) -> float:
        return Noise.uniform(self, domain, position, 0)


def test_noise_that_ignores_a_part_of_the_key_is_detected() -> None:
    assert not independent(StartIgnored, KEY, OTHER_KEYS["start"])


def test_uniforms_fill_the_open_interval() -> None:
    """20,000 values: mean within 5 sigma of 1/2, none at an end; largest possible value below 1."""
    values = np.array([Noise(seed).uniform(Domain.ACCEPT, 3, 1) for seed in range(20_000)])
    assert values.min() > 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 5 * (1 / 12 / 20_000) ** 0.5


def test_no_uniform_is_zero_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one more bit the largest would round to 1, and would win every race whatever its weight."""

    def generate(*bits: int) -> None:
        raw = np.array(bits, dtype=np.uint64)
        monkeypatch.setattr(np.random, "Philox", lambda **key: SimpleNamespace(random_raw=lambda count: raw[:count]))

    lowest, highest = 0, 2**64 - 1
    generate(lowest)
    assert 0 < Noise(0).uniform(Domain.ACCEPT, 0, 0) < 2.0**-52
    generate(highest)
    assert Noise(0).uniform(Domain.ACCEPT, 0, 0) == 1 - 2.0**-53
    assert ((highest >> 11) + 0.5) * 2.0**-53 == 1.0  # with one more bit
    generate(2**63, highest)
    assert Noise(0).sample(torch.tensor([1 - 1e-17, 1e-17], dtype=torch.float64) * 0.5, 0) == 0


def test_the_targets_noise_does_not_depend_on_the_round_but_on_the_turn() -> None:
    probs = torch.full((4, 50), 0.02, dtype=torch.float64)
    noise = Noise(3)
    assert (
        list(noise.samples(probs, 5))[1:]
        == list(noise.samples(probs, 6))[:3]
        == [noise.sample(probs[0], position) for position in (6, 7, 8)]
    )
    assert [noise.sample(probs[0], position) for position in range(9)] != [
        Noise(3, 1).sample(probs[0], position) for position in range(9)
    ]


def test_tokens_without_weight_do_not_change_the_draw() -> None:
    """Nor does scaling the distribution: noise is indexed by token id, not by rank."""
    probs = torch.tensor([0.2, 0.0, 0.5, 0.3], dtype=torch.float64)
    for seed in range(200):
        drawn = Noise(seed).sample(probs, 4)
        assert drawn == Noise(seed).sample(torch.cat([probs, torch.zeros(5, dtype=torch.float64)]) * 0.3, 4) != 1


def test_the_draw_over_a_few_ids_equals_the_draw_over_all() -> None:
    """The shortcut for small supports against the whole race. Padding with zeros switches between them."""
    for seed in range(100):
        probs = torch.softmax(torch.randn(30, generator=torch.Generator().manual_seed(seed)).double(), 0)
        padded = torch.cat([probs, torch.zeros(500, dtype=torch.float64)])
        assert Noise(seed).sample(probs, seed) == Noise(seed).sample(padded, seed)


def test_draws_follow_their_weights() -> None:
    """4,000 draws each; every frequency within 5 sigma (false alarm below 1e-5)."""
    trials, probs = 4_000, torch.tensor([0.05, 0.6, 0.0, 0.35], dtype=torch.float64)
    for draw in (lambda seed: Noise(seed).sample(probs, 2), lambda seed: Noise(seed).pick(probs, Domain.DRAFT, 2, 0)):
        counts = np.bincount([draw(seed) for seed in range(trials)], minlength=4)
        for count, probability in zip(counts, probs.tolist(), strict=True):
            assert abs(count - trials * probability) <= 5 * (trials * probability * (1 - probability)) ** 0.5


@pytest.mark.parametrize("token", [0, 3])
def test_a_one_hot_distribution_needs_no_noise(token: int) -> None:
    probs = torch.zeros(4).scatter_(0, torch.tensor(token), 1.0)
    assert Noise(0).sample(probs, 0) == Noise(0).pick(probs, Domain.DRAFT, 0, 0) == token


def test_one_hot_rows_leave_the_device_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers, plain = [], torch.Tensor.tolist
    rows = torch.nn.functional.one_hot(torch.tensor([151_935, 7, 0]), 151_936)
    rows = rows.bfloat16()  # which NumPy lacks, so that rows are read as those of a GPU
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: transfers.append(1) or plain(self))
    for refused in ("item", "__float__", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, refused, None)
    assert list(Noise(1).samples(rows, 0)) == [
        151_935,
        7,
        0,
    ]
    assert Noise(1).pick(torch.eye(9)[4].bfloat16(), Domain.DRAFT, 0, 0) == 4
    assert len(transfers) == 2


def test_fix_seeds_resets_every_random_generator() -> None:
    import random

    def state() -> tuple[float, float, float]:
        fix_seeds(11)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert state() == state()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark


def test_without_a_seed_torch_draws_one() -> None:
    torch.manual_seed(0)
    first, second = resolve_seed(None), resolve_seed(None)
    torch.manual_seed(0)
    assert resolve_seed(None) == first != second
    assert resolve_seed(5) == 5
