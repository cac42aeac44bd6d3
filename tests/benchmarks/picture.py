"""The picture of a benchmark: ratios by task."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(found: dict[str, Any], path: Path) -> None:
    """A panel per pair of arms: decoding speed over the peer's, by task, with the quartiles between prompts."""
    ratios = found["ratios"]
    tasks = list(next(iter(ratios.values())))
    figure, panels = pyplot.subplots(
        1, len(ratios), figsize=(4 * len(ratios), 0.6 * len(tasks) + 1.6), sharey=True, squeeze=False
    )
    for panel, (label, by_task) in zip(panels[0], ratios.items(), strict=True):
        cells = [by_task[task] for task in tasks if task in by_task]
        names = [task for task in tasks if task in by_task]
        means = [cell["decode"] for cell in cells]
        errors = [
            [max(0.0, cell["decode"] - cell["quartiles"][0]) for cell in cells],
            [max(0.0, cell["quartiles"][1] - cell["decode"]) for cell in cells],
        ]
        panel.barh(names, means, xerr=errors, color="#4477aa", ecolor="#777777")
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_title(f"ours / peer: {label}", fontsize=10)
        panel.set_xlabel("decoding speed, ratio")
    panels[0][0].invert_yaxis()
    figure.suptitle(f"{found['setting']['engine']}, {found['setting']['machine']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
