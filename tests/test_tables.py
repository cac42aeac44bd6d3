"""Tables on screens of any width: nothing is lost, and no word is broken that has room."""

from __future__ import annotations

from io import BytesIO, TextIOWrapper

import pytest
from fakes import screen
from rich.console import Console

from utils.printing import Renderer

HEADINGS = ("strategy", "tokens/s", "lowest - highest", "verdict")
ROWS = [("speculative", "30.9", "28.1 - 33.7", "within noise"), ("target", "23.6", "20.0 - 25.0", "the baseline")]


@pytest.mark.parametrize("width", [28, 30, 40, 60, 80, 200])
def test_every_word_of_a_table_stays_whole(width: int) -> None:
    view = screen(width=width)
    view.renderer.table(HEADINGS, ROWS)
    shown = view.take()[0]
    assert all(len(line.rstrip()) <= width for line in shown.splitlines())
    words = shown.split()
    for text in (*HEADINGS, *(cell for row in ROWS for cell in row)):
        assert all(word in words for word in text.split()), (width, text)


def test_frames_and_dots_of_plots_are_in_signs_that_the_screen_has() -> None:
    file = TextIOWrapper(BytesIO(), encoding="ascii")
    renderer = Renderer(*[Console(file=file, width=80)] * 2, colour=False)
    renderer.data("┌─┐│·└┤ text")
    renderer.result("a · b")
    file.flush()
    assert file.buffer.getvalue() == b"+-+|-++ text\na - b\n"
    view = screen()
    view.renderer.data("┌─┐│·└┤")
    assert view.take()[0] == "┌─┐│·└┤\n"
