"""The commands of the session itself: /show, /turns, /clear and /quit."""

from dataclasses import replace

from utils.commands.shared.outcomes import ClearScreen, ForgetConversations, Outcome, Quit, Reply, ShowRows
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.commands.shared.setting_commands import set_or_show, setting_command
from utils.config.setting_table import listed_settings, setting_fields
from utils.prompts.conversation import format_turns

NO_CONVERSATION = "there is no conversation to forget"
FORGOTTEN = "{} forgotten; the next prompt begins a new conversation"
NEW = "new"
LONGEST_VALUE = 40  # characters in /show


def _show(argument: str, context: CommandContext) -> Outcome:
    values = [(name, _shortened(name, entry.describe(context.settings))) for name, entry in listed_settings().items()]
    return [ShowRows([*context.facts(), *values])]


def _shortened(name: str, value: str) -> str:
    """A value cut to one line. The command of the setting shows all of it."""
    return value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE].rstrip()} ... (/{name})"


def _turns(argument: str, context: CommandContext) -> Outcome:
    if argument.lower() != NEW:
        return set_or_show(setting_fields()["turns"], argument, context)
    turns = len(context.harness.state.conversations)
    if turns:
        return [ForgetConversations(), Reply(FORGOTTEN.format(format_turns(turns)))]
    hint = "" if context.settings.turns else " (/turns on keeps one)"
    return [Reply(NO_CONVERSATION + hint)]


def _clear(argument: str, context: CommandContext) -> Outcome:
    return [ClearScreen()]


def _quit(argument: str, context: CommandContext) -> Outcome:
    return [Quit()]


TURNS = replace(
    setting_command(setting_fields()["turns"]), run=_turns, usage=f"[on|off|{NEW}]", words=("on", "off", NEW)
)
SESSION_COMMANDS = (
    Command(
        "show",
        "",
        "the loaded models and all settings",
        _show,
        group="session",
        page=Page(
            "The loaded models, the engine and the value of every setting, as it would be typed.",
            ("> /show", "gamma   auto"),
            see_also=("pair", "undo", "save"),
        ),
    ),
    Command(
        "clear",
        "",
        "clear the screen",
        _clear,
        group="session",
        page=Page("Clear the screen, as Ctrl-L does. Nothing else changes.", ("> /clear",), see_also=("turns",)),
    ),
    Command(
        "quit",
        "",
        "leave; so does Ctrl-D",
        _quit,
        group="session",
        rank=2,
        page=Page(
            "End the session, as Ctrl-D does. Ctrl-C stops a running prompt or report instead.",
            ("> /quit",),
            see_also=("save",),
        ),
        at_once=True,
    ),
)
