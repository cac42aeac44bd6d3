"""Text with marked pieces, such as accepted drafts. It can be cut, and wrapped between words as it grows.

A character may need several tokens, and a line several words, so tokens become text first and text is wrapped
afterwards; each piece keeps its mark.
"""

from collections.abc import Callable, Iterable
from enum import Enum, auto
from itertools import groupby
from operator import itemgetter
from typing import Any

from utils.decode.steps import Step
from utils.text import TextStream, visible


class Mark(Enum):
    """The origin of a piece of text."""

    TEXT = auto()  # chosen by the model that writes the text
    ACCEPTED = auto()  # drafts that the target accepted
    NAME = auto()  # of a strategy
    NOTE = auto()  # other text of the program


MarkedPiece = tuple[str, Mark]


def merged(pieces: Iterable[MarkedPiece]) -> list[MarkedPiece]:
    """The same text in as few pieces as possible."""
    groups = groupby((piece for piece in pieces if piece[0]), key=itemgetter(1))
    return [("".join(text for text, _ in group), mark) for mark, group in groups]


def plain_text(pieces: Iterable[MarkedPiece]) -> str:
    """The text without its marks."""
    return "".join(text for text, _ in pieces)


def from_character(pieces: Iterable[MarkedPiece], start: int) -> list[MarkedPiece]:
    """The pieces of a text from this character on."""
    rest = []
    for text, mark in pieces:
        rest.append((text[start:], mark))
        start = max(0, start - len(text))
    return merged(rest)


class MarkedStream:
    """The pieces that the steps of a run complete, safe to show. Together they are the text of its tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._text = TextStream(tokenizer)
        self._mark = Mark.ACCEPTED  # unless a token of the held-back text was not accepted

    def add(self, step: Step) -> list[MarkedPiece]:
        """The text that a step completes. A character of several tokens counts as a draft only if all of them are
        drafts.
        """
        pieces = []
        for index, token in enumerate(step.tokens):
            self._mark = self._mark if index < step.accepted else Mark.TEXT
            if text := self._text.add((token,)):
                pieces += self._piece(text)
        return merged(pieces)

    def end(self) -> list[MarkedPiece]:
        """The rest of the text, incomplete characters included."""
        return self._piece(rest) if (rest := self._text.end()) else []

    def _piece(self, text: str) -> list[MarkedPiece]:
        mark, self._mark = self._mark, Mark.ACCEPTED
        return [(visible(text), mark)]


class WrappedText:
    """Growing text, wrapped at word boundaries: a word is held back until it is known to fit into the line.

    `width` is the number of columns, and None does not wrap. `cells` returns the number of columns of a text. Wide
    characters are usually written without spaces, so a line may end at any of them.
    """

    def __init__(self, width: int | None, cells: Callable[[str], int] = len) -> None:
        self._width, self._cells = width, cells
        self._column = 0
        self._gap: list[MarkedPiece] = []
        self._word: list[MarkedPiece] = []

    def add(self, pieces: Iterable[MarkedPiece]) -> list[MarkedPiece]:
        """The text that can be shown now."""
        if self._width is None:
            return merged(pieces)
        shown: list[MarkedPiece] = []
        for text, mark in pieces:
            for character in text:
                self._add(character, mark, shown)
        return merged(shown)

    def _add(self, character: str, mark: Mark, shown: list[MarkedPiece]) -> None:
        assert self._width is not None
        if character == "\n":
            shown += [*self.end(), (character, mark)]
            self._column = 0
        elif character in " \t":
            shown += self.end() if self._word else []
            self._gap.append((character, mark))
        else:
            # A wide character ends the word before it and is a word of its own.
            wide = self._cells(character) > 1
            shown += self.end() if wide and self._word else []
            self._word.append((character, mark))
            # A word as wide as the line is shown at once, because no other line could hold it.
            shown += self.end() if wide or self._cells(plain_text(self._word)) >= self._width else []

    def end(self) -> list[MarkedPiece]:
        """The text that was held back."""
        gap, word, self._gap, self._word = self._gap, self._word, [], []
        word_size = self._cells(plain_text(word))
        size = self._cells(plain_text(gap).expandtabs()) + word_size
        # The gap is dropped where the line breaks.
        if word and self._column and self._width is not None and self._column + size > self._width:
            self._column = word_size
            return merged([("\n", Mark.TEXT), *word])
        self._column += size
        return merged([*gap, *word])
