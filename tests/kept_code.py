"""Machine code that earlier test processes have generated from the same LLVM code, as Python keeps compiled modules.

LLVM takes a fifth of a second for each form of weights, in each process. Its passes and its checks still run.
"""

import os
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from utils.engine import machine_code

FOLDER = Path(__file__).parent / "__pycache__" / "machine_code"
_machine, _create = machine_code._machine, llvm.create_mcjit_compiler


def keep_machine_code() -> None:
    """Let all modules that are compiled for this processor look for their machine code first."""
    with suppress(OSError):  # a checkout that cannot be written
        FOLDER.mkdir(parents=True, exist_ok=True)
    llvm.create_mcjit_compiler = _compiler


def _compiler(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> llvm.ExecutionEngine:
    engine = _create(module, machine)
    if machine is _machine():  # and not one that a test has made
        made_by = (llvmlite.__version__, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
        file = FOLDER / sha256("\n".join([*made_by, str(module)]).encode()).hexdigest()
        engine.set_object_cache(partial(_store, file), partial(_stored, file))
    return engine


def _stored(file: Path, module: llvm.ModuleRef) -> bytes | None:
    with suppress(OSError):
        return file.read_bytes()
    return None


def _store(file: Path, module: llvm.ModuleRef, code: bytes) -> None:
    own = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        own.write_bytes(code)
        own.replace(file)  # other processes read whole files
