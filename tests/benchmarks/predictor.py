"""How far `/whatif on=` was off on published figures (published.csv) of models that its constants were not fitted to.

`python tests/benchmarks/predictor.py` prints the table of the README, and the constants and errors for
utils/commands/experiments/other_hardware.py. A test recomputes both.
"""

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent)]

from utils.commands.experiments.other_hardware import (
    ALONE,
    DEVICES,
    FITTED,
    Constants,
    Deployment,
    Error,
    Shape,
    calibrated,
)
from utils.metrics.intervals import NORMAL, STUDENT

ROUNDS_OF_FIT, SMALL = 30, 0.01  # of least squares with new weights, which end at least absolute errors
NEVER_FITTED = "specbundle-later"  # it was looked at when the constants were known
UNNAMED = "angelslim"  # five sizes on one GPU without a name: they show the fixed time of a pass
QWEN = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
EXPERTS = {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8}


def of(hidden: int, layers: int, heads: int, inner: int, **others: int | bool) -> Shape:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return Shape.of_config(dict(zip(names, (hidden, layers, heads, inner), strict=True)) | others)


MODELS = {
    "Llama-3.1-8B": of(4096, 32, 32, 14336, **LLAMA),
    "Llama-3.1-70B": of(8192, 80, 64, 28672, **LLAMA),
    "Qwen3-1.7B": of(2048, 28, 16, 6144, tie_word_embeddings=True, **QWEN),
    "Qwen3-4B": of(2560, 36, 32, 9728, tie_word_embeddings=True, **QWEN),
    "Qwen3-8B": of(4096, 36, 32, 12288, **QWEN),
    "Qwen3-14B": of(5120, 40, 40, 17408, **QWEN),
    "Qwen3-32B": of(5120, 64, 64, 25600, **QWEN),
    "MiniCPM3-4B": Shape(4.07e9, 4.07e9),
    "Qwen3-30B-A3B": of(2048, 48, 32, 6144, **QWEN | EXPERTS | {"moe_intermediate_size": 768}),
    "Qwen3-235B-A22B": of(4096, 94, 64, 12288, **QWEN | EXPERTS | {"moe_intermediate_size": 1536}),
    "Qwen3-Coder-30B-A3B": of(2048, 48, 32, 6144, **QWEN | EXPERTS | {"moe_intermediate_size": 768}),
    "Qwen3-Coder-480B-A35B": of(
        *(6144, 62, 96, 8192), **QWEN | EXPERTS | {"moe_intermediate_size": 2560, "num_experts": 160}
    ),
    "Ling-flash-2.0": of(
        *(4096, 32, 32, 9216),
        **EXPERTS | {"vocab_size": 157184, "moe_intermediate_size": 1024, "num_experts": 256},
        num_shared_experts=1,
        first_k_dense_replace=1,
        head_dim=128,
    ),
    # Configs that are not supported: all parameters and the active ones as published.
    "Kimi-K2": Shape(11.5e9, 1026e9, 384, 8, 2.64e9),
    "Qwen3-Next-80B-A3B": Shape(2.4e9, 80e9, 512, 10, 0.151e9),
    "Llama-4-Scout": Shape(11e9, 109e9, 16, 1, 6.04e9),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A published speed: of the target alone (k = 0), or with k drafts and this acceptance length."""

    source: str
    device: str
    model: str
    drafter: str
    text: str
    weights: str
    batch: int
    context: int
    k: int
    length: float
    speed: float
    plain: float

    @property
    def kind(self) -> str:
        return MODELS[self.model].kind

    @property
    def series(self) -> tuple[str, ...]:
        """Cells of one series have the same errors in common, so every series counts as much as another."""
        return (self.source, self.device, self.model if self.k else "", self.drafter)

    @property
    def held_out(self) -> tuple[str, ...]:
        """Cells that are held out together: the target alone on a device by a source, or all drafting for a model."""
        return (self.model,) if self.k else (self.source, self.device)

    @property
    def circumstances(self) -> tuple[int, int]:
        """A measured point holds for its batch and context."""
        return self.batch, self.context

    @property
    def ratio(self) -> float:
        """A round over a decode step."""
        return self.length * self.plain / self.speed

    def workload(self, constants: Constants, *, measured: bool = True) -> Deployment:
        """With the measured speed of the target alone, or without."""
        known = (self.plain or None) if measured else None
        options = {"weights": self.weights, "plain": known, "constants": constants}
        return Deployment(MODELS[self.model], self.device, self.batch, self.context, **options)


def read_cells(path: Path = HERE / "published.csv") -> list[Cell]:
    with path.open(encoding="utf-8") as file:
        return [
            Cell(
                *(row[name] for name in ("source", "device", "model", "drafter")),
                *(row[name] for name in ("text", "weights")),
                *(int(row[name]) for name in ("batch", "context", "k")),
                *(float(row[name] or 0) for name in ("length", "tokens_per_second", "plain")),
            )
            for row in csv.DictReader(file)
        ]


def sound(cells: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
    """The cells to use, and those left out: a round cannot be shorter than a decode step, so if one is, the speeds of
    the target alone in this source are not sound for that model, and none of its cells is used.
    """
    impossible = {(cell.source, cell.model) for cell in cells if cell.k and cell.ratio < 1}
    return (
        [cell for cell in cells if (cell.source, cell.model) not in impossible],
        [cell for cell in cells if (cell.source, cell.model) in impossible],
    )


def weighted(pairs: Sequence[tuple[object, float]], share: float) -> float:
    """The quantile of the values, in which every series has the same weight."""
    counts: dict[object, int] = defaultdict(int)
    for series, _ in pairs:
        counts[series] += 1
    ordered = sorted((value, 1 / counts[series] / len(counts)) for series, value in pairs)
    reached = np.cumsum([weight for _, weight in ordered])
    return float(ordered[min(int(np.searchsorted(reached, share - 1e-9)), len(ordered) - 1)][0])


def fit(cells: Sequence[Cell]) -> Constants:
    """The constants from these cells: those of a pass, and then those of a round."""
    fitted, drafting = fit_pass(cells), [cell for cell in cells if cell.k and cell.source != NEVER_FITTED]
    tried = (_rounds(drafting, fitted._replace(alike=alike / 100)) for alike in range(5, 65, 5))
    return min(tried, key=lambda pair: pair[0])[1]


def fit_pass(cells: Sequence[Cell]) -> Constants:
    """The fixed time of a pass from the sizes on one GPU, and its share of the bandwidth on devices with a name."""
    unnamed = [cell for cell in cells if cell.source == UNNAMED and not cell.k]
    sizes = [[1.0, cell.workload(FITTED).bytes_read()] for cell in unnamed]
    fixed = float(np.linalg.lstsq(np.array(sizes), np.array([1 / cell.speed for cell in unnamed]), rcond=None)[0][0])
    shares = []
    for cell in cells:
        if not cell.k and cell.device and cell.kind == "dense":
            reading = cell.batch / cell.speed - fixed
            shares.append((cell.series, cell.workload(FITTED).bytes_read() / DEVICES[cell.device].bandwidth / reading))
    return FITTED._replace(fixed=fixed, share=weighted(shares, 0.5))


def _rounds(cells: Sequence[Cell], fitted: Constants) -> tuple[float, Constants]:
    """The times of a round and of a draft by least absolute relative errors, and the sum of these errors."""
    counts: dict[object, int] = defaultdict(int)
    for cell in cells:
        counts[cell.series] += 1
    bare = fitted._replace(per_round=0.0, per_draft=0.0)
    rows, rest, base = [], [], []
    for cell in cells:
        seconds = cell.batch / cell.plain * cell.ratio
        rows.append([1 / seconds, cell.k / seconds])
        rest.append(1 - cell.workload(bare).prior(cell.k) / cell.ratio)
        base.append(1 / counts[cell.series])
    matrix, values, weights = np.array(rows), np.array(rest), np.array(base)
    times, scale = np.zeros(2), np.ones(len(rows))
    for _ in range(ROUNDS_OF_FIT):
        root = np.sqrt(weights * scale)
        times = np.maximum(np.linalg.lstsq(matrix * root[:, None], values * root, rcond=None)[0], 0.0)
        scale = 1 / np.maximum(np.abs(matrix @ times - values), SMALL)
    left = float(np.abs(matrix @ times - values) @ weights)
    return left, fitted._replace(per_round=float(times[0]), per_draft=float(times[1]))


def off(predicted: float, measured: float) -> float:
    """The error as a part: 0.25 for a prediction that is 1.25 times the measured value, or the reverse."""
    return max(predicted / measured, measured / predicted) - 1


Scored = tuple[str, int, tuple[str, ...], float]  # kind, number of measured speeds, series, error


def scored(cells: Sequence[Cell]) -> Iterator[Scored]:
    """The errors of every model with constants that were fitted to the other models."""
    named = [cell for cell in cells if cell.k or cell.device]
    for group in dict.fromkeys(cell.held_out for cell in named):
        ours = [cell for cell in named if cell.held_out == group]
        constants = (fit if ours[0].k else fit_pass)([cell for cell in cells if cell.held_out != group])
        for cell in ours:
            if not cell.k:
                speed = cell.batch / cell.workload(constants).step
                yield cell.kind, ALONE, cell.series, off(speed, cell.speed)
                continue
            if cell.device:
                yield cell.kind, 0, cell.series, off(cell.workload(constants, measured=False).prior(cell.k), cell.ratio)
            yield cell.kind, 1, cell.series, off(cell.workload(constants).prior(cell.k), cell.ratio)
        yield from _with_points([cell for cell in ours if cell.k], constants)


def _with_points(cells: Sequence[Cell], constants: Constants) -> Iterator[Scored]:
    """Every cell of a series by every point, or pair of points of one text, that does not contain it."""
    series: dict[object, list[Cell]] = defaultdict(list)
    for cell in cells:
        series[cell.series].append(cell)
    for group in series.values():
        pairs = [(one, two) for one, two in combinations(group, 2) if one.text == two.text and one.k != two.k]
        for points in [*((one,) for one in group), *pairs]:
            ratio = calibrated(points[0].workload(constants).prior, {one.k: one.ratio for one in points})
            for cell in group:
                if cell not in points and cell.circumstances == points[0].circumstances:
                    yield cell.kind, 1 + len(points), cell.series, off(ratio(cell.k), cell.ratio)


def errors(cells: Sequence[Cell]) -> dict[tuple[str, int], Error]:
    """The errors by class. The 90th percentile of few series is too small, so it is widened as Student's t requires."""
    classes: dict[tuple[str, int], list[tuple[object, float]]] = defaultdict(list)
    for kind, given, series, error in scored(cells):
        classes[kind, given].append((series, error))
    found = {}
    for name, pairs in classes.items():
        series = len({one for one, _ in pairs})
        high = weighted(pairs, 0.9) * STUDENT[min(series - 1, len(STUDENT)) - 1] / NORMAL
        found[name] = Error(round(weighted(pairs, 0.5), 3), round(high, 3), len(pairs), series)
    return found


def table(found: Mapping[tuple[str, int], Error]) -> list[str]:
    """The table of the README."""
    lines = [
        "| targets | measured speeds | median | 90th percentile | predictions | series |",
        "|---|---|---|---|---|---|",
    ]
    for (kind, speeds), (median, high, count, series) in sorted(found.items()):
        known = "target-only itself" if speeds == ALONE else str(speeds)
        lines.append(f"| {kind} | {known} | {median:.1%} | {high:.1%} | {count} | {series} |")
    return lines


def main() -> None:
    used, left_out = sound(read_cells())
    found = errors(used)
    lines = [f"{len(used)} cells used, {len(left_out)} left out: {', '.join({cell.model for cell in left_out})}"]
    lines += [
        str(fit(used)),
        *(",".join(map(str, (*name, *error))) for name, error in sorted(found.items())),
        "",
        *table(found),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
