"""Slash commands: a registry, and the commands by group. `default_registry` is the set the program starts with."""

from utils.commands.conversation import RESET
from utils.commands.experiments.audit import AUDIT
from utils.commands.experiments.divergence import DIVERGENCE
from utils.commands.experiments.lossless import LOSSLESS
from utils.commands.experiments.race import RACE
from utils.commands.experiments.replay import REPLAY
from utils.commands.experiments.suite import SUITE
from utils.commands.experiments.sweep import SWEEP
from utils.commands.experiments.whatif import WHATIF
from utils.commands.experiments.why import WHY
from utils.commands.explain import COLUMNS, EXPLAIN
from utils.commands.export import EXPORT
from utils.commands.pairs import PAIR_COMMANDS
from utils.commands.registry import Command, Outcome, Registry, Situation
from utils.commands.session import SESSION_COMMANDS
from utils.commands.settings import tuning_commands
from utils.commands.settings_files import FILE_COMMANDS
from utils.commands.storage import STORAGE_COMMANDS

__all__ = ["Command", "Outcome", "Registry", "Situation", "default_registry"]


def default_registry() -> Registry:
    """Every command of the program: one per setting, those of storages and models, those that check texts, then those of the session."""
    checks = (EXPLAIN, COLUMNS, DIVERGENCE, AUDIT, LOSSLESS, WHY, WHATIF, RACE, SWEEP, SUITE, REPLAY, EXPORT)
    return Registry(
        [*tuning_commands(), *STORAGE_COMMANDS, *PAIR_COMMANDS, *checks, RESET, *FILE_COMMANDS, *SESSION_COMMANDS]
    )
