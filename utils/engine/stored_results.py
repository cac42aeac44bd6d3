"""Results of the self-test and measured costs, kept in a JSON file from one start to the next.

The key of an entry names everything that the results depend on, so that a change finds none. An entry that cannot be
read makes a start slower, never wrong: it counts as absent, and everything is measured again.
"""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from utils.engine.engine_choice import EngineFigures
from utils.engine.forward_timing import LongerContext
from utils.engine.machine import AVAILABLE_THREADS, machine_facts
from utils.engine.machine_code import cpu_features
from utils.files import replacing

ROOT = Path(__file__).parents[2]
# What computes and tests, and the drafters, whose times are stored too.
SOURCE = tuple(ROOT / folder for folder in ("utils/engine", "utils/decode", "utils/pairs", "sampling"))
# Variables that change how, or with how many threads, kernels compute.
VARIABLES = (
    *("OMP_", "MKL_", "KMP_", "GOMP_", "DNNL_", "ONEDNN_", "ATEN_", "OPENBLAS_", "BLIS_", "TORCH_", "PYTORCH_"),
    *("CUDA_", "CUBLAS", "CUDNN_", "NVIDIA_TF32", "LD_PRELOAD"),
)
MAX_ENTRIES = 32  # of a file


@dataclass(frozen=True, slots=True)
class EntryFile:
    """Entries in a JSON file, the newest ones last. Its folder need not exist yet."""

    path: Path

    def get(self, key: str) -> dict[str, Any] | None:
        """The entry with this key, if there is one. Its sequences are tuples, as they were before JSON."""
        entry = self._entries().get(key)
        return _with_tuples(entry) if isinstance(entry, dict) else None

    def put(self, key: str, entry: Mapping[str, Any]) -> None:
        """Store an entry in place of an earlier one. Does nothing if the file cannot be written."""
        entries = self._entries()
        entries.pop(key, None)  # so that it becomes the newest
        content = json.dumps(dict([*entries.items(), (key, entry)][-MAX_ENTRIES:]), indent=1)
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path, overwrite=True) as file:
                file.write(content.encode() + b"\n")

    def _entries(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, RecursionError, TypeError):
            return dict(json.loads(self.path.read_text(encoding="utf-8")))
        return {}


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tuples(part) for key, part in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class StoredResult:
    """What the preparation of an engine found out.

    kind, reason, threads: as in EngineState. tested_on: the day of the self-test. step_seconds, costs, longer,
    draft_seconds, table: see Engine.
    """

    kind: str
    reason: str
    threads: int
    tested_on: str
    step_seconds: float
    costs: Sequence[float]
    longer: LongerContext | None = None
    draft_seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    table: Mapping[str, EngineFigures] = field(default_factory=dict)


class ResultFile(EntryFile):
    """The file of results."""

    def result(self, key: str) -> StoredResult | None:
        """The result with this key, if there is one."""
        with suppress(KeyError, TypeError, AttributeError):
            if entry := self.get(key):
                longer = entry["longer"] and LongerContext(**entry["longer"])
                table = {name: EngineFigures(**row) for name, row in entry["table"].items()}
                return StoredResult(**entry | {"longer": longer, "table": table})
        return None


def result_key(models: str, **options: object) -> str:
    """The key of results: the models and options, versions, source, processor and threads.

    models: identifies the files of all models.
    """
    facts = {"models": models, "environment": environment(), "options": options}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode(errors="replace")).hexdigest()


@cache
def environment() -> dict[str, Any]:
    """Versions, processor, threads and settings of the libraries."""
    machine = machine_facts()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "llvmlite": version("llvmlite"),
        "source": source_digest(),
        "machine": [machine[name] for name in ("cpu", "cores", "threads", "gpus", "system")],
        # The libraries choose kernels by these. Virtual processors of one name may have different ones.
        "instructions": [torch.backends.cpu.get_cpu_capability(), *sorted(cpu_features())],
        "threads": AVAILABLE_THREADS,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }


def source_digest(folders: Sequence[Path] = SOURCE) -> str:
    """The version of the engine: a digest of the source that computes and tests."""
    digest = hashlib.sha256()
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
