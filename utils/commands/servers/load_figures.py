"""The figures and the table of /server load: one row for each number of requests at the same time and each server."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from utils.comparison.reports import Finding
from utils.comparison.speed_claims import SpeedClaim, interval_text, speedup_text
from utils.servers.address import ServerAddress
from utils.servers.load import LoadSlice, median_and_p95

HEADINGS = (
    "at once",
    "server",
    "tokens/s",
    "first token (95 %)",
    "per token (95 %)",
    "acceptance",
    "speed-up",
    "95 % interval",
    "requests",
)
OPTIONAL = ("requests", "acceptance", "first token (95 %)")


@dataclass(slots=True)
class Cell:
    """One server with one number of requests at the same time. slices: what was measured, by turn."""

    concurrency: int
    address: ServerAddress
    slices: dict[int, LoadSlice] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all turns over their seconds."""
        counted = [one for one in self.slices.values() if one.tokens is not None]
        seconds = sum(one.seconds for one in counted)
        return sum(one.tokens or 0 for one in counted) / seconds if seconds else None


Cells = Mapping[tuple[int, str], Cell]


def findings_of(cells: Cells) -> Iterator[Finding]:
    """One finding for each cell, the speed-up of a server against its baseline in the same turns."""
    for (concurrency, _), cell in cells.items():
        figures = _figures(cell, cells.get((concurrency, cell.address.baseline or "")))
        yield Finding(_cells(figures), figures)


def _figures(cell: Cell, baseline: Cell | None) -> dict[str, Any]:
    slices = list(cell.slices.values())
    ratios = [] if baseline is None else list(_ratios(cell, baseline))
    first = [seconds for one in slices for seconds in one.first_token_seconds]
    each = [seconds for one in slices for seconds in one.token_seconds]
    known = [one.acceptance for one in slices if one.acceptance is not None]
    valid = [one for one in known if one.valid]
    drafted, accepted = (
        (sum(one.drafted for one in valid), sum(one.accepted for one in valid)) if valid else (None, None)
    )
    claim = SpeedClaim.of([ratios], tokens_per_forward=1.0 if drafted and not accepted else None)
    return {
        "server": cell.address.name,
        "baseline": cell.address.baseline if baseline is not None else None,
        "concurrency": cell.concurrency,
        "requests": sum(len(one.completions) for one in slices),
        "failed": sum(len(one.failures) for one in slices),
        "unfinished": sum(one.unfinished for one in slices),
        "seconds": [one.seconds for one in slices],
        "tokens": [one.tokens for one in slices],
        "tokens_per_second": cell.tokens_per_second,
        "first_token_seconds": median_and_p95(first),
        "token_seconds": median_and_p95(each),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_notes": sorted({one.note for one in known if one.note}),
        "speedups": ratios,
        **claim.figures,
    }


def _ratios(cell: Cell, baseline: Cell) -> Iterator[float]:
    """The throughput over the baseline's, turn by turn. Only on the same host: others share no machine."""
    if cell.address.host != baseline.address.host:
        return
    for turn, ours in cell.slices.items():
        theirs = baseline.slices.get(turn)
        if theirs is not None and ours.tokens_per_second and theirs.tokens_per_second:
            ratio = ours.tokens_per_second / theirs.tokens_per_second
            if isfinite(ratio):
                yield ratio


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    rate = row["accepted"] / row["drafted"] if row["drafted"] else None
    sent = row["requests"] + row["failed"] + row["unfinished"]
    return (
        str(row["concurrency"]),
        row["server"],
        "-" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.1f}",
        _times(row["first_token_seconds"]),
        _times(row["token_seconds"]),
        "-" if rate is None else f"{rate:.3f}",
        speedup_text(row),
        interval_text(row["interval"]),
        str(sent) if row["requests"] == sent else f"{row['requests']} of {sent}",
    )


def _times(pair: tuple[float, float] | None) -> str:
    return "-" if pair is None else f"{1000 * pair[0]:.0f} ({1000 * pair[1]:.0f}) ms"
