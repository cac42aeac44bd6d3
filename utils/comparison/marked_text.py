"""The text of a run in pieces that say whether they come from accepted drafts."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from utils.decode.steps import Step
from utils.text import TextStream


class TextPiece(NamedTuple):
    """Part of a text. accepted: whether its tokens are accepted drafts."""

    text: str
    accepted: bool


def marked_text(steps: Iterable[Step], tokenizer: Any) -> tuple[TextPiece, ...]:
    """The pieces of a run's text, neighbours of the same kind joined. Together they are the text of its tokens."""
    pieces = (piece for piece in _pieces(steps, tokenizer) if piece.text)
    groups = groupby(pieces, key=itemgetter(1))
    return tuple(TextPiece("".join(piece.text for piece in group), accepted) for accepted, group in groups)


def _pieces(steps: Iterable[Step], tokenizer: Any) -> Iterator[TextPiece]:
    stream, accepted = TextStream(tokenizer), False
    for step in steps:
        for place, token in enumerate(step.tokens):
            # A character of several tokens counts as what its last token is.
            accepted = place < step.accepted
            yield TextPiece(stream.add((token,)), accepted)
    yield TextPiece(stream.end(), accepted)
