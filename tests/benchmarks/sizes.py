"""`make bench-sizes`: start, memory, disk and speed of the program by model size and number format, beside
transformers' `generate` and llama.cpp, with random weights.

size_models.py writes the models, size_runs.py measures a row. It ends with a table in Markdown, and writes it with a
JSON file of all figures after every row.
"""

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent), str(HERE)]

from memory_watch import Bounds
from probes import read_seconds
from size_models import FORMS, SAFETENSORS, SHAPES, drafter_of, write_model
from size_runs import LONG, MEDIUM, WIDTHS, Figures, run_peer, run_program
from transformers import AutoTokenizer

from utils.bounds import ENGINE_WEIGHTS
from utils.comparison.records import versions
from utils.engine.machine import candidate_threads, machine_facts
from utils.freed_memory import available_memory
from utils.models.embedded import embedded_folder
from utils.screen.renderer import Renderer, make_renderer

PROGRAM, GENERATE, LLAMA = "program", "generate", "llama.cpp"
ARMS = (PROGRAM, GENERATE, LLAMA)
PEER_FORMATS = ("bfloat16", "float32")  # of generate
# Bytes of a weight. int4 has a scale and a minimum of 16 bits for 32 weights; its output head has 8 bits.
BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.625}
READ_BYTES = 1_000_000_000
FREE = 0.85  # the share of free memory that a row may take by default
PEAK_FACTOR, PEAK_EXTRA = 1.2, 1.5e9  # the bound of peak memory: factor x final weights + extra + keys and values
LATE = Figures(note="not run: the time was over")
HEADINGS = (
    *("billion", "files", "arm", "start 1, s", "start 2, s", "peak, GB", "peak / bound", "resident, GB", "disk, GB"),
    *("step, ms", *(f"v({width})" for width in WIDTHS), f"prefill {MEDIUM}", f"prefill {LONG}", "bandwidth", "note"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A row to measure. files: the form of the files. weights: the number format in which its arm computes."""

    size: float
    files: str
    arm: str
    weights: str

    @property
    def name(self) -> str:
        """What the table calls its arm."""
        return self.arm if self.arm == LLAMA else f"{self.arm}, {self.weights}"


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a pair, as `--target` and `--drafter` take them, and the bytes of each model's weights in them."""

    target: Path
    drafter: Path

    def nbytes(self, row: Row) -> tuple[int, int]:
        """Bytes of the weights of target and drafter in final form, each weight once. Blocks are as large as in their
        file, and the program keeps float32 weights in the bfloat16 of these files.
        """
        if row.files != SAFETENSORS:
            return self.target.stat().st_size, self.drafter.stat().st_size
        vocabulary = json.loads((self.target / "config.json").read_text())["vocab_size"]
        sizes = (SHAPES[row.size], SHAPES[drafter_of(row.size)])
        weights = "bfloat16" if row.arm == PROGRAM and row.weights == "float32" else row.weights
        target, drafter = (int(_final_bytes(shape.count(vocabulary), weights)) for shape in sizes)
        return target, drafter


def _final_bytes(count: tuple[int, int], weights: str) -> float:
    head, layers = count
    return head * (1.0 if weights == "int4" else BYTES[weights]) + layers * BYTES[weights]


def main(argv: list[str] | None = None) -> None:
    """Measure the rows that the flags describe."""
    flags, screen = flags_of(argv), make_renderer(interactive=False)
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder(screen.announce))
    setting = describe(flags)
    screen.result(first_line(setting))
    measured: list[tuple[Row, Figures, tuple[int, int]]] = []
    results: list[dict[str, Any]] = []
    end = time.monotonic() + 60 * flags.minutes
    if flags.work is not None:
        flags.work.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=flags.work, prefix="bench-sizes-") as work:
        for row, files in planned(flags, tokenizer, Path(work), screen):
            is_late = time.monotonic() > end
            screen.note(f"{row.size:g} billion, {row.files}: {row.name} ...")
            figures = LATE if is_late else measure(row, files, flags, tokenizer=tokenizer, work=Path(work))
            measured.append((row, figures, files.nbytes(row)))
            # The highest rate counts, because other processes may have used the memory at the same time.
            setting["read_bytes_per_second"] = max(setting["read_bytes_per_second"], read_rate(setting["cores"]))
            results = [result_of(*each, setting["read_bytes_per_second"]) for each in measured]
            screen.note(" | ".join(cells(results[-1])))
            write(flags.output, setting, results)
    screen.result(markdown(setting, results))
    screen.result(f"written to {flags.output}: sizes.md and sizes.json")


def planned(flags: argparse.Namespace, tokenizer: Any, work: Path, screen: Renderer) -> Iterator[tuple[Row, Files]]:
    """Every row with its files, which are written before the first row that needs them and removed after the last."""
    for size in flags.sizes:
        for form in flags.forms:
            rows = [Row(size, form, arm, weights) for arm, weights in arms_of(form, flags)]
            if not rows:
                continue
            folder = work / "models"
            screen.note(f"writing a pair of {size:g} and {drafter_of(size):g} billion random weights, {form} ...")
            sizes = {"target": size, "drafter": drafter_of(size)}
            paths = {name: write_model(folder / name, SHAPES[each], form, tokenizer) for name, each in sizes.items()}
            yield from ((row, Files(**paths)) for row in rows)
            shutil.rmtree(folder)


def arms_of(form: str, flags: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The arms that run on a form of files, and their number formats."""
    if form == SAFETENSORS:
        yield from ((PROGRAM, weights) for weights in flags.rows if PROGRAM in flags.arms and weights in BYTES)
        yield from ((GENERATE, weights) for weights in PEER_FORMATS if GENERATE in flags.arms and weights in flags.rows)
    elif "gguf" in flags.rows:
        yield from ((PROGRAM, "gguf"),) if PROGRAM in flags.arms else ()
        yield from ((LLAMA, "gguf"),) if LLAMA in flags.arms and find_spec("xllamacpp") else ()


def measure(row: Row, files: Files, flags: argparse.Namespace, *, tokenizer: Any, work: Path) -> Figures:
    """The figures of a row, in a new cache folder."""
    bounds, counts = Bounds(flags.limit * 1e9, flags.seconds, flags.longest), candidate_threads()
    if row.arm == LLAMA:
        return run_peer(["llama.cpp", str(files.target)], counts, tokenizer, bounds)
    if row.arm == GENERATE:
        return run_peer(["transformers", str(files.target), row.weights], counts, tokenizer, bounds)
    pair = ["--target", str(files.target), "--drafter", str(files.drafter), "--engine-weights", row.weights]
    with TemporaryDirectory(dir=work, prefix="program-") as folder:
        return run_program([*pair, "--device", "cpu"], tokenizer, Path(folder), bounds)


def describe(flags: argparse.Namespace) -> dict[str, Any]:
    """The machine, and what was chosen."""
    facts = machine_facts()
    cores = facts["cores"] or facts["threads"]
    chosen = {name: getattr(flags, name) for name in ("sizes", "forms", "rows", "limit")}
    return {
        "date": date.today().isoformat(),
        "machine": facts,
        "cores": cores,
        "read_bytes_per_second": read_rate(cores),
        "versions": versions(),
    } | chosen


def read_rate(cores: int) -> float:
    """The bytes that all cores together read from memory in a second."""
    return READ_BYTES / read_seconds(READ_BYTES, cores)


def result_of(row: Row, figures: Figures, nbytes: Sequence[int], rate: float) -> dict[str, Any]:
    """The row and its figures as plain values. nbytes: of target and drafter. A peer has the target only."""
    weights = sum(nbytes) if row.arm == PROGRAM else nbytes[0]
    cached = SHAPES[row.size].cache_bytes(LONG) if LONG in figures.prefill else 0
    bound = PEAK_FACTOR * weights + PEAK_EXTRA + cached
    return {
        "billion": row.size,
        "files": row.files,
        "arm": row.name,
        "final_bytes": weights,
        "peak_bound": bound,
        "peak_over_bound": figures.peak / bound,
        "bandwidth_share": nbytes[0] / figures.step / rate if figures.step else None,
        **figures.record(),
    }


def cells(result: dict[str, Any]) -> list[str]:
    """The cells of a row under HEADINGS."""
    starts = [f"{seconds:.1f}" for seconds in result["starts"]]
    starts = ["-", *starts] if not result["arm"].startswith(PROGRAM) else starts
    share, step = result["bandwidth_share"], result["step"]
    return [
        f"{result['billion']:g}",
        result["files"],
        result["arm"],
        *(starts + ["-", "-"])[:2],
        gigabytes(result["peak"]),
        f"{result['peak_over_bound']:.2f}",
        gigabytes(result["resident"]),
        gigabytes(result["disk"]),
        f"{1000 * step:.1f}" if step else "-",
        *(f"{result['verify'][width]:.2f}" if width in result["verify"] else "-" for width in WIDTHS),
        *(f"{result['prefill'][length]:.0f}" if length in result["prefill"] else "-" for length in (MEDIUM, LONG)),
        "-" if share is None else f"{share:.0%}",
        result["note"].replace("|", "/"),
    ]


def gigabytes(size: int | None) -> str:
    """A size without its unit; "-" if it is not known."""
    return f"{size / 1e9:.2f}" if size or size == 0 else "-"


def first_line(setting: dict[str, Any]) -> str:
    """The machine, the sizes and the date."""
    machine = setting["machine"]
    sizes = ", ".join(f"{size:g}" for size in setting["sizes"])
    return (
        f"{machine['cpu']}, {setting['cores']} cores, {machine['memory'] / 1e9:.0f} GB of memory read at "
        f"{setting['read_bytes_per_second'] / 1e9:.1f} GB/s; {sizes} billion weights; {setting['date']}"
    )


def markdown(setting: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """The first line and the table."""
    rows = [HEADINGS, ["---"] * len(HEADINGS), *map(cells, results)]
    return "\n".join([first_line(setting), "", *("| " + " | ".join(row) + " |" for row in rows)])


def write(folder: Path, setting: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
    """Write what was measured so far."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sizes.md").write_text(markdown(setting, results) + "\n", encoding="utf-8")
    (folder / "sizes.json").write_text(json.dumps(setting | {"results": results}, indent=1) + "\n", encoding="utf-8")


def flags_of(argv: list[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="make bench-sizes", description=__doc__.partition(".")[0] + ".")
    add = parser.add_argument
    known = ", ".join(f"{size:g}" for size in SHAPES)
    add("--sizes", type=_sizes, default="0.36,1.7", help=f"billions of weights, of {known} (default: 0.36,1.7)")
    add("--forms", type=_words(FORMS), default=",".join(FORMS), help=f"of files (default: {','.join(FORMS)})")
    formats = tuple(ENGINE_WEIGHTS)
    add("--rows", type=_words(formats), default=",".join(formats), help="weights to compute with (default: all)")
    add("--arms", type=_words(ARMS), default=",".join(ARMS), help=f"what runs (default: {','.join(ARMS)})")
    free = round(FREE * available_memory() / 1e9, 1)
    add("--limit", type=float, default=free, help=f"GB of memory at which a row is stopped (default: {free})")
    add("--seconds", type=float, default=400, help="seconds after which a process is stopped (default: 400)")
    add("--minutes", type=float, default=25, help="after which no further row begins (default: 25)")
    help_text = f"leave out {LONG} tokens if their prefill is expected to take longer, in seconds (default: 90)"
    add("--longest", type=float, default=90, help=help_text)
    add("--work", type=Path, help="existing folder for models and caches (default: that of temporary files)")
    add("--output", type=Path, default=Path(".bench"), help="folder of sizes.md and sizes.json (default: .bench)")
    return parser.parse_args(argv)


def _words(known: Sequence[str]) -> Any:
    """A parser of words with commas between them."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return words

    return parse


def _sizes(text: str) -> list[float]:
    known = {f"{size:g}": size for size in SHAPES}
    return [known[word] for word in _words(tuple(known))(text)]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that models are removed and processes ended
    main()
