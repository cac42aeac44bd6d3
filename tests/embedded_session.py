"""Sessions with the embedded pair, and prompts for them."""

from pathlib import Path

from fakes import Screen

from utils.commands import default_registry
from utils.comparison.records import RecordFile
from utils.config.settings import Settings
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


def session_of(pair: Pair, view: Screen, file: Path) -> ReplSession:
    return ReplSession(pair, SessionTools(default_registry(), view.renderer, RecordFile(file)), Settings())
