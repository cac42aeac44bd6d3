"""Text that reaches the screen is readable, complete and harmless."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from tiny import tiny_tokenizer

from utils.text import TextStream, WrappedText, decode, token_piece, visible

TOKENIZER = tiny_tokenizer()


@pytest.mark.parametrize(
    "text", ["\x1b[31mred", "\x1b]0;title\x07", "\r over", "\x9b2J", "a\x00b", "\x08\x7f", "\u202eabc", "\ud800"]
)
def test_control_sequences_are_shown_not_sent(text: str) -> None:
    shown = visible(text)
    assert len(shown) == len(text)
    assert not any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 or character == "\u202e" for character in shown)
    shown.encode()


def test_newlines_tabs_and_other_scripts_stay() -> None:
    assert visible("a\n\tб 漢 🙂 [bold]") == "a\n\tб 漢 🙂 [bold]"


@given(st.text(max_size=30))
def test_a_stream_adds_up_to_the_whole_text(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    stream = TextStream(TOKENIZER)
    pieces = [stream.add((token,)) for token in ids]
    assert "".join(pieces) + stream.end() == decode(TOKENIZER, ids)
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@given(
    st.lists(st.sampled_from(["a", "bcd", " ", "  ", "\n", "漢", "efghij"]), max_size=40),
    st.integers(8, 14),
    st.integers(1, 7),
)
def test_lines_are_wrapped_between_words_however_the_text_is_split(parts: list[str], width: int, size: int) -> None:
    text = "".join(parts)
    lines = WrappedText(width, cell_len)
    shown = "".join(lines.add(text[start : start + size]) for start in range(0, len(text), size)) + lines.end()
    single = WrappedText(width, cell_len)
    assert shown == single.add(text) + single.end()
    assert "".join(shown.split()) == "".join(text.split()), "text was lost"
    unwrapped = WrappedText(None)
    assert unwrapped.add(text) + unwrapped.end() == text
    for line in shown.split("\n"):
        longest = max(map(cell_len, line.split()), default=0)
        assert cell_len(line.rstrip()) <= width or longest > width or not line[:1].strip(), line
    words = [word for word in text.split() if word.isascii() and len(word) < width]
    assert all(word in shown.split() or "漢" in text for word in words), "a word was split"


def test_text_that_fits_is_unchanged() -> None:
    code = "def f(x):\n    return x\n\n\tend"
    lines = WrappedText(20)
    assert lines.add(code) + lines.end() == code
    lines = WrappedText(10)
    assert lines.add("one two three") + lines.end() == "one two\nthree" and lines.add("!") + lines.end() == "!"


def test_an_incomplete_character_is_held_back_until_the_end() -> None:
    ids = TOKENIZER("é", add_special_tokens=False).input_ids
    assert len(ids) == 2
    stream = TextStream(TOKENIZER)
    assert stream.add((ids[0],)) == ""
    assert stream.add((ids[1],)) == "é"
    broken = TextStream(TOKENIZER)
    broken.add((ids[0],))
    assert broken.end() == "\ufffd"


def test_pieces_are_readable() -> None:
    assert token_piece(None, 17) == "17"
    newline, half, letter = (TOKENIZER(text, add_special_tokens=False).input_ids[0] for text in ("\n", "é", "a"))
    assert token_piece(TOKENIZER, newline) == '"\\n"'
    assert token_piece(TOKENIZER, letter) == '"a"'
    assert token_piece(TOKENIZER, half) == f"#{half}"
