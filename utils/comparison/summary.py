"""What the runs of one prompt mean, in plain words: how a text ended, and who was faster."""

from utils.decode.steps import FinishReason
from utils.metrics.results import Generation

FULL_CONTEXT = "cut at {} tokens: the context is full"


def ending(run: Generation, length: int) -> str:
    """How a text ended, or "" if it ended by itself. length: the maximum number of new tokens."""
    made = len(run.tokens)
    match run.finish:
        case FinishReason.STOP:
            return ""
        case FinishReason.LENGTH:
            return f"cut at {made} tokens (/length)" if made >= length else FULL_CONTEXT.format(made)
        case FinishReason.INTERRUPTED:
            return "interrupted"
