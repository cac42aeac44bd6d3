"""Slash commands: one module for each group. `default_registry` holds all of them."""

from utils.commands.experiments.audit import AUDIT
from utils.commands.experiments.compare import COMPARE
from utils.commands.experiments.lossless import LOSSLESS
from utils.commands.experiments.race import RACE
from utils.commands.experiments.replay import REPLAY
from utils.commands.experiments.sweep import SWEEP
from utils.commands.experiments.verdict.command import VERDICT
from utils.commands.experiments.whatif import WHATIF
from utils.commands.experiments.why import WHY
from utils.commands.explain import EXPLAIN
from utils.commands.export import EXPORT
from utils.commands.help import help_command
from utils.commands.ngram import NGRAM_COMMANDS
from utils.commands.outcomes import Outcome
from utils.commands.pairs import PAIR_COMMANDS
from utils.commands.registry import Command, CommandContext, Registry
from utils.commands.servers.server_command import SERVER
from utils.commands.session import SESSION_COMMANDS, TURNS
from utils.commands.settings import setting_commands
from utils.commands.settings_files import FILE_COMMANDS
from utils.commands.texts import TEXTS

__all__ = ["Command", "CommandContext", "Outcome", "Registry", "default_registry"]


def default_registry() -> Registry:
    """All commands. /help sorts them by group and rank, and keeps this order among equals."""
    experiments = (VERDICT, RACE, WHY, WHATIF, SWEEP, REPLAY, AUDIT, LOSSLESS)
    results = (TEXTS, EXPLAIN, EXPORT, COMPARE)
    settings = (*setting_commands(), *NGRAM_COMMANDS, TURNS)
    commands = (*experiments, *settings, *PAIR_COMMANDS, SERVER, *results, *FILE_COMMANDS, *SESSION_COMMANDS)
    return Registry([help_command(commands), *commands])
