"""Speed-ups relative to target-only in a faster engine, so that a slow baseline makes no strategy look better.

They are estimates: measured speed-ups divided by the ratio of decode steps from the comparison of engines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from utils.comparison.reports import Finding, Report
from utils.comparison.strategies import STRATEGIES
from utils.engine.engine_choice import FasterEngine

FIGURE = "speedup_vs_fastest_engine"  # in records
TARGET = next(row.name for row in STRATEGIES if row.is_baseline)
SENTENCE = "Estimate: target-only would be {:.2f}x as fast in the {} engine; against that: {}."


def estimated(speedup: float | None, other: FasterEngine | None) -> float | None:
    """A speed-up over target-only in the faster engine. None where there is no speed-up or no such engine."""
    return None if speedup is None or other is None else speedup / other.factor


def second_sentence(speedups: Mapping[str, Sequence[float]], other: FasterEngine | None) -> str:
    """The sentence on speed-ups by strategy. It is empty if nothing drafted or no engine is faster."""
    drafted = {name: values for name, values in speedups.items() if values and name != TARGET}
    if other is None or not drafted:
        return ""
    shown = ", ".join(f"{name} {_range(values, other)}" for name, values in drafted.items())
    return SENTENCE.format(other.factor, other.name, shown)


def with_second_baseline(
    report: Report, findings: Sequence[Finding], other: FasterEngine | None
) -> tuple[Report, list[Finding]]:
    """A finished report and its findings, with the second speed-ups and one more sentence."""
    speedups: dict[str, list[float]] = {}
    for row in (finding.figures for finding in findings):
        if row.get("speedup") is not None and "baseline" not in row:  # servers have their own baselines
            speedups.setdefault(str(row.get("strategy")), []).append(row["speedup"])
    sentence = second_sentence(speedups, other)
    if not sentence:
        return report, list(findings)
    added = [replace(finding, figures=_with_figure(finding.figures, other)) for finding in findings]
    return replace(report, conclude=lambda found: [*report.conclude(found), sentence]), added


def _with_figure(figures: dict[str, Any], other: FasterEngine | None) -> dict[str, Any]:
    over_target = "speedup" in figures and "baseline" not in figures
    return figures | {FIGURE: estimated(figures["speedup"], other)} if over_target else figures


def _range(values: Sequence[float], other: FasterEngine) -> str:
    """A single value, or the range from the smallest to the largest."""
    low, high = (f"{bound / other.factor:.2f}x" for bound in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
