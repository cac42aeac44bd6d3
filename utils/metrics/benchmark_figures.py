"""The figures of published benchmarks, by their own definitions, so that results can be compared.

Spec-Bench: evaluation/speed.py of hemingkx/Spec-Bench. SPEED-Bench: acceptance_rate.py and specbench.py of
specdec_bench in NVIDIA/Model-Optimizer. Both count the tokens that a round adds: accepted drafts and the target's own.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from utils.metrics.totals import Totals

# The answers of one arm to the prompts of one repeat, each with its baseline's, if there is one. Several turns of a
# conversation are one answer, as both benchmarks count them.
Repeat = Sequence[tuple[Totals, Totals | None]]


def benchmark_figures(repeats: Sequence[Repeat]) -> dict[str, Any]:
    """The figures of a group of prompts with all their turns, as in the JSON records, as far as they are known.

    `speedup` and `mean_accepted_tokens` are Spec-Bench's; the latter is the number of new tokens per round over all
    rounds of all prompts. `acceptance_length` is SPEED-Bench's: the mean over prompts of new tokens per round.
    `conditional_acceptance` is SPEED-Bench's acceptance by position.
    """
    answers = [ours for repeat in repeats for ours, _ in repeat]
    lengths = [ours.tokens_per_forward for ours in answers if ours.tokens != 0]
    total = Totals.of(answers)
    return {
        "speedup": speedup(repeats),
        "mean_accepted_tokens": total.tokens_per_forward,
        "acceptance_length": mean(filter(None, lengths)) if lengths and None not in lengths else None,
        "conditional_acceptance": conditional_acceptance(total),
    }


def speedup(repeats: Sequence[Repeat]) -> float | None:
    """The mean tokens/s over prompts divided by the baseline's mean tokens/s, averaged over repeats.

    None if the baseline did not run.
    """
    known = [
        [
            (ours.tokens_per_second, theirs.tokens_per_second)
            for ours, theirs in repeat
            if theirs is not None and ours.tokens_per_second and theirs.tokens_per_second
        ]
        for repeat in repeats
    ]
    ratios = [mean(ours for ours, _ in speeds) / mean(theirs for _, theirs in speeds) for speeds in known if speeds]
    return mean(ratios) if ratios else None


def conditional_acceptance(total: Totals) -> list[float]:
    """For each draft position: rounds in which this draft was accepted / rounds in which all drafts before it were.

    A round with fewer drafts counts as one that rejects the next. `Generation.accepted_by_position` leaves it out, so
    both are equal where all rounds have the same number of drafts. Empty if something is unknown.
    """
    if not total.rounds or total.by_position is None:
        return []
    return [now / before for before, now in pairwise((total.rounds, *total.by_position)) if before]
