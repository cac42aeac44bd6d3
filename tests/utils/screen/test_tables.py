"""Tables on screens of any width: they lose nothing and break no word that fits."""

from __future__ import annotations

import pytest
from fakes import screen

HEADINGS = ("strategy", "tokens/s", "lowest - highest", "verdict")
ROWS = [("speculative", "30.9", "28.1 - 33.7", "within noise"), ("target", "23.6", "20.0 - 25.0", "the baseline")]
SWEPT = (
    "setting",
    "strategy",
    "tokens/s",
    "lowest - highest",
    "decoding",
    "speed-up",
    "acceptance",
    "per forward",
    "text",
)
SWEEP = [
    ("gamma 2", "speculative", "30.1", "30.1 - 33.7", "31.0", "1.24x", "7/12 = 0.583", "2.10", "same"),
    ("gamma 2", "target", "24.2", "24.2 - 24.2", "23.7", "1.00x", "-", "1.00", "same"),
]


@pytest.mark.parametrize("width", [28, 30, 40, 60, 78, 79, 80, 81, 85, 90, 100, 110, 200])
@pytest.mark.parametrize(("headings", "rows"), [(HEADINGS, ROWS), (SWEPT, SWEEP)])
def test_no_word_of_a_table_is_broken(headings: tuple[str, ...], rows: list[tuple[str, ...]], width: int) -> None:
    view = screen(width=width)
    view.renderer.table(headings, rows)
    shown = view.take()[0]
    assert all(len(line.rstrip()) <= width for line in shown.splitlines())
    words = shown.split()
    for text in (*headings, *(cell for row in rows for cell in row)):
        assert all(word in words for word in text.split()), (width, text)
