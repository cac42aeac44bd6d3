"""The picture of a benchmark: speed ratios by task."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(result: dict[str, Any], path: Path) -> None:
    """One panel per pair of arms: the ratio of decoding speeds by task and over all prompts, which has an interval."""
    ratios = result["ratios"]
    tasks = list(dict.fromkeys(task for row in ratios.values() for task in row["tasks"]))
    columns = min(4, len(ratios))
    rows = -(-len(ratios) // columns)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(4 * columns, rows * (0.35 * len(tasks) + 1.6)), sharey=True, squeeze=False
    )
    for panel in panels.flat[len(ratios) :]:
        panel.set_axis_off()
    for panel, (label, row) in zip(panels.flat, ratios.items(), strict=False):
        overall = row["decode"]
        panel.barh([*tasks, "all"], [*(row["tasks"].get(task, 0) for task in tasks), overall.estimate], color="#4477aa")
        if overall.is_bounded:
            panel.plot([overall.low, overall.high], ["all", "all"], color="#222222")
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_title(f"ours / peer: {label}", fontsize=10)
        panel.set_xlabel("ratio of decoding speeds")
    panels[0][0].invert_yaxis()
    figure.suptitle(f"{result['setting']['engine']}; {result['setting']['cpu']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
