"""The text of a run, in pieces marked as accepted drafts or as the target's own tokens."""

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from utils.decode.steps import Step
from utils.text import TextStream


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
