"""/reset: the conversations begin anew."""

from utils.commands.registry import Action, Command, Outcome, Situation
from utils.prompts.conversation import counted


def _reset(argument: str, situation: Situation) -> Outcome:
    turns = len(situation.bench.memory.conversations)
    if turns:
        return Outcome(action=Action.RESET, reply=f"forgotten: {counted(turns)}; the next prompt begins a conversation")
    hint = "" if situation.settings.turns else " (/turns on goes on with what was said)"
    return Outcome(reply=f"there is no conversation to forget{hint}")


RESET = Command("reset", "", "forget the conversations that /turns on keeps", _reset)
