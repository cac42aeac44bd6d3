"""A /metrics page in Prometheus' text format, reduced to the counters that an engine kind needs.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import re
from collections.abc import Collection

SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)", re.ASCII)
POSITION = re.compile(r'(?:^|,)\s*position="(\d{1,4})"', re.ASCII)
LONGEST_LINE = 4096  # characters


def metric_values(page: str, prefix: str, names: Collection[str]) -> dict[str, float]:
    """The values of these metrics, without prefix and without the `_total` of counters.

    Samples of one metric are added up, since servers have one for each engine process; only positions of drafts stay
    apart, as `name/0`, `name/1` and so on. Lines of any other form are skipped.
    """
    values: dict[str, float] = {}
    for line in page.splitlines():
        found = SAMPLE.match(line) if line.startswith(prefix) and len(line) <= LONGEST_LINE else None
        if found is None:
            continue
        name, labels, text = found.groups(default="")
        name = name.removeprefix(prefix).removesuffix("_total")
        if name not in names:
            continue
        if position := POSITION.search(labels):
            name = f"{name}/{int(position[1])}"
        try:
            values[name] = values.get(name, 0.0) + float(text)
        except ValueError:
            continue
    return values
