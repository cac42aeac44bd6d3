"""Why a text differs from the target's own, as a sentence."""

from typing import Any

from utils.metrics.divergence import Cause, Divergence, RatedToken
from utils.text import token_piece

REASONS = {
    Cause.SAMPLING: "both drew from the same distribution, and /verify coupled gives the same text",
    Cause.ROUNDING: "a rounding tie: the target's two highest logits are {gap:.2g} apart, and verify passes of other "
    "widths move them by up to {drift:.2g}",
    Cause.QUANTIZATION: "under bnb-int8 verify passes of other widths move the logits by up to {drift:.2g}",
    Cause.UNEXPLAINED: "the reason is unknown, please report it with the output of /texts",
}


def candidate_piece(tokenizer: Any, candidate: RatedToken | None) -> str:
    """A token as a readable piece with its probability. None is the end of a text."""
    if candidate is None:
        return "(the end)"
    return f"{token_piece(tokenizer, candidate.token)} {candidate.probability:.3g}"


def _choice(tokenizer: Any, candidate: RatedToken | None) -> str:
    """The same, for use within a sentence."""
    if candidate is None:
        return "the end of the text"
    return f"{token_piece(tokenizer, candidate.token)} (p {candidate.probability:.2g})"


def divergence_sentence(name: str, divergence: Divergence, tokenizer: Any) -> str:
    """A strategy's token at the first difference, the target's preference, and the cause."""
    reason = REASONS[divergence.cause].format(gap=divergence.gap, drift=divergence.rounding or 0)
    ours, theirs = (_choice(tokenizer, candidate) for candidate in (divergence.ours, divergence.theirs))
    return f"{name} differs at token {divergence.position + 1}: it has {ours}, target-only {theirs}; {reason}."
