"""From token ids to text that is safe to show: whole texts, texts that grow token by token, and single tokens.

Model output is data: control characters could move the cursor, recolour the terminal or hide text. They are replaced by
visible symbols before anything is shown.
"""

import re
import shlex
from typing import Any

from rich.filesize import decimal

from utils.errors import UserError

QUOTES = '"""'  # around a prompt that is sent exactly as it is
_BROKEN = "\ufffd"
_DIRECTION_MARKS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
# C0 codes have visible symbols from U+2400. C1 codes and direction marks have none.
_UNSAFE: dict[int, str] = (
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | dict.fromkeys(range(128, 160), _BROKEN)
    | {ord(mark): _BROKEN for mark in _DIRECTION_MARKS}
    | dict.fromkeys(range(55296, 57344), _BROKEN)  # lone surrogates cannot be encoded
    | dict.fromkeys((0xFFFE, 0xFFFF), _BROKEN)  # not characters, and not allowed in XML
)
_ESCAPE = re.compile(r"\\(?:[\\nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U00(?:0[0-9a-f]|10)[0-9a-f]{4})")


class Count(str):
    """A message that only says how far the step has got that the last message began.

    A screen shows it on a line that the next one replaces; where lines cannot be replaced it drops most of them.
    """


def visible(text: str) -> str:
    """The text with control characters, except newline and tab, replaced by visible symbols."""
    return text.translate(_UNSAFE)


def quoted_text(line: str) -> str | None:
    """The text of a block between three quotation marks, without newlines at its ends, or None if it is no block."""
    block = line.strip()
    if len(block) < 2 * len(QUOTES) or not (block.startswith(QUOTES) and block.endswith(QUOTES)):
        return None
    return block.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


def split_words(text: str) -> list[str]:
    """Words that may be quoted as in a shell. Raises UserError for unclosed quotation marks."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError("a quotation mark is not closed.") from error


def byte_size(size: int) -> str:
    """A number of bytes in decimal units, for example "538.1 MB"."""
    return decimal(size)


def count_of(count: int, noun: str) -> str:
    """A number and its noun: "1 prompt", "2 prompts"."""
    return f"{count} {noun}" + "s" * (count != 1)


def first_of(count: int, noun: str) -> str:
    """The beginning of a sequence: "first layer", "first 2 layers"."""
    return f"first {noun}" if count == 1 else f"first {count} {noun}s"


def unescape(typed: str) -> str:
    """A typed line as a prompt: the escapes \\n and \\t become newline and tab."""
    return typed.replace("\\n", "\n").replace("\\t", "\t")


def escaped(text: str) -> str:
    """The text on one line of printable characters: `unescaped` restores it exactly.

    The backslash, all control characters and separators, and lone surrogates become escapes as in Python. So do blanks
    at the ends, which editors remove.
    """
    characters = (one if one.isprintable() and one != "\\" else _escape(one) for one in text)
    return re.sub("^ +| +$", lambda blanks: r"\x20" * len(blanks[0]), "".join(characters))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def unescaped(line: str) -> str:
    """The inverse of `escaped`. A backslash that begins no escape is kept."""
    return _ESCAPE.sub(lambda escape: escape[0].encode("ascii").decode("unicode_escape"), line)


def encodable(text: str) -> str:
    """The text with lone surrogates (bytes that were not UTF-8) replaced: tokenizers and files reject them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def decode(tokenizer: Any, tokens: list[int]) -> str:
    """The text of token ids, without special tokens."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def token_piece(tokenizer: Any, token: int) -> str:
    """One token as quoted text, or its id if it is only part of a character or there is no tokenizer."""
    if tokenizer is None:
        return str(token)
    piece = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    if _BROKEN in piece or not piece:
        return f"#{token}"
    return '"' + visible(piece).replace("\n", "\\n").replace("\t", "\\t") + '"'


class TextStream:
    """Text that grows token by token. An incomplete character is held back until the tokens that complete it arrive."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        # Decoding starts at the anchor, because the text of a token may depend on the token before it.
        self._anchor = self._shown = 0

    def add(self, tokens: tuple[int, ...]) -> str:
        """The text that these tokens complete."""
        self._tokens.extend(tokens)
        before, after = self._texts()
        # Nothing is complete yet: there is no new text, as after a special token, or a character still lacks bytes.
        if len(after) <= len(before) or after.endswith(_BROKEN):
            return ""
        self._anchor, self._shown = self._shown, len(self._tokens)
        return after[len(before) :]

    def end(self) -> str:
        """The rest of the text, incomplete characters included."""
        before, after = self._texts()
        self._shown = len(self._tokens)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        """The text since the anchor: what was returned before, and all of it."""
        tokens = self._tokens[self._anchor :]
        return decode(self._tokenizer, tokens[: self._shown - self._anchor]), decode(self._tokenizer, tokens)
