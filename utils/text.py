"""From token ids to text that is safe to show: whole text, text as it grows, and single tokens.

Model output is data. Control characters could move the cursor, recolour the terminal or hide text, so they are replaced by visible
pictures before anything reaches a screen.
"""

from typing import Any

_BROKEN = "\ufffd"
_DIRECTION_MARKS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_UNSAFE: dict[int, str] = (
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | dict.fromkeys(range(128, 160), _BROKEN)
    | {ord(mark): _BROKEN for mark in _DIRECTION_MARKS}
    | dict.fromkeys(range(55296, 57344), _BROKEN)  # lone surrogates cannot be encoded
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
        self._anchor = self._shown = 0  # decoding starts at the anchor, so that a token's text may depend on the one before

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
