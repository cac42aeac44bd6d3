"""Slash commands: one module for each group. `default_registry` holds all of them."""

from utils.commands.checks import AUDIT, LOSSLESS
from utils.commands.compare import COMPARE, REPLAY
from utils.commands.gate import GATE
from utils.commands.help import EXPLAIN, help_command
from utils.commands.ladder import LADDER
from utils.commands.learn import LEARN
from utils.commands.pairs import PAIR_COMMANDS
from utils.commands.race import RACE, SWEEP
from utils.commands.server import SERVER
from utils.commands.setting_commands import SESSION_COMMANDS, SETTING_COMMANDS
from utils.commands.shared.registry import Command, CommandContext, Outcome, Registry
from utils.commands.texts import EXPORT, TEXTS
from utils.commands.verdict import VERDICT
from utils.commands.whatif import WHATIF, WHY

__all__ = ["Command", "CommandContext", "Outcome", "Registry", "default_registry"]


def default_registry() -> Registry:
    """All commands. /help sorts them by group and rank, and keeps this order among equals."""
    experiments = (VERDICT, RACE, WHY, WHATIF, LADDER, SWEEP, REPLAY, GATE, AUDIT, LOSSLESS)
    results = (TEXTS, EXPLAIN, EXPORT, COMPARE)
    commands = (*experiments, *SETTING_COMMANDS.values(), *PAIR_COMMANDS, LEARN, SERVER, *results, *SESSION_COMMANDS)
    return Registry([help_command(commands), *commands])
