"""Sessions with the embedded pair, and prompts for them."""

from pathlib import Path
from unittest import mock

from fakes import Screen, constant_costs, constant_drafter

from utils.commands import default_registry
from utils.comparison import warm_up
from utils.comparison.records import RecordFile
from utils.config.settings import Settings
from utils.engine import engine
from utils.pairs.pair import Pair
from utils.repl.repl_session import ReplSession
from utils.repl.tools import SessionTools

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
    return ReplSession(
        pair, SessionTools(default_registry(), view.renderer, RecordFile(file)), Settings(engine="invariant")
    )
