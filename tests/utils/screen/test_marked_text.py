"""Streamed text keeps every character and the mark of every accepted draft, however it is split and wrapped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text
from tiny import tiny_tokenizer

from utils.decode.steps import Step
from utils.screen.renderer import ACCEPTED, NAME
from utils.screen.run_view import MarkedStream, WrappedText
from utils.text import decode, visible

TOKENIZER = tiny_tokenizer()
TEXTS = st.text(st.sampled_from("ab é漢🙂\n\t\x1b\x07\ufffd"), max_size=20)


def steps_of(ids: list[int], sizes: list[int]) -> list[Step]:
    """Rounds over these tokens, all but the last token of each being an accepted draft."""
    steps, start = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        part = ids[start : start + size]
        if part:
            steps.append(Step((*part[:-1], 0), len(part) - 1, part[-1]))
        start += size
    return steps


def marked(steps: list[Step]) -> Text:
    stream, text = MarkedStream(TOKENIZER), Text()
    for step in steps:
        text.append_text(stream.add(step))
    return text.append_text(stream.end())


def styles(text: Text) -> list[str]:
    """The style of each character."""
    found = [""] * len(text)
    for start, end, style in text.spans:
        found[start:end] = [str(style)] * (end - start)
    return found


@given(TEXTS, st.lists(st.integers(1, 5), max_size=10))
def test_marked_text_is_exactly_the_text_of_its_tokens(text: str, sizes: list[int]) -> None:
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    steps = steps_of(ids, sizes)
    assert marked(steps).plain == visible(decode(TOKENIZER, ids))


def test_a_character_is_an_accepted_draft_if_all_of_its_tokens_are() -> None:
    first, second = TOKENIZER("é", add_special_tokens=False).input_ids
    letter = TOKENIZER("a", add_special_tokens=False).input_ids[0]
    both = marked([Step((letter, first, second), 3, letter)])
    assert both.plain == "aéa" and styles(both) == [ACCEPTED, ACCEPTED, ""]
    half = marked([Step((letter, first), 2, second), Step((letter,), 1, None)])
    assert half.plain == "aéa" and styles(half) == [ACCEPTED, "", ACCEPTED]
    begun = marked([Step((), 0, first), Step((second,), 1, letter)])
    assert begun.plain == "éa" and not any(styles(begun)), "the first half is the target's own token"
    incomplete = marked([Step((letter,), 1, first)])
    assert incomplete.plain == "a\ufffd" and styles(incomplete) == [ACCEPTED, ""]


@given(
    st.lists(st.sampled_from(["a", "bcd", " ", "  ", "\n", "漢", "efghij"]), max_size=40),
    st.integers(8, 14),
    st.integers(1, 7),
)
def test_lines_are_wrapped_between_words_however_the_text_is_split(parts: list[str], width: int, size: int) -> None:
    text = "".join(parts)
    starts = range(0, len(text), size)
    pieces = [Text.assemble((text[start : start + size], ("", ACCEPTED, NAME)[start // size % 3])) for start in starts]
    shown = wrapped(pieces, width)
    assert shown.plain == wrapped([Text(text)], width).plain
    marks = [mark for piece in pieces for mark in marks_of(piece)]
    assert marks_of(shown) == marks
    assert "".join(shown.plain.split()) == "".join(text.split()), "text was lost"
    assert wrapped(pieces, None).plain == text
    for line in shown.plain.split("\n"):
        longest = max(map(cell_len, line.split()), default=0)
        assert cell_len(line.rstrip()) <= width or longest > width or not line[:1].strip(), line
    words = [word for word in text.split() if word.isascii() and len(word) < width]
    assert all(word in shown.plain.split() or "漢" in text for word in words), "a word was split"


def marks_of(text: Text) -> list[str]:
    """The styles of the characters that are not blanks."""
    return [style for character, style in zip(text.plain, styles(text), strict=True) if not character.isspace()]


def wrapped(pieces: list[Text], width: int | None) -> Text:
    """Pieces that arrive one by one."""
    lines, shown = WrappedText(width), Text()
    for piece in pieces:
        shown.append_text(lines.add(piece))
        shown.append_text(lines.add(Text()))  # as of a token without text
    return shown.append_text(lines.end())


def test_text_that_fits_is_unchanged() -> None:
    code = "def f(x):\n    return x\n\n\tend"
    assert wrapped([Text(code)], 20).plain == code
    lines = WrappedText(10)
    first = lines.add(Text("one two three")) + lines.end()
    assert first.plain == "one two\nthree" and (lines.add(Text("!")) + lines.end()).plain == "!"
