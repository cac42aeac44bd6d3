"""/save and /run: settings as a file of commands, and files of commands and prompts; /set, /undo and /history."""

from utils.commands.paths import path_in, written
from utils.commands.registry import Action, Command, Outcome, Situation
from utils.config.settings import setting_fields, shown
from utils.config.value_types import Whole
from utils.errors import UserError
from utils.screen.line_history import history_path, recent

FIRST = "# settings, for /run"
SHOWN, MOST_SHOWN = 20, 10_000


def _save(argument: str, situation: Situation) -> Outcome:
    path = path_in(argument, "/save evening.txt")
    lines = [f"/{name} {shown(situation.settings, entry)}" for name, entry in setting_fields().items()]
    try:
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(FIRST):
            raise UserError(f"{path} is there already and holds something else: choose another name.")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Choose another place.") from error
    written(path, ("\n".join([FIRST, *(line for line in lines if "\n" not in line)]) + "\n").encode())
    return Outcome(reply=f"saved to {path}: /run {argument} sets it all again")


def _run(argument: str, situation: Situation) -> Outcome:
    path = path_in(argument, "/run evening.txt")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}."
        ) from error
    return Outcome(lines=tuple(line for line in lines if line.strip() and not line.startswith("#")))


def _set(argument: str, situation: Situation) -> Outcome:
    name, _, value = argument.partition(" ")
    if name.removeprefix("/") not in setting_fields():
        situation.registry.find(name.removeprefix("/"))
        raise UserError(f"'{name}' is a command and no setting; /show lists the settings.")
    return situation.registry.run(f"/{name.removeprefix('/')} {value}", situation)


def _undo(argument: str, situation: Situation) -> Outcome:
    return Outcome(action=Action.UNDO)


def _history(argument: str, situation: Situation) -> Outcome:
    count: int = Whole(1, MOST_SHOWN).parse(argument or str(SHOWN), SHOWN, situation.limits)
    lines = recent(history_path(), count)
    if not lines:
        return Outcome(reply=f"nothing was typed yet that {history_path()} would hold")
    return Outcome(rows=tuple((str(place - len(lines)), line, "") for place, line in enumerate(lines)))


FILE_COMMANDS = (
    Command("set", "NAME VALUE", "the same as /NAME VALUE", _set, words=tuple(setting_fields())),
    Command("undo", "", "take the last change of a setting back; repeatable", _undo),
    Command("save", "FILE", "write all settings to a file of commands", _save),
    Command("run", "FILE", "carry out a file of commands and prompts, a line each; # begins a remark", _run),
    Command("history", "[N]", f"the last N lines that were typed (N: {SHOWN})", _history),
)
