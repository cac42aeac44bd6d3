"""Slash commands: a registry, and the commands by group. `default_registry` is the set the program starts with."""

from utils.commands.audit import AUDIT
from utils.commands.conversation import RESET
from utils.commands.divergence import DIVERGENCE
from utils.commands.explain import COLUMNS, EXPLAIN
from utils.commands.export import EXPORT
from utils.commands.files import FILE_COMMANDS
from utils.commands.lossless import LOSSLESS
from utils.commands.pairs import PAIR_COMMANDS
from utils.commands.race import RACE
from utils.commands.registry import Command, Outcome, Registry, Situation
from utils.commands.replay import REPLAY
from utils.commands.session import SESSION_COMMANDS
from utils.commands.storage import STORAGE_COMMANDS
from utils.commands.suite import SUITE
from utils.commands.sweep import SWEEP
from utils.commands.tuning import tuning_commands
from utils.commands.whatif import WHATIF
from utils.commands.why import WHY

__all__ = ["Command", "Outcome", "Registry", "Situation", "default_registry"]


def default_registry() -> Registry:
    """Every command of the program: one per setting, those of storages and models, those that check texts, then those of the session."""
    checks = (EXPLAIN, COLUMNS, DIVERGENCE, AUDIT, LOSSLESS, WHY, WHATIF, RACE, SWEEP, SUITE, REPLAY, EXPORT)
    return Registry([*tuning_commands(), *STORAGE_COMMANDS, *PAIR_COMMANDS, *checks, RESET, *FILE_COMMANDS, *SESSION_COMMANDS])
