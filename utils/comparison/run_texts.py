"""Texts of runs: pieces that are accepted drafts or not, the relation to texts on the screen, and why they differ."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from utils.comparison.runs import Run
from utils.decode.steps import Step
from utils.metrics.divergence import Cause, Divergence, TokenCandidate
from utils.metrics.results import CHARACTER, TOKEN, first_difference
from utils.text import TextStream, token_piece, visible

CONTEXT = 32  # characters before a difference that are shown with it
REASONS = {
    Cause.SAMPLING: "both drew from the same distribution, and /verify coupled gives the same text",
    Cause.ROUNDING: "a rounding tie: the target's two highest logits are {gap:.2g} apart, and verify passes of other "
    "widths move them by up to {drift:.2g}",
    Cause.QUANTIZATION: "under bnb-int8 verify passes of other widths move the logits by up to {drift:.2g}",
    Cause.UNEXPLAINED: "the reason is unknown, please report it with the records of /export bug.json",
}


def relation(run: Run, earlier: Sequence[Run]) -> tuple[Run, str]:
    """Which run a run's text is compared with, and how they relate, in words that end in a colon if a text follows.

    It is compared with one of the same text, or else with its baseline's, or else with the first. `earlier` has at
    least one run; their texts are on the screen. Positions count tokens of local runs and characters of servers.
    """
    ours, unit = _units(run), TOKEN if run.is_local else CHARACTER
    # The baseline's text comes first, because the other texts should equal it.
    candidates = sorted(earlier, key=lambda one: one.name != run.baseline)
    other = next((one for one in candidates if _units(one) == ours), None)
    if other is None:
        other = candidates[0] if candidates[0].name == run.baseline else earlier[0]
    theirs, name = _units(other), "" if other is earlier[0] else f" {other.name}"
    as_name = f" as{name}" if name else ""
    place = first_difference(ours, theirs)
    if place is None:
        return other, f"= same text{as_name}"
    if place == len(ours):
        return other, f"the same{as_name} up to {unit} {place}, where it ends"
    if place == len(theirs):
        return other, f"the same{as_name}, and longer from {unit} {place + 1}:"
    return other, f"differs{f' from{name}' if name else ''} from {unit} {place + 1}:"


def _units(run: Run) -> Sequence[object]:
    """The tokens of a local run, or the characters of a server's text."""
    return run.tokens if run.is_local and run.tokens is not None else visible(run.text)


def start_of_difference(ours: str, theirs: str) -> int:
    """The index of the first character that differs."""
    start = first_difference(ours, theirs)
    return len(ours) if start is None else start


def start_of_context(text: str, difference: int) -> int:
    """The index from which a few words of the line before a difference are shown."""
    start = max(0, difference - CONTEXT, text.rfind("\n", 0, difference) + 1)
    # Start at a word, unless the word fills the whole context.
    if 0 < start < difference and not text[start - 1].isspace():
        blank = text.find(" ", start, difference)
        start = start if blank < 0 else blank + 1
    return start


def text_figures(compared: Iterable[tuple[int, bool | None]]) -> dict[str, Any]:
    """The number of prompts with the baseline's text in every repeat, and the numbers of the others.

    `compared` has the number of each prompt and whether its texts are equal, or None if they were not compared.
    """
    same: dict[int, bool] = {}
    for number, is_same in compared:
        if is_same is not None:
            same[number] = is_same and same.get(number, True)
    return {
        "compared_texts": len(same),
        "same_texts": sum(same.values()),
        "other_texts_at_prompts": [number for number, is_same in same.items() if not is_same],
    }


def _choice(tokenizer: Any, candidate: TokenCandidate | None) -> str:
    """A token as a readable piece with its probability. None is the end of a text."""
    if candidate is None:
        return "the end of the text"
    return f"{token_piece(tokenizer, candidate.token)} (p {candidate.probability:.2g})"


def divergence_sentence(divergence: Divergence, tokenizer: Any) -> str:
    """What follows a strategy's name: its token at the first difference, the target's preference, and the cause."""
    reason = REASONS[divergence.cause].format(gap=divergence.gap, drift=divergence.rounding or 0)
    ours, theirs = (_choice(tokenizer, candidate) for candidate in (divergence.ours, divergence.theirs))
    return f"differs at token {divergence.position + 1}: it has {ours}, target-only {theirs}; {reason}."


class TextPiece(NamedTuple):
    """Part of a text. `accepted` is True if its tokens are accepted drafts."""

    text: str
    accepted: bool


class MarkedStream:
    """The pieces that the steps of a run complete. Together they are the text of its tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._text = TextStream(tokenizer)
        self._all_accepted = True  # whether all tokens of the held-back text were accepted

    def add(self, step: Step) -> list[TextPiece]:
        """The text that a step completes. A character of several tokens counts as a draft only if all of them are
        drafts.
        """
        pieces = []
        for index, token in enumerate(step.tokens):
            self._all_accepted &= index < step.accepted
            if text := self._text.add((token,)):
                pieces.append(self._piece(text))
        return pieces

    def end(self) -> list[TextPiece]:
        """The rest of the text, incomplete characters included."""
        return [self._piece(rest)] if (rest := self._text.end()) else []

    def _piece(self, text: str) -> TextPiece:
        accepted, self._all_accepted = self._all_accepted, True
        return TextPiece(text, accepted)


def marked_text(steps: Iterable[Step], tokenizer: Any) -> tuple[TextPiece, ...]:
    """The pieces of a run's text, neighbours of the same kind joined. Together they are the text of its tokens."""
    stream = MarkedStream(tokenizer)
    pieces = [piece for step in steps for piece in stream.add(step)]
    groups = groupby([*pieces, *stream.end()], key=itemgetter(1))
    return tuple(TextPiece("".join(piece.text for piece in group), accepted) for accepted, group in groups)
