"""The sentences and the chart below the table of /server sweep."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from utils.comparison.charts import DotChart, DotRow
from utils.comparison.reports import Finding
from utils.comparison.speed_claims import BASELINE, FASTER, TOO_FEW, Row

BASE = "draft 0"
NO_BASE = "No speed-up is given without draft=0, only the highest median."
MEASURED = "Repeats within one start share its luck, so the interval may be too narrow."
DIFFERENT = "The texts differ, so part of the difference in speed may come from the text."


def conclusion(findings: Sequence[Finding]) -> list[str]:
    """Which draft length is the fastest, and whether that is distinguishable from noise."""
    rows: list[dict[str, Any]] = [finding.figures for finding in findings]
    if not rows:
        return []
    others = [row for row in rows if row["draft"]]
    if not any(row["verdict"] == BASELINE for row in rows):
        best = max(rows, key=lambda row: median(row["tokens_per_second"]))
        return [NO_BASE, f"The highest is {best['setting']}: {median(best['tokens_per_second']):.1f} tokens/s."]
    compared = [row for row in others if row["speedup"] is not None and not row["without_gain"]]
    lines = [f"{row['setting']}: no draft saved a forward pass." for row in others if row["without_gain"]]
    if compared:
        lines.append(_best(max(compared, key=lambda row: float(row["speedup"]))))
    if any(row["same_as_draft_0"] is False for row in others):
        lines.append(DIFFERENT)
    return [*lines, MEASURED] if compared else lines


def _best(row: Row) -> str:
    text = f"{row['speedup']:.2f}x {BASE}"
    if row["interval"] is not None:
        text += f" (95 % interval {row['interval'][0]:.2f} to {row['interval'][1]:.2f})"
    if row["verdict"] == FASTER:
        return f"{row['setting']} is the fastest: {text}."
    if row["verdict"] == TOO_FEW:
        return f"The highest is {row['setting']}: {text}, but there are too few runs to tell."
    return f"No draft length is measurably faster than {BASE}; the highest is {row['setting']}: {text}."


def sweep_charts(findings: Sequence[Finding]) -> list[DotChart]:
    """The speed-up of each run over draft 0, or the throughput of each run without that."""
    rows = [finding.figures for finding in findings]
    if any(row["speedups"] for row in rows if row["draft"]):
        dots = [DotRow(row["setting"], row["speedups"], series=row["setting"]) for row in rows if row["speedups"]]
        dots = [dot for dot in dots if dot.label != BASE]
        return [DotChart(f"speed-up over {BASE}, one dot per run", "speed-up", dots, 1.0, BASE)]
    speeds = [DotRow(row["setting"], row["tokens_per_second"], series=row["setting"]) for row in rows]
    return [DotChart("throughput, one dot per run", "tokens/s", speeds)]
