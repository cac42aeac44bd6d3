"""Sessions with the embedded pair, prompts for them, and the files of its target."""

import fcntl
import os
import tempfile
from pathlib import Path
from unittest import mock

from fakes import Screen, constant_costs, constant_drafter, with_costs_of

from utils.commands import default_registry
from utils.comparison import warm_up
from utils.comparison.records import RecordFile
from utils.config.settings import Settings
from utils.engine import engine
from utils.files import user_folder
from utils.models.embedded import FOLDER, GGUF_FOLDER, embedded_folder, embedded_gguf
from utils.pairs.pair import Pair
from utils.repl.loaded_pair import SessionTools
from utils.repl.repl_session import ReplSession

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "Repeat after me: one two three, one two three, one two three.",
    "List three fruits.",
    "Übersetze ins Englische: Guten Morgen 🌞",
]


def session_of(pair: Pair, view: Screen, file: Path, *, measured: bool = False) -> ReplSession:
    """A session with default settings. Costs are constant unless they are to be measured, which takes seconds."""
    if not measured:  # these patches are stopped by a fixture in conftest.py
        mock.patch.object(engine, "verify_costs", constant_costs).start()
        mock.patch.object(engine.ForwardProbe, "longer", lambda probe: None).start()
        mock.patch.object(warm_up, "draft_seconds", constant_drafter(lambda job: 1e-4)).start()
    tools = SessionTools(default_registry(), view.renderer, RecordFile(file))
    return with_costs_of(ReplSession(pair, tools, Settings(engine="invariant")))


def share_embedded_model() -> None:
    """Link the embedded model into the cache of this process.

    It is set up once per machine in a folder of the tests, because that takes half a minute and a download.
    """
    shared = Path(tempfile.gettempdir()) / f"speculative-decoding-embedded-{os.getuid()}"
    shared.mkdir(mode=0o700, exist_ok=True)
    own = user_folder("cache")
    own.mkdir(parents=True, exist_ok=True)
    with (shared / "lock").open("w") as lock, mock.patch.dict(os.environ, XDG_CACHE_HOME=str(shared)):
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be setting it up
        theirs = user_folder("cache")
        if not all((theirs / name).exists() for name in (FOLDER, GGUF_FOLDER)):
            embedded_folder(print)
            embedded_gguf(print)
    for name in (FOLDER, GGUF_FOLDER):
        if not (own / name).exists():
            (own / name).symlink_to(theirs / name)
