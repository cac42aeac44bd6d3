"""/save and /run write settings to a file of commands and run such a file; /set, /undo and /history."""

from utils.bounds import WholeRange
from utils.commands.outcomes import Outcome, Reply, RunLines, ShowRows, UndoSettings
from utils.commands.paths import path_in, write_file
from utils.commands.registry import Command, CommandContext
from utils.config.settings import setting_fields
from utils.errors import UserError
from utils.screen.line_history import history_path, recent_lines

HEADER = "# settings, for /run"  # the first line of a file that /save may overwrite
DEFAULT_LINES, MAX_LINES = 20, 10_000


def _save(argument: str, context: CommandContext) -> Outcome:
    path = path_in(argument, "/save evening.txt")
    lines = [f"/{name} {entry.show(context.settings)}" for name, entry in setting_fields().items()]
    try:
        # Only a file that /save wrote may be overwritten; it could be the user's notes.
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(HEADER):
            raise UserError(f"{path} already exists and is not a settings file: choose a different name.")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Choose a different folder.") from error
    # /run reads one command per line, so a value of several lines, a system prompt, cannot be saved.
    write_file(path, ("\n".join([HEADER, *(line for line in lines if "\n" not in line)]) + "\n").encode())
    return [Reply(f"settings saved to {path}; /run {argument} restores them")]


def _run(argument: str, context: CommandContext) -> Outcome:
    path = path_in(argument, "/run evening.txt")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # drops the byte order mark of Windows editors
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"{path} cannot be read: {reason}.") from error
    return [RunLines([line for line in lines if line.strip() and not line.startswith("#")])]


def _set(argument: str, context: CommandContext) -> Outcome:
    name, _, value = argument.removeprefix("/").partition(" ")
    if name not in setting_fields():
        context.registry.find(name)  # an unknown name raises here
        raise UserError(f"'{name}' is a command, not a setting; /show lists the settings.")
    return context.registry.run(f"/{name} {value}", context)


def _undo(argument: str, context: CommandContext) -> Outcome:
    return [UndoSettings()]


def _history(argument: str, context: CommandContext) -> Outcome:
    count = WholeRange(1, MAX_LINES).parse(argument or str(DEFAULT_LINES))
    lines = recent_lines(history_path(), count)
    if not lines:
        return [Reply(f"there are no typed lines in {history_path()} yet")]
    return [ShowRows([(str(number), line) for number, line in enumerate(lines, start=-len(lines))])]


FILE_COMMANDS = (
    Command("set", "NAME VALUE", "the same as /NAME VALUE", _set, words=tuple(setting_fields())),
    Command("undo", "", "revert the last change of a setting; repeatable", _undo),
    Command("save", "FILE", "write all settings to a file of commands", _save),
    Command("run", "FILE", "run a file of commands and prompts, one per line; # begins a comment", _run),
    Command("history", "[N]", f"the last N typed lines (default: {DEFAULT_LINES})", _history),
)
