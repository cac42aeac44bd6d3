"""The commands of the session itself: say, show, help, clear, quit."""

from utils.commands.registry import Action, Command, Outcome, Situation
from utils.config.settings import setting_fields, shown
from utils.errors import UserError


def _say(argument: str, situation: Situation) -> Outcome:
    if not argument.strip():
        raise UserError("give the text to send, for example: /say /etc/hosts is a file that")
    return Outcome(prompt=argument)


def _show(argument: str, situation: Situation) -> Outcome:
    values = ((name, shown(situation.settings, entry), "") for name, entry in setting_fields().items())
    return Outcome(rows=(*((name, value, "") for name, value in situation.facts), *values))


def _help(argument: str, situation: Situation) -> Outcome:
    if not argument:
        return Outcome(rows=situation.registry.help_rows(situation.settings))
    command = situation.registry.find(argument.removeprefix("/"))
    return Outcome(
        rows=((f"/{command.name} {command.usage}".strip(), command.current(situation.settings), command.summary),)
    )


def _clear(argument: str, situation: Situation) -> Outcome:
    return Outcome(action=Action.CLEAR)


def _quit(argument: str, situation: Situation) -> Outcome:
    return Outcome(action=Action.QUIT)


SESSION_COMMANDS = (
    Command("say", "TEXT", "send TEXT as it stands, also when it begins with a slash", _say, verbatim=True),
    Command("show", "", "what is loaded, and every setting", _show),
    Command("help", "[COMMAND]", "every command with its current value", _help),
    Command("clear", "", "clear the screen", _clear),
    Command("quit", "", "leave (so does Ctrl-D); Ctrl-C stops a running prompt or check", _quit),
)
