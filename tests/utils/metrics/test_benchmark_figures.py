"""Figures of published benchmarks: computed by hand, and compared with the formulas of the benchmarks' own programs."""

from __future__ import annotations

from statistics import mean

import pytest

from utils.decode.steps import FinishReason, Step
from utils.metrics.benchmark_figures import benchmark_figures, conditional_acceptance
from utils.metrics.results import Generation, pooled
from utils.metrics.totals import Totals


def total(run: Generation) -> Totals:
    """The totals of a local run."""
    positions = tuple(accepted for accepted, _ in run.accepted_by_position)
    counts = (run.drafted, run.accepted, run.target_forwards or None, len(run.steps))
    return Totals(len(run.tokens), run.seconds, *counts, positions)


def run_of(accepted: list[int], seconds: float, drafts: int = 3) -> Generation:
    """A run whose rounds accepted so many of their drafts, and added one token of the target."""
    steps = tuple(Step((7,) * max(drafts, kept), kept, 9) for kept in accepted)
    return Generation(steps, seconds, None, FinishReason.LENGTH)


def alone(tokens: int, seconds: float) -> Generation:
    return run_of([0] * tokens, seconds, drafts=0)


def test_figures_by_hand() -> None:
    # 4 tokens in 2 rounds at 2 tokens/s, and 5 tokens in 1 + 3 rounds at 0.5 tokens/s.
    first, second = run_of([2, 0], 2.0), run_of([1, 0, 0, 0], 10.0)
    figures = benchmark_figures([[(total(first), total(alone(4, 4.0))), (total(second), total(alone(5, 10.0)))]])
    assert figures["mean_accepted_tokens"] == 9 / 6, "over rounds"
    assert figures["acceptance_length"] == mean([4 / 2, 5 / 4]), "over prompts"
    assert figures["speedup"] == pytest.approx(mean([2.0, 0.5]) / mean([1.0, 0.5])), "a ratio of means"
    assert figures["conditional_acceptance"] == [2 / 6, 1 / 2, 0.0]


def test_repeats_are_averaged_after_the_ratio_and_prompts_without_the_target_are_left_out() -> None:
    ours = total(run_of([1], 1.0))
    fast, slow = [(ours, total(alone(2, 4.0)))], [(ours, total(alone(2, 2.0)))]
    assert benchmark_figures([fast, slow])["speedup"] == mean([4.0, 2.0])
    assert benchmark_figures([[*slow, (total(run_of([3], 0.001)), None)]])["speedup"] == 2.0
    assert benchmark_figures([[(ours, None)]])["speedup"] is None


def test_a_round_with_fewer_drafts_is_a_rejection_for_the_conditional_rate_only() -> None:
    short = Generation((Step((1, 2), 2, 3), Step((1,), 1, 3), Step((), 0, 3)), 1.0, None, FinishReason.LENGTH)
    assert conditional_acceptance(total(short)) == [2 / 3, 1 / 2]
    assert [accepted / tried for accepted, tried in short.accepted_by_position] == [1.0, 1.0]


def test_the_conditional_rate_is_that_of_the_histogram_of_lengths() -> None:
    """The loop of specdec_bench's acceptance_rate.py, whose key 1 (the token of the target) always has rate 1."""
    runs = [run_of([3, 1, 0, 2, 3, 3, 0, 1], 1.0), run_of([2, 2, 0], 1.0)]
    lengths = [len(step.tokens) for run in runs for step in run.steps]
    histogram = {length: lengths.count(length) for length in sorted(set(lengths))}
    running, before, rates = len(lengths), 1.0, []
    for count in histogram.values():
        rates.append(running / len(lengths) / before)
        before = running / len(lengths)
        running -= count
    assert rates[0] == 1.0
    assert conditional_acceptance(total(pooled(runs))) == pytest.approx(rates[1:])


def test_a_run_without_tokens_or_drafts_has_figures() -> None:
    empty = total(Generation((), 1.0, None, FinishReason.LENGTH))
    assert benchmark_figures([[(empty, empty)]]) == {
        "speedup": None,
        "mean_accepted_tokens": None,
        "acceptance_length": None,
        "conditional_acceptance": [],
    }
    assert benchmark_figures([[(total(alone(3, 1.0)), total(alone(3, 1.0)))]])["conditional_acceptance"] == []
