"""The commands of the session itself: /show, /turns, /undo, /clear and /quit.

/save and /run write settings to a file of commands and run such a file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from utils.commands.shared.outcomes import Action, ChangeSettings, Outcome, Reply, RunLines, ShowRows
from utils.commands.shared.paths import output_in, path_in
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.commands.shared.setting_commands import set_or_show, setting_command
from utils.config.settings import listed_settings, setting_fields, split_setting
from utils.errors import UserError
from utils.files import read_text, write_file
from utils.text import count_of, escaped, unescaped

NO_CONVERSATION = "there is no conversation to forget"
FORGOTTEN = "{} forgotten; the next prompt begins a new conversation"
NEW = "new"
LONGEST_VALUE = 40  # characters in /show
# The first line of a file with escaped values.
HEADER = r"# settings of /save for /run; in their values \n is a newline and \\ a backslash"
# Changing these measures costs again and can fail for reasons other than the value, so they are run as lines.
LATE = ("engine", "threads", "drafter_kind", "costs")


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
    return _run_settings(path, body, context) if header.startswith(HEADER) else [RunLines(body)]


def _run_settings(path: Path, lines: Sequence[str], context: CommandContext) -> Outcome:
    """Apply the settings at the start of the file in one change, and run everything else as lines."""
    settings = context.settings
    late: list[str] = []
    changes: list[str] = []
    values = sorted(_leading_settings(lines), key=lambda value: value[0] == "costs")
    for name, text in values:
        # Blanks at the ends of a value are escaped, so unescaped ones were typed by a user.
        entry, value = listed_settings()[name], unescaped(text.strip())
        # The lines that measure costs may change them, so costs are set again after any such line.
        if value == entry.show(settings) and not (name == "costs" and late):
            continue
        try:
            changed = entry.change(settings, value, context.limits)
        except UserError:
            late.append(f"/{name} {value}")  # the line fails again and shows why
            continue
        if name in LATE:
            late.append(f"/{name} {value}")
        else:
            settings = changed
            changes.append(f"{name} {escaped(entry.show(settings))}")
    summary = f"{count_of(len(values), 'setting')} read from {path}: {', '.join(changes) or 'nothing changes'}"
    rest = [*late, *(unescaped(line) if line.startswith("/") else line for line in lines[len(values) :])]
    return [ChangeSettings(settings, summary), *([RunLines(rest)] if rest else [])]


def _leading_settings(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names and values of the settings at the start of a file."""
    for line in lines:
        if (named := split_setting(line)) is None:
            return
        yield named


_SWITCH = setting_command(setting_fields()["turns"])
TURNS = replace(_SWITCH, run=_turns, usage=f"[on|off|{NEW}]", words=_SWITCH.words | {NEW: "begin a new conversation"})
SESSION_COMMANDS = (
    Command(
        "undo",
        "",
        "revert the last change of a setting",
        lambda argument, context: [Action.UNDO_SETTINGS],
        group="session",
        page=Page(
            "Revert the last change of a setting. Repeat it for earlier changes.",
            ("> /undo", "undone: cache on (was off)"),
            see_also=("show",),
        ),
    ),
    Command(
        "save",
        "FILE",
        "write all settings to a file",
        _save,
        group="session",
        page=Page(
            "Write all settings to a file of commands, which /run restores.",
            ("> /save evening.txt", "settings saved to evening.txt"),
            ("/save FILE", "/save FILE overwrite    replaces a file"),
            ("run", "export"),
        ),
        files=("",),
    ),
    Command(
        "run",
        "FILE",
        "run a file of commands and prompts",
        _run,
        group="session",
        page=Page(
            "Run a file of commands and prompts, one per line; # begins a comment.",
            ("> /run evening.txt",),
            see_also=("save", "race"),
        ),
        files=("",),
    ),
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
        lambda argument, context: [Action.CLEAR_SCREEN],
        group="session",
        page=Page("Clear the screen, as Ctrl-L does. Nothing else changes.", ("> /clear",), see_also=("turns",)),
    ),
    Command(
        "quit",
        "",
        "leave; so does Ctrl-D",
        lambda argument, context: [Action.QUIT],
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
