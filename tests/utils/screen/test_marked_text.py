"""Streamed text keeps every character and the mark of every accepted draft, however it is split and wrapped."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from tiny import tiny_tokenizer

from utils.decode.steps import Step
from utils.screen.renderer import Mark, MarkedPiece
from utils.screen.run_view import MarkedStream, WrappedText, from_character, merged, plain_text
from utils.text import decode, visible

TOKENIZER = tiny_tokenizer()
TEXTS = st.text(st.sampled_from("ab é漢🙂\n\t\x1b\ufffd"), max_size=20)


def steps_of(ids: list[int], sizes: list[int]) -> list[Step]:
    """Rounds over these tokens, all but the last token of each being an accepted draft."""
    steps, start = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        part = ids[start : start + size]
        if part:
            steps.append(Step((*part[:-1], 0), len(part) - 1, part[-1]))
        start += size
    return steps


def marked(steps: list[Step]) -> list[MarkedPiece]:
    stream = MarkedStream(TOKENIZER)
    pieces = [piece for step in steps for piece in stream.add(step)]
    return merged([*pieces, *stream.end()])


@given(TEXTS, st.lists(st.integers(1, 5), max_size=10))
def test_marked_text_is_exactly_the_text_of_its_tokens(text: str, sizes: list[int]) -> None:
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    steps = steps_of(ids, sizes)
    assert plain_text(marked(steps)) == visible(decode(TOKENIZER, ids))
    assert all(before[1] is not after[1] for before, after in pairwise(marked(steps)))


def test_a_character_is_an_accepted_draft_if_all_of_its_tokens_are() -> None:
    first, second = TOKENIZER("é", add_special_tokens=False).input_ids
    letter = TOKENIZER("a", add_special_tokens=False).input_ids[0]
    both = [Step((letter, first, second), 3, letter)]
    assert marked(both) == [("aé", Mark.ACCEPTED), ("a", Mark.TEXT)]
    half = [Step((letter, first), 2, second), Step((letter,), 1, None)]
    assert marked(half) == [("a", Mark.ACCEPTED), ("é", Mark.TEXT), ("a", Mark.ACCEPTED)]
    begun = [Step((), 0, first), Step((second,), 1, letter)]
    assert marked(begun) == [("éa", Mark.TEXT)], "the first half is the target's own token"
    incomplete = [Step((letter,), 1, first)]
    assert marked(incomplete) == [("a", Mark.ACCEPTED), ("\ufffd", Mark.TEXT)]


@given(TEXTS, st.integers(0, 25))
def test_a_text_may_be_cut_at_any_character(text: str, start: int) -> None:
    pieces = [(character, (Mark.TEXT, Mark.ACCEPTED)[index % 3 == 0]) for index, character in enumerate(text)]
    rest = from_character(pieces, start)
    assert plain_text(rest) == text[start:]
    assert [mark for part, mark in rest for _ in part] == [mark for _, mark in pieces][start:]


@given(
    st.lists(st.sampled_from(["a", "bcd", " ", "  ", "\n", "漢", "efghij"]), max_size=40),
    st.integers(8, 14),
    st.integers(1, 7),
)
def test_lines_are_wrapped_between_words_however_the_text_is_split(parts: list[str], width: int, size: int) -> None:
    text = "".join(parts)
    pieces = [(text[start : start + size], [*Mark][(start // size) % 2]) for start in range(0, len(text), size)]
    shown = wrapped(pieces, width)
    single = wrapped([(text, Mark.TEXT)], width)
    assert plain_text(shown) == plain_text(single)
    marks = [mark for part, mark in pieces for character in part if not character.isspace()]
    assert [mark for part, mark in shown for character in part if not character.isspace()] == marks
    assert "".join(plain_text(shown).split()) == "".join(text.split()), "text was lost"
    assert plain_text(wrapped(pieces, None)) == text
    for line in plain_text(shown).split("\n"):
        longest = max(map(cell_len, line.split()), default=0)
        assert cell_len(line.rstrip()) <= width or longest > width or not line[:1].strip(), line
    words = [word for word in text.split() if word.isascii() and len(word) < width]
    assert all(word in plain_text(shown).split() or "漢" in text for word in words), "a word was split"


def wrapped(pieces: list[MarkedPiece], width: int | None) -> list[MarkedPiece]:
    """Pieces that arrive one by one."""
    lines = WrappedText(width)
    shown = [part for piece in pieces for part in lines.add([piece])]
    return shown + lines.end()


def test_text_that_fits_is_unchanged() -> None:
    code = "def f(x):\n    return x\n\n\tend"
    assert plain_text(wrapped([(code, Mark.TEXT)], 20)) == code
    lines = WrappedText(10)
    first = lines.add([("one two three", Mark.TEXT)]) + lines.end()
    assert plain_text(first) == "one two\nthree" and plain_text(lines.add([("!", Mark.TEXT)]) + lines.end()) == "!"
