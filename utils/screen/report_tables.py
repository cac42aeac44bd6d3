"""Tables of reports: one line per row wherever the screen has room, without the less important columns if necessary.

`utils.screen.renderer` writes them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from utils.screen.tables import list_table
from utils.text import visible

GAPS = (2, 1)  # columns between two cells: wide if there is room, otherwise narrow


@dataclass(frozen=True, slots=True)
class _Column:
    """A heading and the cells below it."""

    heading: str
    cells: Sequence[str]

    @property
    def one_line(self) -> int:
        """The width at which no cell is broken. A heading may take two lines."""
        return max([self.least_heading, *map(cell_len, self.cells)])

    @property
    def least(self) -> int:
        """The width at which no word is broken."""
        return max([self.least_heading, *(cell_len(word) for cell in self.cells for word in cell.split())])

    @property
    def least_heading(self) -> int:
        return max(map(cell_len, _in_lines(self.heading).split("\n")))

    def heading_for(self, width: int) -> str:
        return self.heading if cell_len(self.heading) <= width else _in_lines(self.heading)


def _in_lines(heading: str) -> str:
    """A heading on two lines of similar width, if it has a blank or a slash as in tokens/forward (but not tokens/s)."""
    cuts = [match.end() for match in re.finditer(r" |/(?=\w\w)", heading)]
    forms = [f"{heading[:cut].rstrip()}\n{heading[cut:]}" for cut in cuts]
    return min(forms, key=lambda form: max(map(cell_len, form.split("\n"))), default=heading)


def report_table(
    headings: Sequence[str], rows: Sequence[tuple[str, ...]], width: int, optional: Sequence[str] = ()
) -> Table:
    """Rows under headings, one line each if the screen has room for that without the optional columns.

    The columns in `optional` are dropped on a narrow screen, the first one first. If there is still no room, cells are
    broken between words. On a very narrow screen each row becomes a list.
    """
    shown = [tuple(visible(cell) for cell in row) for row in rows]
    columns = [_Column(heading, cells) for heading, *cells in zip(headings, *shown, strict=True)]
    for heading in optional:
        if _fits([column.one_line for column in columns], width):
            break
        columns = [column for column in columns if column.heading != heading]
    if not _fits([column.least for column in columns], width):
        return _as_lists(columns, width)
    return _table(columns, width)


def _fits(sizes: Sequence[int], width: int, gap: int = GAPS[-1]) -> bool:
    return sum(sizes) + gap * len(sizes) <= width


def _table(columns: Sequence[_Column], width: int) -> Table:
    sizes = [column.least for column in columns]
    full = [column.one_line for column in columns]
    gap = next((gap for gap in GAPS if _fits(full, width, gap)), GAPS[-1])
    # Cells come before headings that would otherwise take two lines, and the first columns before others.
    for wanted in (full, [max(size, cell_len(column.heading)) for size, column in zip(full, columns, strict=True)]):
        for index, want in enumerate(wanted):
            sizes[index] += max(0, min(want - sizes[index], width - sum(sizes) - gap * len(sizes)))
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold")
    for column, size in zip(columns, sizes, strict=True):  # rich would break words of some columns
        table.add_column(column.heading_for(size), overflow="fold", width=size)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _as_lists(columns: Sequence[_Column], width: int) -> Table:
    """Each row as a list of its cells, with a blank line between rows."""
    headings = [column.heading for column in columns]
    rows = zip(*(column.cells for column in columns), strict=True)
    lines = [pair for row in rows for pair in ((" ", ""), *zip(headings, row, strict=True))]
    return list_table(lines[1:], width)


def transposed_rows(
    headings: Sequence[str], rows: Sequence[tuple[str, ...]], width: int
) -> list[list[tuple[str, ...]]]:
    """Lists with one line per heading and one column per row. Each list has as many rows as fit on the screen."""
    first = max(map(cell_len, headings)) + GAPS[0]
    lists: list[list[tuple[str, ...]]] = []
    taken: list[tuple[str, ...]] = []
    for row in rows:
        sizes = [max(cell_len(visible(cell)) for cell in one) + GAPS[0] for one in (*taken, row)]
        if taken and first + sum(sizes) > width:
            lists.append(list(zip(headings, *taken, strict=True)))
            taken = []
        taken.append(row)
    return [*lists, list(zip(headings, *taken, strict=True))]
