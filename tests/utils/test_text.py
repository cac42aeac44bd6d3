"""Text that reaches the screen is readable, complete and harmless."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from utils.text import TextStream, count_of, decode, first_of, token_piece, visible

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


def test_counts_are_singular_and_plural() -> None:
    assert [count_of(count, "token") for count in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
    assert [first_of(count, "layer") for count in (1, 2)] == ["first layer", "first 2 layers"]
