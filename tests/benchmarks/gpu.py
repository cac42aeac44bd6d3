"""`make gpu-check`: what this project does on a CUDA device, in one table and one JSON file, within eight minutes.

It runs offline with whatever Python, torch and transformers there are, on random models built from configs. What cannot
be measured is reported as "not run" with the reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gpu_adapter import adapt_transformers
from gpu_guard import Result, Row, run_section

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
# Seconds of each section; together they stay below eight minutes.
LIMITS = {
    "modules": 40,
    "bandwidth": 20,
    "self-test": 90,
    "steps": 100,
    "texts": 70,
    "quantizations": 60,
    "placement": 50,
}
MODULES = (
    "utils.decode.model_session",
    "utils.engine.cuda_graph",
    "utils.engine.engine",
    "utils.models.quantization",
    "utils.models.gguf_model",
    "utils.pairs.load_pair",
    "utils.repl.repl_session",
    "sampling",
    "ngram_assisted",
    "bitsandbytes",
    "optimum.quanto",
    "gguf",
    "llvmlite",
    "prompt_toolkit",
)


def main(arguments: list[str] | None = None) -> int:
    """Run the check. Returns 1 if something failed, and 0 if everything ran or could not be run for a stated reason."""
    flags = _flags(arguments)
    machine = _machine()
    _write(", ".join(f"{name} {value}" for name, value in machine.items()))
    results: list[Result] = []
    for name, section in _sections(flags, results):
        results.append(run_section(name, section, LIMITS[name]))
        _write(shown(results[-1]))
    conclusion = _conclusion(results, flags.device)
    _write(conclusion)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine, "conclusion": conclusion, "sections": [result.record() for result in results]}
    flags.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    _write(f"written to {flags.out}")
    return int(any(result.has_failed for result in results))


def _flags(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu-check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: cuda)")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to exercise the check itself")
    parser.add_argument("--out", type=Path, default=ROOT / ".bench" / "gpu.json", help="default: .bench/gpu.json")
    return parser.parse_args(arguments)


def _machine() -> Row:
    """Versions, and the GPU if there is one."""
    machine: Row = {"Python": platform.python_version(), "torch": "missing", "transformers": "missing", "GPU": "none"}
    for name in ("torch", "transformers"):
        try:
            machine[name] = importlib.import_module(name).__version__
        except Exception as error:  # a broken installation may raise anything
            machine[name] = f"missing ({type(error).__name__})"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        machine["GPU"] = properties.name
        machine["GPU memory GB"] = round(properties.total_memory / 1e9, 1)
        machine["CUDA"] = torch.version.cuda
    return machine


def _sections(flags: argparse.Namespace, results: list[Result]) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """Yield each section's name and function. results: of the sections before it."""
    yield "modules", _modules
    for name in list(LIMITS)[1:]:
        yield name, partial(_measured, name, flags, results)


def _modules() -> Iterator[Row]:
    """Which modules can be imported, one row for each that cannot."""
    for name in MODULES:
        adapt_transformers()
        try:
            importlib.import_module(name)
        except Exception as error:  # code that is imported may raise anything
            yield {"module": name, "not run": str(error).partition("\n")[0][:160] or type(error).__name__}


def _measured(name: str, flags: argparse.Namespace, results: list[Result]) -> Iterator[Row]:
    adapt_transformers()
    # Here, since neither torch nor transformers need exist.
    import gpu_sections
    from gpu_setup import Setup

    setup = Setup(flags.device, tiny=flags.tiny)
    if name == "steps":
        speeds = [row["GB/s"] for result in results if result.name == "bandwidth" for row in result.rows]
        return gpu_sections.steps(setup, max(speeds, default=None))
    section: Callable[[Setup], Iterator[Row]] = getattr(gpu_sections, name.replace("-", "_"))
    return section(setup)


def _conclusion(results: list[Result], device: str) -> str:
    measured = [result for result in results[1:] if any("not run" not in row for row in result.rows)]
    if not measured:
        reasons = dict.fromkeys(result.reason for result in results[1:] if result.reason)
        return f"Nothing was measured on {device}: {'; '.join(reasons)}. This is not a failure."
    failed = [result.name for result in results if result.has_failed]
    missing = [result.name for result in results[1:] if result not in measured]
    parts = [f"{len(measured)} sections were measured on {device}"]
    parts += [f"something failed in {', '.join(failed)}"] * bool(failed)
    parts += [f"not run: {', '.join(missing)}"] * bool(missing)
    return f"{'; '.join(parts)}."


def shown(result: Result) -> str:
    """A heading and a table with the columns that occur in any row. Long reasons stand below the table."""
    reason = f": {result.reason}" if result.reason else ""
    lines = [f"\n{result.name} ({result.status}{reason}, {result.seconds:.0f} s)"]
    notes = ("not run", "failed")
    columns = list(dict.fromkeys(key for row in result.rows for key in row if key not in notes))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in result.rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    for index, line in enumerate(cells):
        row = result.rows[index - 1] if index else {}
        note = "".join(f"  {name}: {row[name]}" for name in notes if name in row)
        lines.append("  ".join(cell.ljust(widths[column]) for column, cell in enumerate(line)).rstrip() + note)
    return "\n".join(lines if result.rows else lines[:1])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
