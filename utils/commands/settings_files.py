"""/save and /run write settings to a file of commands and run such a file; /set, /undo and /history."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from utils.bounds import WholeRange
from utils.commands.outcomes import ChangeSettings, Outcome, Reply, RunLines, ShowRows, UndoSettings
from utils.commands.paths import output_in, path_in, write_output
from utils.commands.registry import Command, CommandContext, CommandError, Page, Registry
from utils.config.setting_table import known_settings, listed_settings, setting_named, split_setting
from utils.errors import UserError
from utils.files import read_text
from utils.screen.line_history import history_path, recent_lines
from utils.text import count_of, escaped, unescaped

# The first line of a file whose values have escapes. Files of earlier versions have no escapes.
HEADER = r"# settings of /save for /run; in their values \n is a newline and \\ a backslash"
EARLIER_HEADER = "# settings, for /run"
# Changing these can fail for reasons outside of a value, and measures costs again, so they are run as lines.
LATE = ("engine", "threads", "drafter_kind", "costs")
PROMPTS = "prompts"  # the word after a file name that says that its lines are prompts
FEW_LINES = 10  # a file with fewer lines is always run
MARKUP = re.compile(r"\s|[|<>*{}\[\]+=-]|```|\d+\. |(import|from|def|class) ")
DEFAULT_LINES, MAX_LINES = 20, 10_000


def _save(argument: str, context: CommandContext) -> Outcome:
    file = output_in(argument, "/save evening.txt")
    values = ((name, entry.show(context.settings)) for name, entry in listed_settings().items())
    lines = [HEADER, *(f"/{name} {escaped(value)}" for name, value in values)]
    write_output(file, ("\n".join(lines) + "\n").encode())
    return [Reply(f"settings saved to {file.path}; /run {file.path} restores them")]


def _run(argument: str, context: CommandContext) -> Outcome:
    name, _, last = argument.rpartition(" ")
    confirmed = last == PROMPTS and bool(name.strip())
    path = path_in(name.strip() if confirmed else argument, "/run evening.txt")
    # Windows ends lines with "\r\n". Other separators, such as a form feed, may be part of a prompt.
    lines = [line.removesuffix("\r") for line in read_text(path).split("\n")]
    header, body = lines[0], [line for line in lines if line.strip() and not line.startswith("#")]
    if header.startswith((HEADER, EARLIER_HEADER)):
        return _run_settings(path, body, context, has_escapes=header.startswith(HEADER))
    if not confirmed and _is_text(lines, context.registry):
        raise UserError(
            f"{path} looks like a text or a program, not like commands and prompts; "
            f"'/run {path} {PROMPTS}' sends each of its lines."
        )
    return [RunLines(body)]


def _run_settings(path: Path, lines: Sequence[str], context: CommandContext, *, has_escapes: bool) -> Outcome:
    """Apply the settings at the start of the file in one change, and run everything else as lines."""
    decoded: Callable[[str], str] = unescaped if has_escapes else str
    settings = context.settings
    late: list[str] = []
    changes: list[str] = []
    values = sorted(_leading_settings(lines), key=lambda value: value[0] == "costs")
    for name, text in values:
        # Blanks at the ends of a value are escaped, so those found here were typed by somebody.
        entry, value = setting_named(name), decoded(text.strip())
        # The lines that measure costs may change them, so these are set again after any of them.
        if value == entry.show(settings) and not (name == "costs" and late):
            continue
        try:
            changed = entry.change(settings, value, context.limits)
        except UserError:
            late.append(f"/{name} {value}")  # fails again as a line, which shows why
            continue
        if name in LATE:
            late.append(f"/{name} {value}")
        else:
            settings = changed
            changes.append(f"{name} {escaped(entry.show(settings))}")
    summary = f"{count_of(len(values), 'setting')} read from {path}: {', '.join(changes) or 'nothing changes'}"
    rest = [*late, *(decoded(line) if line.startswith("/") else line for line in lines[len(values) :])]
    return [ChangeSettings(settings, summary), *([RunLines(rest)] if rest else [])]


def _leading_settings(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names and values of the settings at the start of a file."""
    for line in lines:
        if (named := split_setting(line)) is None:
            return
        yield named


def _is_text(lines: Sequence[str], registry: Registry) -> bool:
    """Whether a file is evidently something else than lines of commands and prompts: Markdown, a program, prose.

    Such files have hardly any commands, and many of their lines begin with markup or continue a sentence.
    """
    names = {command.name for command in registry}
    filled = [line for line in lines if line.strip()]
    commands = sum(line.startswith("/") and line[1:].split(" ")[0] in names for line in filled)
    if len(filled) < FEW_LINES or 10 * commands > len(filled):
        return False
    pairs = zip(["", *lines], lines, strict=False)
    odd = sum(bool(MARKUP.match(line)) or _continues(before, line) for before, line in pairs if line.strip())
    return 4 * odd > len(filled)


def _continues(before: str, line: str) -> bool:
    """Whether a line continues the sentence of a long line before it."""
    return len(before) > 50 and before[-1] not in ".?!:" and line[0].islower()


def _set(argument: str, context: CommandContext) -> Outcome:
    if not argument:
        raise CommandError("/set NAME VALUE, for example /set gamma 4")
    name = re.split(r"[\s=]", argument.removeprefix("/"), maxsplit=1)[0].lower()
    if name not in known_settings():
        context.registry.find(name)  # an unknown name raises here
        raise UserError(f"'{name}' is a command, not a setting; /show lists the settings.")
    return context.registry.run("/" + argument.removeprefix("/"), context)


def _undo(argument: str, context: CommandContext) -> Outcome:
    return [UndoSettings()]


def _history(argument: str, context: CommandContext) -> Outcome:
    count = WholeRange(1, MAX_LINES).parse(argument or str(DEFAULT_LINES))
    if not context.interactive:
        return [Reply("no line was typed: /history lists the lines of interactive sessions")]
    lines = recent_lines(history_path(), count)
    if not lines:
        return [Reply(f"there are no typed lines in {history_path()} yet")]
    return [ShowRows([(str(number), line) for number, line in enumerate(lines, start=-len(lines))])]


FILE_COMMANDS = (
    Command(
        "set",
        "NAME VALUE",
        "the same as /NAME VALUE",
        _set,
        page=Page("The same as /NAME VALUE.", ("> /set gamma 4", "gamma: 4"), see_also=("show",)),
        words=tuple(known_settings()),
    ),
    Command(
        "undo",
        "",
        "revert the last change of a setting",
        _undo,
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
            "Run a file of commands and prompts, one per line; # begins a comment. A file that looks like a text or a "
            "program is only run with the word prompts.",
            ("> /run evening.txt",),
            ("/run FILE", "/run FILE prompts"),
            ("save", "race"),
        ),
        files=("",),
    ),
    Command(
        "history",
        "[N]",
        f"the last N typed lines (default: {DEFAULT_LINES})",
        _history,
        page=Page("The last N typed lines of all interactive sessions; Ctrl-R searches them.", ("> /history 5",)),
    ),
)
