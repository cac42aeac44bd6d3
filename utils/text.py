"""From token ids to text that is safe to show: whole text, text as it grows and is broken into lines, and single tokens.

Model output is data. Control characters could move the cursor, recolour the terminal or hide text, so they are replaced by visible
pictures before anything reaches a screen.
"""

from collections.abc import Callable
from typing import Any

_BROKEN = "\ufffd"
_DIRECTION_MARKS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_UNSAFE: dict[int, str] = (
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | dict.fromkeys(range(128, 160), _BROKEN)
    | {ord(mark): _BROKEN for mark in _DIRECTION_MARKS}
    | dict.fromkeys(range(55296, 57344), _BROKEN)  # lone surrogates cannot be encoded
    | dict.fromkeys((0xFFFE, 0xFFFF), _BROKEN)  # no characters, which XML does not take
)


def visible(text: str) -> str:
    """The text with control characters (but newline and tab) replaced by pictures of them."""
    return text.translate(_UNSAFE)


def unescaped(typed: str) -> str:
    """A typed line as a prompt: backslash-n and backslash-t stand for newline and tab."""
    return typed.replace("\\n", "\n").replace("\\t", "\t")


def encodable(text: str) -> str:
    """The text with lone surrogates (bytes that were no UTF-8) replaced, which no tokenizer and no file takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def decode(tokenizer: Any, tokens: list[int]) -> str:
    """The text of these ids, special tokens left out."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def token_piece(tokenizer: Any, token: int) -> str:
    """One token as a quoted, readable piece; its id where it is only part of a character, or where there is no tokenizer."""
    if tokenizer is None:
        return str(token)
    piece = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    if _BROKEN in piece or not piece:
        return f"#{token}"
    return '"' + visible(piece).replace("\n", "\\n").replace("\t", "\\t") + '"'


class TextStream:
    """Text that grows token by token; what cannot be read yet (half a character) waits for the tokens that complete it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._anchor = self._shown = (
            0  # decoding starts at the anchor, so that a token's text may depend on the one before
        )

    def add(self, tokens: tuple[int, ...]) -> str:
        """The newly readable text."""
        self._tokens.extend(tokens)
        before, after = self._texts()
        if len(after) <= len(before) or after.endswith(_BROKEN):
            return ""
        self._anchor, self._shown = self._shown, len(self._tokens)
        return after[len(before) :]

    def end(self) -> str:
        """What is left, readable or not."""
        before, after = self._texts()
        self._shown = len(self._tokens)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        window = self._tokens[self._anchor :]
        return decode(self._tokenizer, window[: self._shown - self._anchor]), decode(self._tokenizer, window)


class WrappedText:
    """Growing text in lines so wide that end between words: a word is held back until it is known whether it fits.

    width: None leaves everything as it is. cells: how wide a text is on the screen; what is written without spaces, in wide characters, may
    end a line anywhere.
    """

    def __init__(self, width: int | None, cells: Callable[[str], int] = len) -> None:
        self._width, self._cells = width, cells
        self._column = 0
        self._gap = self._word = ""

    def add(self, text: str) -> str:
        """What can be shown by now."""
        if self._width is None:
            return text
        shown = ""
        for sign in text:
            if sign == "\n":
                shown += self.end() + sign
                self._column = 0
            elif sign in " \t":
                shown += self.end() if self._word else ""
                self._gap += sign
            else:
                wide = self._cells(sign) > 1
                shown += self.end() if wide and self._word else ""
                self._word += sign
                shown += self.end() if wide or self._cells(self._word) >= self._width else ""
        return shown

    def end(self) -> str:
        """What was held back."""
        assert self._width is not None or not self._word
        gap, word, self._gap, self._word = self._gap, self._word, "", ""
        size = self._cells(gap.expandtabs()) + self._cells(word)
        if word and self._column and self._column + size > (self._width or 0):
            self._column = self._cells(word)
            return "\n" + word
        self._column += size
        return gap + word
