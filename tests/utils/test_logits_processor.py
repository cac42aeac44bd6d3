"""Processors are pure and exact: order of operations, ties, extremes, and fast paths that equal a simple reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.decode.decoding import Decoding
from utils.decode.noise import Noise
from utils.errors import UserError
from utils.logits_processor import (
    GreedyProcessor,
    InvalidLogits,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
    highest,
    nucleus_probs,
    stable_topk,
    top_tokens,
)

ALL = [
    GreedyProcessor(),
    MultinomialProcessor(0.7),
    TopKProcessor(1.3, 4),
    NucleusProcessor(0.9, 0.8),
    TopKNucleusProcessor(0.9, 5, 0.7),
]
ROWS = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5, 1.0, 2.0, 4.0, -math.inf]), min_size=2, max_size=12)


def reference(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Pure Python: a stable sort by (-probability, id), then the cuts."""
    top = max(logits)
    weights = [math.exp((logit - top) / temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))[:top_k]
    total, reached, nucleus = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if reached / total >= top_p:
            break
        nucleus.append(token)
        reached += weights[token]
    return [weights[token] / reached if token in nucleus else 0.0 for token in range(len(weights))]


@given(
    row=ROWS,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(1, 12),
    top_p=st.sampled_from([0.05, 0.33, 0.6, 0.9, 1.0]),
)
def test_distributions_equal_the_reference(row: list[float], temperature: float, top_k: int, top_p: float) -> None:
    if max(row) == -math.inf:
        return
    logits = torch.tensor([row, row])
    cases = [  # processor, (top_k, top_p)
        (MultinomialProcessor(temperature), (len(row), 1.0)),
        (TopKProcessor(temperature, top_k), (top_k, 1.0)),
        (NucleusProcessor(temperature, top_p), (len(row), top_p)),
        (TopKNucleusProcessor(temperature, top_k, top_p), (top_k, top_p)),
    ]
    for processor, (count, mass) in cases:
        expected = torch.tensor(reference(row, temperature, count, mass), dtype=torch.float64)
        for probs in processor(logits):
            torch.testing.assert_close(probs, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("processor", ALL, ids=str)
def test_distributions_are_normalised_float64_and_logits_are_not_modified(processor) -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    probs = processor(logits)
    assert probs.shape == logits.shape and probs.dtype == (
        torch.float32 if processor.name == "greedy" else torch.float64
    )
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 3, dtype=probs.dtype))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("processor", ALL, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_invalid_rows_raise(processor, bad: float) -> None:
    logits = torch.zeros(2, 6)
    logits[1, 3] = bad
    with pytest.raises(InvalidLogits):
        processor(logits)
    with pytest.raises(InvalidLogits):
        processor(torch.full((1, 6), -math.inf))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(rows=st.lists(st.lists(st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf]), min_size=5, max_size=5)))
@settings(max_examples=50, deadline=None)
def test_the_highest_entry_is_that_of_a_list(dtype, rows) -> None:
    """The first one of equal entries, and NaN before all numbers."""
    if rows:
        tops, ids = zip(*highest(torch.tensor(rows, dtype=dtype)[:, 1:]), strict=True)
        found = [[(math.isnan(value), math.isnan(value) or value) for value in row[1:]] for row in rows]
        expected = [own.index(max(own)) for own in found]
        assert list(ids) == expected
        assert str(list(tops)) == str([row[1 + index] for row, index in zip(rows, expected, strict=True)])


def test_one_thread_is_used_in_the_block_alone() -> None:
    before, seen = torch.get_num_threads(), list[int]()

    class Seen(GreedyProcessor):
        def __call__(self, logits: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return super().__call__(logits)

    try:
        torch.set_num_threads(2)
        decoding = Decoding.of(Seen(), 4, end_ids=None, seed=0)
        decoding.probs(torch.zeros(1, 6), "model")
        with pytest.raises(UserError):
            decoding.probs(torch.full((1, 6), math.nan), "model")
        assert seen == [1, 1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("processor", ALL, ids=str)
def test_minus_infinity_is_probability_zero(processor) -> None:
    probs = processor(torch.tensor([[-math.inf, 1.0, -math.inf, 0.5]]))
    assert probs[0, 0] == probs[0, 2] == 0 and probs.sum() == pytest.approx(1.0)


def test_ties_go_to_the_lowest_id() -> None:
    tied = torch.zeros(1, 7)
    assert GreedyProcessor()(tied).argmax() == 0
    assert TopKProcessor(1.0, 3)(tied)[0].nonzero().flatten().tolist() == [0, 1, 2]
    assert NucleusProcessor(1.0, 0.4)(tied)[0].nonzero().flatten().tolist() == [0, 1, 2]
    assert top_tokens(tied[0], 3) == [0, 1, 2]
    many = torch.zeros(1, 5000)
    many[0, 4000] = 1.0
    assert GreedyProcessor()(many)[0, 4000] == 1
    assert top_tokens(many[0], 3) == [4000, 0, 1]


@pytest.mark.parametrize(
    "build", [MultinomialProcessor, lambda t: TopKProcessor(t, 5), lambda t: NucleusProcessor(t, 0.9)]
)
@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-30])
def test_no_temperature_overflows_and_zero_is_greedy(build, temperature: float) -> None:
    logits = torch.tensor([[1e30, 5.0, -1e30, 0.0]])
    assert torch.equal(build(temperature)(logits), GreedyProcessor()(logits))


@pytest.mark.parametrize("shape", ["flat", "peaked", "stepped"])
def test_the_selected_prefix_does_not_change_the_nucleus(shape: str) -> None:
    """The selection of the most likely entries against a full sort, where it suffices and where it does not."""
    generator = torch.Generator().manual_seed(1)
    logits = {
        "flat": torch.zeros(3, 9000),
        "peaked": torch.randn(3, 9000, generator=generator) * 4,
        "stepped": torch.randint(0, 4, (3, 9000), generator=generator).float(),
    }[shape]
    for top_p in (0.01, 0.5, 0.9, 0.9999):
        few, everything = (nucleus_probs(logits, 0.8, top_p, prefix=prefix) for prefix in (16, 9000))
        distributions = [
            torch.zeros(3, 9000, dtype=torch.float64).scatter_(-1, ids, probs) for probs, ids in (few, everything)
        ]
        torch.testing.assert_close(*distributions, rtol=1e-12, atol=0)


@given(
    rows=st.lists(st.lists(st.integers(0, 5), min_size=9, max_size=9), min_size=1, max_size=3), count=st.integers(1, 9)
)
def test_stable_topk_equals_a_stable_sort(rows: list[list[int]], count: int) -> None:
    """On rows full of ties."""
    logits = torch.tensor(rows, dtype=torch.float32)
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    top_values, top_ids = stable_topk(logits, count)
    assert torch.equal(top_values, values[:, :count]) and torch.equal(top_ids, ids[:, :count])


@given(row=st.lists(st.sampled_from([0.0, 1.0, 2.0, -math.inf]), min_size=12, max_size=12), count=st.integers(1, 12))
def test_few_top_tokens_are_those_of_a_stable_sort(row: list[float], count: int) -> None:
    logits = torch.tensor(row)
    ids = logits.sort(descending=True, stable=True).indices[:count].tolist()
    assert top_tokens(logits, count) == [token for token in ids if row[token] > -math.inf]
    assert logits.tolist() == row


@pytest.mark.parametrize(
    "build",
    [
        lambda: GreedyProcessor(-1),
        lambda: MultinomialProcessor(101),
        lambda: MultinomialProcessor(math.nan),
        lambda: TopKProcessor(1, 0),
        lambda: TopKProcessor(1, 2.0),
        lambda: TopKProcessor(1, math.inf),
        lambda: NucleusProcessor(1, 0),
        lambda: NucleusProcessor(1, 1.01),
        lambda: TopKNucleusProcessor(1, 1.5, 0.5),
    ],
)
def test_arguments_out_of_range_are_refused(build) -> None:
    with pytest.raises(UserError, match="out of range"):
        build()


def test_large_half_precision_logits_are_usable_and_small_temperatures_raise_no_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    assert GreedyProcessor()(torch.full((64, 3), 1100.0, dtype=torch.float16)).sum() == 64
    probs = MultinomialProcessor(0.02)(torch.arange(20.0)[None])[0]
    assert Noise(0).sample(probs, 0) == 19 and not list(recwarn)


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    logits = torch.randn(1, 6)
    torch.testing.assert_close(TopKProcessor(1.0, 100)(logits), MultinomialProcessor(1.0)(logits), rtol=1e-12, atol=0)
