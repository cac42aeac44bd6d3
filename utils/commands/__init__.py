"""Slash commands: one module for each group. `default_registry` holds all of them."""

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
from utils.commands.outcomes import Outcome
from utils.commands.pairs import PAIR_COMMANDS
from utils.commands.registry import Command, CommandContext, Registry
from utils.commands.session import RESET, SESSION_COMMANDS
from utils.commands.settings import setting_commands
from utils.commands.settings_files import FILE_COMMANDS
from utils.commands.storage import STORAGE_COMMANDS

__all__ = ["Command", "CommandContext", "Outcome", "Registry", "default_registry"]


def default_registry() -> Registry:
    """All commands, in the order in which /help lists them."""
    experiments = (EXPLAIN, COLUMNS, DIVERGENCE, AUDIT, LOSSLESS, WHY, WHATIF, RACE, SWEEP, SUITE, REPLAY, EXPORT)
    return Registry(
        [*setting_commands(), *STORAGE_COMMANDS, *PAIR_COMMANDS, *experiments, RESET, *FILE_COMMANDS, *SESSION_COMMANDS]
    )
