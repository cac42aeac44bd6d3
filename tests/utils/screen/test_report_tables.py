"""Tables of reports: one line per row on a screen of 80 columns, and what a narrower screen leaves out."""

from __future__ import annotations

import pytest
from fakes import screen

HEADINGS = ("strategy", "tokens/s", "range", "speed-up", "tokens/forward", "verdict")
ROWS = [
    ("speculative suffix", "30.9", "28.1-33.7", "1.31x", "2.10", "not distinguishable"),
    ("target", "23.6", "20.0-25.0", "1.00x", "1.00", "baseline"),
]


def lines_of(width: int, optional: tuple[str, ...]) -> list[str]:
    view = screen(width=width)
    view.renderer.table(HEADINGS, ROWS, optional)
    return [line.rstrip() for line in view.take()[0].splitlines()]


def test_headings_are_broken_before_a_column_is_left_out() -> None:
    assert "tokens/forward" in lines_of(100, ("range",))[0]
    first, second, *rows = lines_of(80, ("range",))
    assert first.split() == ["tokens/"] and "forward" in second and "28.1-33.7" in rows[0]
    assert len(rows) == len(ROWS)


def test_optional_columns_are_left_out_in_order() -> None:
    *headings, first, second = lines_of(70, ("range", "tokens/forward"))
    shown = " ".join(headings)
    assert "range" not in shown and "forward" in shown and "28.1-33.7" not in first
    assert first.endswith("not distinguishable") and second.endswith("baseline")
    *headings, first, second = lines_of(60, ("range", "tokens/forward"))
    assert "forward" not in " ".join(headings) and first.endswith("not distinguishable")


@pytest.mark.parametrize("width", [28, 30, 40, 55, 70, 80])
def test_columns_that_are_not_optional_keep_every_word(width: int) -> None:
    optional = ("range", "tokens/forward")
    words = " ".join(lines_of(width, optional)).split()
    for row in ROWS:
        for cell in (*row[:2], row[3], row[5]):
            assert all(word in words for word in cell.split()), cell
