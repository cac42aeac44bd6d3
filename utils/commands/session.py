"""The commands of the session itself: /show, /turns, /clear and /quit."""

from utils.commands.outcomes import ClearScreen, ForgetConversations, Outcome, Quit, Reply, ShowRows
from utils.commands.registry import Command, CommandContext, Page
from utils.commands.setting_changes import set_or_show
from utils.config.setting_parts import listed_settings
from utils.config.settings import setting_fields
from utils.prompts.conversation import format_turns

NO_CONVERSATION = "there is no conversation to forget"
FORGOTTEN = "{} forgotten; the next prompt begins a new conversation"
NEW = "new"
LONGEST_VALUE = 40  # in /show


def _show(argument: str, context: CommandContext) -> Outcome:
    values = [(name, _shortened(name, entry.describe(context.settings))) for name, entry in listed_settings().items()]
    return [ShowRows([*context.facts, *values])]


def _shortened(name: str, value: str) -> str:
    """A value that fits into a line; the command of the setting shows a longer one."""
    return value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE].rstrip()} ... (/{name})"


def _turns(argument: str, context: CommandContext) -> Outcome:
    if argument.lower() != NEW:
        return set_or_show("turns", setting_fields()["turns"], argument, context)
    turns = len(context.harness.state.conversations)
    if turns:
        return [ForgetConversations(), Reply(FORGOTTEN.format(format_turns(turns)))]
    hint = "" if context.settings.turns else " (/turns on keeps one)"
    return [Reply(NO_CONVERSATION + hint)]


def _clear(argument: str, context: CommandContext) -> Outcome:
    return [ClearScreen()]


def _quit(argument: str, context: CommandContext) -> Outcome:
    return [Quit()]


TURNS = Command(
    "turns",
    f"[on|off|{NEW}]",
    "continue the conversation",
    _turns,
    group="prompts",
    page=Page(
        "Whether each prompt continues the conversation. Every strategy continues its own answers; a turn that was "
        "interrupted or failed is not kept. new forgets the conversation.",
        ("> /turns on", "turns: on"),
        ("/turns [on|off]", f"/turns {NEW}    begin a new conversation"),
        ("chat", "system"),
    ),
    current=setting_fields()["turns"].show,
    words=("on", "off", NEW),
    meanings={"on": "continue it with each prompt", "off": "begin a new one with each prompt", NEW: "forget it"},
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
