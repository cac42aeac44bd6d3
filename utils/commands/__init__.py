"""Slash commands: a registry, and the commands by group. `default_registry` is the set the program starts with."""

from utils.commands.registry import Command, Outcome, Registry, Situation
from utils.commands.session import SESSION_COMMANDS
from utils.commands.tuning import tuning_commands

__all__ = ["Command", "Outcome", "Registry", "Situation", "default_registry"]


def default_registry() -> Registry:
    """Every command of the program: one per setting, then those of the session."""
    return Registry([*tuning_commands(), *SESSION_COMMANDS])
