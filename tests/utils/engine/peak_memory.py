"""A program of its own that measures how much memory a model in files takes at most while an engine starts.

Usage: python peak_memory.py SMALL_FOLDER LARGE_FOLDER ENGINE:FORMAT ... Prints bytes for each pair as JSON: the peak of
the large model beyond what the process held before, and the weights as the engine holds them. The small model is
computed first, so that libraries, their code and their workspaces are in memory.
"""

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


def started(folder: Path, kind: str, weights: str) -> Engine:
    """A model whose engine has passed its self-test and computed a text."""
    # OpenVINO computes bfloat16 models, and the invariant engine float32 models with rounded weights.
    is_loaded_so = (kind, weights) == ("openvino", "bfloat16")
    model: Any = loaded(folder, torch.bfloat16 if is_loaded_so else torch.float32)
    made = Engine([model], weights=EngineWeights("float32" if is_loaded_so else weights))
    assert made.use(kind, 1).verified
    ModelSession(model).feed([token % 50 for token in range(99)], keep=1)
    return made


def measured(folder: Path, kind: str, weights: str) -> dict[str, int]:
    """Bytes of the peak and of the weights."""
    release_memory()
    before = bytes_of("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    made = started(folder, kind, weights)
    return {"peak": bytes_of("VmHWM") - before, "weights": made.nbytes()}


def main() -> None:
    torch.set_num_threads(1)
    selftest.width_dependence = lambda *arguments, **options: ""  # further passes need caches, not weights
    engine.verify_costs = lambda *arguments, **options: (1e-3, ())
    assert not [name for name in sys.modules if name.startswith("openvino")]
    small, large, *pairs = sys.argv[1:]
    cases = [pair.split(":") for pair in pairs]
    for kind, weights in cases:
        started(Path(small), kind, weights)
    assert not [name for name in sys.modules if name.startswith("openvino_telemetry")], "OpenVINO would report itself"
    found = {f"{kind}:{weights}": measured(Path(large), kind, weights) for kind, weights in cases}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
