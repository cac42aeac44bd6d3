"""The commands of the session itself: /say, /show, /help, /reset, /clear and /quit."""

from utils.commands.outcomes import ClearScreen, ForgetConversations, Outcome, Quit, Reply, RunPrompt, ShowRows
from utils.commands.registry import Command, CommandContext
from utils.config.settings import setting_fields
from utils.errors import UserError
from utils.prompts.conversation import format_turns

NO_CONVERSATION = "there is no conversation to forget"
FORGOTTEN = "{} forgotten; the next prompt begins a new conversation"


def _say(argument: str, context: CommandContext) -> Outcome:
    if not argument.strip():
        raise UserError("give the text to send, for example: /say /etc/hosts is a file that")
    return [RunPrompt(argument)]


def _show(argument: str, context: CommandContext) -> Outcome:
    values = [(name, entry.show(context.settings)) for name, entry in setting_fields().items()]
    return [ShowRows([*context.facts, *values])]


def _help(argument: str, context: CommandContext) -> Outcome:
    commands = [context.registry.find(argument.removeprefix("/"))] if argument else context.registry
    return [ShowRows([command.help_row(context.settings) for command in commands])]


def _reset(argument: str, context: CommandContext) -> Outcome:
    turns = len(context.harness.state.conversations)
    if turns:
        return [ForgetConversations(), Reply(FORGOTTEN.format(format_turns(turns)))]
    hint = "" if context.settings.turns else " (/turns on keeps one)"
    return [Reply(NO_CONVERSATION + hint)]


def _clear(argument: str, context: CommandContext) -> Outcome:
    return [ClearScreen()]


def _quit(argument: str, context: CommandContext) -> Outcome:
    return [Quit()]


RESET = Command("reset", "", "forget the conversations that /turns on keeps", _reset)
SESSION_COMMANDS = (
    Command("say", "TEXT", "send TEXT exactly as typed, even if it begins with a slash", _say, verbatim=True),
    Command("show", "", "the loaded models and all settings", _show),
    Command("help", "[COMMAND]", "all commands with their current values, or one of them", _help),
    Command("clear", "", "clear the screen", _clear),
    Command("quit", "", "end the session, as Ctrl-D does; Ctrl-C stops a running prompt or report", _quit),
)
