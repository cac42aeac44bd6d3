"""The commands of the session itself: /show, /turns, /undo, /clear and /quit.

/save and /run write settings to a file of commands and run such a file.
"""

from dataclasses import replace
from itertools import takewhile

from utils.commands.shared.registry import (
    Action,
    ChangeSettings,
    Command,
    CommandContext,
    Outcome,
    Reply,
    RunLines,
    ShowRows,
    output_in,
    path_in,
)
from utils.commands.shared.setting_commands import set_or_show, setting_command
from utils.config.settings import apply_typed, listed_settings, setting_fields, split_setting
from utils.files import read_text, write_file
from utils.text import count_of, escaped, unescaped

NO_CONVERSATION = "there is no conversation to forget"
FORGOTTEN = "{} forgotten; the next prompt begins a new conversation"
NEW = "new"
LONGEST_VALUE = 40  # characters in /show
# The first line of a file with escaped values.
HEADER = r"# settings of /save for /run; in their values \n is a newline and \\ a backslash"


def _show(argument: str, context: CommandContext) -> Outcome:
    rows = [*context.facts()]
    for name, entry in listed_settings().items():
        value = entry.describe(context.settings)
        cut = value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE].rstrip()} ... (/{name})"
        rows.append((name, cut))
    return [ShowRows(rows)]


def _turns(argument: str, context: CommandContext) -> Outcome:
    if argument.lower() != NEW:
        return set_or_show(setting_fields()["turns"], argument, context)
    turns = len(context.harness.state.conversations)
    if turns:
        return [Action.FORGET_CONVERSATIONS, Reply(FORGOTTEN.format(count_of(turns, "turn")))]
    hint = "" if context.settings.turns else " (/turns on keeps one)"
    return [Reply(NO_CONVERSATION + hint)]


def _save(argument: str, context: CommandContext) -> Outcome:
    path, overwrite = output_in(argument, "/save evening.txt")
    values = ((name, entry.show(context.settings)) for name, entry in listed_settings().items())
    lines = [HEADER, *(f"/{name} {escaped(value)}" for name, value in values)]
    write_file(path, ("\n".join(lines) + "\n").encode(), overwrite=overwrite)
    return [Reply(f"settings saved to {path}; /run {path} restores them")]


def _run(argument: str, context: CommandContext) -> Outcome:
    path = path_in(argument, "/run evening.txt")
    # Windows ends lines with "\r\n". Other separators, such as a form feed, may be part of a prompt.
    header, *lines = (line.removesuffix("\r") for line in read_text(path).split("\n"))
    body = [line for line in (header, *lines) if line.strip() and not line.startswith("#")]
    if not header.startswith(HEADER):
        return [RunLines(body)]
    # The settings at the start are one change. Blanks at the ends of values are escaped, others were typed by a user.
    named = list(takewhile(bool, map(split_setting, body)))
    values = {name.replace(" ", "_"): unescaped(text.strip()) for name, text in filter(None, named)}
    settings = apply_typed(context.settings, values, context.limits)
    rows = ((name, row, row.show(settings)) for name, row in listed_settings().items())
    changes = [f"{name} {escaped(value)}" for name, row, value in rows if value != row.show(context.settings)]
    summary = f"{count_of(len(named), 'setting')} read from {path}: {', '.join(changes) or 'nothing changes'}"
    rest = [unescaped(line) if line.startswith("/") else line for line in body[len(named) :]]
    # Twice, because a change of the engine or of the drafter kind measures costs, and the file has its own.
    again = [ChangeSettings(settings)] if settings.costs else []
    return [ChangeSettings(settings, summary), *again, RunLines(rest)]


_SWITCH = setting_command(setting_fields()["turns"])
TURNS = replace(_SWITCH, run=_turns, usage=f"[on|off|{NEW}]", words=_SWITCH.words | {NEW: "begin a new conversation"})
SESSION_COMMANDS = (
    Command(
        "undo",
        "",
        "revert the last change of a setting",
        lambda argument, context: [Action.UNDO_SETTINGS],
        group="session",
        about="Revert the last change of a setting. Repeat it for earlier changes.",
        example=("> /undo", "undone: cache on (was off)"),
        see_also=("show",),
    ),
    Command(
        "save",
        "FILE",
        "write all settings to a file",
        _save,
        group="session",
        about="Write all settings to a file of commands, which /run restores.",
        example=("> /save evening.txt", "settings saved to evening.txt"),
        syntax=("/save FILE", "/save FILE overwrite    replaces a file"),
        see_also=("run", "export"),
        files=("",),
    ),
    Command(
        "run",
        "FILE",
        "run a file of commands and prompts",
        _run,
        group="session",
        about="Run a file of commands and prompts, one per line; # begins a comment.",
        example=("> /run evening.txt",),
        see_also=("save", "race"),
        files=("",),
    ),
    Command(
        "show",
        "",
        "the loaded models and all settings",
        _show,
        group="session",
        about="The loaded models, the engine and the value of every setting, as it would be typed.",
        example=("> /show", "gamma   auto"),
        see_also=("pair", "undo", "save"),
    ),
    Command(
        "clear",
        "",
        "clear the screen",
        lambda argument, context: [Action.CLEAR_SCREEN],
        group="session",
        about="Clear the screen, as Ctrl-L does. Nothing else changes.",
        example=("> /clear",),
        see_also=("turns",),
    ),
    Command(
        "quit",
        "",
        "leave; so does Ctrl-D",
        lambda argument, context: [Action.QUIT],
        group="session",
        rank=2,
        about="End the session, as Ctrl-D does. Ctrl-C stops a running prompt or report instead.",
        example=("> /quit",),
        see_also=("save",),
        at_once=True,
    ),
)
