"""/texts: the last texts side by side, and why they differ."""

from utils.commands.outcomes import Outcome, Reply
from utils.commands.registry import Command, CommandContext, CommandError, Page


def _texts(argument: str, context: CommandContext) -> Outcome:
    columns = context.registry.run("/columns", context)
    try:
        return [*columns, *context.registry.run("/divergence", context)]
    except CommandError as error:
        # The texts are worth showing even if there is none to compare them with.
        return [*columns, Reply(str(error).removeprefix("/divergence: "))]


TEXTS = Command(
    "texts",
    "",
    "the texts side by side, why they differ",
    _texts,
    group="results",
    rank=1,
    page=Page(
        "The last texts side by side, marked where they differ from the text of the target. Below them: the first "
        "token that differs, its probabilities, and the cause: sampling or rounding.",
        ("> /texts", "ngram, target   speculative", "The sea         The sea »is"),
        see_also=("text", "verify", "audit"),
    ),
)
