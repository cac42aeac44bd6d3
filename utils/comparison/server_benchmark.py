"""The figures of Spec-Bench and SPEED-Bench for servers, from their own counts of tokens and drafts.

A figure is None or empty if the server does not report what it needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import mean
from typing import Any

from utils.comparison.runs import Run
from utils.metrics.benchmark_figures import mean_speed_ratio

Place = tuple[int, int]  # the repeat and the number of the prompt


@dataclass(frozen=True, slots=True)
class ServerTurns:
    """The answers of one server to all turns of a prompt in one repeat."""

    runs: Sequence[Run]

    @property
    def tokens(self) -> int | None:
        """New tokens of all turns."""
        return _total([run.new_tokens for run in self.runs])

    @property
    def forwards(self) -> int | None:
        """Forward passes of the target in all turns."""
        return _total([run.target_forwards for run in self.runs])

    @property
    def tokens_per_second(self) -> float | None:
        seconds = sum(run.seconds for run in self.runs)
        return self.tokens / seconds if self.tokens and seconds else None

    @property
    def tokens_per_forward(self) -> float | None:
        return self.tokens / self.forwards if self.tokens and self.forwards else None


def server_benchmark_figures(ours: Mapping[Place, ServerTurns], theirs: Mapping[Place, ServerTurns]) -> dict[str, Any]:
    """The fields of `benchmark_figures` for a server (`ours`) and its baseline (`theirs`), as far as they are known."""
    speeds: dict[int, list[tuple[float, float]]] = {}
    for place, turns in ours.items():
        other = theirs.get(place)
        if other and len(other.runs) == len(turns.runs) and turns.tokens_per_second and other.tokens_per_second:
            speeds.setdefault(place[0], []).append((turns.tokens_per_second, other.tokens_per_second))
    tokens, forwards = _total([turns.tokens for turns in ours.values()]), _total([t.forwards for t in ours.values()])
    lengths = [turns.tokens_per_forward for turns in ours.values()]
    known = [length for length in lengths if length is not None]
    return {
        "speedup": mean_speed_ratio(list(speeds.values())),
        "mean_accepted_tokens": tokens / forwards if tokens and forwards else None,
        "acceptance_length": mean(known) if known and len(known) == len(lengths) else None,
        "conditional_acceptance": _conditional([run for turns in ours.values() for run in turns.runs]),
    }


def _conditional(runs: Sequence[Run]) -> list[float]:
    """As `conditional_acceptance`, over verify passes with drafts. Empty if a server does not count by position."""
    known = [run for run in runs if run.drafted is not None and (run.accepted_by_position or not run.drafted)]
    rounds = _total([run.rounds for run in known])
    if len(known) < len(runs) or not rounds:
        return []
    by_position = [run.accepted_by_position or () for run in known]
    positions = zip_longest(*([accepted for accepted, _ in one] for one in by_position), fillvalue=0)
    return [now / before for before, now in pairwise([rounds, *map(sum, positions)]) if before]


def _total(values: Sequence[int | None]) -> int | None:
    """The sum, or None if one of the values is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
