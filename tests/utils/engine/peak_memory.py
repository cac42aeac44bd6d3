"""A program of its own that measures how much memory a model in files takes at most while an engine starts.

Usage: python peak_memory.py SMALL_FOLDER LARGE_FOLDER FORMAT ... Prints bytes for each format as JSON: the peak of the
large model beyond what the process held before, and the weights as the engine holds them. The small model is
computed first, so that libraries, their code and their workspaces are in memory.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from stored_models import loaded

from utils.decode.model_session import ModelSession
from utils.engine import Engine, engine, selftest
from utils.engine.weight_format import EngineWeights
from utils.freed_memory import release_memory

STATUS = Path("/proc/self/status")


def bytes_of(field: str) -> int:
    """A field of this process's memory statistics."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def started(folder: Path, weights: str) -> Engine:
    """A model whose engine has passed its self-test and computed a text."""
    model: Any = loaded(folder)
    made = Engine([model], weights=EngineWeights(weights))
    assert made.use("invariant", 1).verified
    ModelSession(model).feed([token % 50 for token in range(99)], keep=1)
    return made


def measured(folder: Path, weights: str) -> dict[str, int]:
    """Bytes of the peak and of the weights."""
    release_memory()
    before = bytes_of("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    made = started(folder, weights)
    return {"peak": bytes_of("VmHWM") - before, "weights": made.nbytes()}


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # imported modules are not searched for garbage at every release of memory
    selftest.width_dependence = lambda *arguments, **options: ""  # further passes need caches, not weights
    engine.verify_costs = lambda *arguments, **options: (1e-3, ())
    small, large, *formats = sys.argv[1:]
    for weights in formats:
        started(Path(small), weights)
    found = {weights: measured(Path(large), weights) for weights in formats}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
