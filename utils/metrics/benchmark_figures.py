"""The figures of published benchmarks, by their own definitions, so that results can be compared.

Spec-Bench: evaluation/speed.py of hemingkx/Spec-Bench. SPEED-Bench: acceptance_rate.py and specbench.py of
specdec_bench in NVIDIA/Model-Optimizer. Both count the tokens that a round adds: accepted drafts and the target's own.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from utils.metrics.results import Generation, pooled

# The answers of a strategy to the prompts of one repeat, each with the target's own, if there is one. Several turns of
# a conversation are one run, as both benchmarks count them.
Repeat = Sequence[tuple[Generation, Generation | None]]


def benchmark_figures(repeats: Sequence[Repeat]) -> dict[str, Any]:
    """The figures of a group of prompts with all their turns, as in the JSON records.

    `speedup` and `mean_accepted_tokens` are Spec-Bench's; the latter is the number of new tokens per round over all
    rounds of all prompts. `acceptance_length` is SPEED-Bench's: the mean over prompts of new tokens per round.
    `conditional_acceptance` is SPEED-Bench's acceptance by position.
    """
    runs = [run for repeat in repeats for run, _ in repeat]
    lengths = [run.tokens_per_target_forward for run in runs]
    known = [length for length in lengths if length is not None]
    total = pooled(runs)
    return {
        "speedup": speedup(repeats),
        "mean_accepted_tokens": total.tokens_per_target_forward,
        "acceptance_length": mean(known) if known else None,
        "conditional_acceptance": conditional_acceptance(total),
    }


def speedup(repeats: Sequence[Repeat]) -> float | None:
    """The mean tokens/s over prompts divided by the target's mean tokens/s, averaged over repeats.

    None if the target did not run.
    """
    known = [
        [
            (run.tokens_per_second, target.tokens_per_second)
            for run, target in repeat
            if target is not None and run.tokens_per_second and target.tokens_per_second
        ]
        for repeat in repeats
    ]
    return mean_speed_ratio(known)


def mean_speed_ratio(repeats: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """The same from the (own, baseline) tokens/s of each prompt in each repeat."""
    ratios = [mean(ours for ours, _ in speeds) / mean(theirs for _, theirs in speeds) for speeds in repeats if speeds]
    return mean(ratios) if ratios else None


def conditional_acceptance(run: Generation) -> list[float]:
    """For each draft position: rounds in which this draft was accepted / rounds in which all drafts before it were.

    A round with fewer drafts counts as one that rejects the next. `Generation.accepted_by_position` leaves it out, so
    both are equal where all rounds have the same number of drafts.
    """
    reached = [len(run.steps), *(accepted for accepted, _ in run.accepted_by_position)]
    return [now / before for before, now in pairwise(reached) if before]
