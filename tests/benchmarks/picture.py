"""The picture of a benchmark: speed ratios by task."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(result: dict[str, Any], path: Path) -> None:
    """One panel per pair of arms: the ratio of decoding speeds by task, with the quartiles over prompts."""
    ratios = result["ratios"]
    tasks = list(next(iter(ratios.values())))
    figure, panels = pyplot.subplots(
        1, len(ratios), figsize=(4 * len(ratios), 0.6 * len(tasks) + 1.6), sharey=True, squeeze=False
    )
    for panel, (label, by_task) in zip(panels[0], ratios.items(), strict=True):
        names = [task for task in tasks if task in by_task]
        cells = [by_task[task] for task in names]
        means = [cell["decode"] for cell in cells]
        below = [max(0.0, cell["decode"] - cell["quartiles"][0]) for cell in cells]
        above = [max(0.0, cell["quartiles"][1] - cell["decode"]) for cell in cells]
        panel.barh(names, means, xerr=[below, above], color="#4477aa", ecolor="#777777")
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_title(f"ours / peer: {label}", fontsize=10)
        panel.set_xlabel("ratio of decoding speeds")
    panels[0][0].invert_yaxis()
    figure.suptitle(f"{result['setting']['engine']}, {result['setting']['machine']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
