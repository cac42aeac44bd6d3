"""Builds rich tables: the comparison of strategies and servers, findings of reports, and lists.

All tables adapt to the width of the screen, without the less important columns if necessary. `utils.screen.renderer`
writes them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from utils.comparison.arms import ComparedRun
from utils.comparison.speed_claims import STAR
from utils.comparison.summary import is_noise
from utils.text import visible


class RunColumn(NamedTuple):
    """A column of the comparison: its heading, and a run's cell. Some columns are shown only beside servers."""

    heading: str
    cell: Callable[[ComparedRun], str]
    of_servers: bool = False


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _speedup(entry: ComparedRun) -> str:
    return NOISE if is_noise(entry) else _number(entry.comparison.speedup, "{:.2f}x" + _star(entry))


def _star(entry: ComparedRun) -> str:
    return STAR if entry.run.other_tokens else ""


COLUMNS = (
    RunColumn("strategy", lambda entry: entry.run.name),
    RunColumn("tokens", lambda entry: _number(entry.run.new_tokens, "{}")),
    RunColumn("seconds", lambda entry: f"{entry.run.seconds:.2f}"),
    RunColumn("first token, s", lambda entry: _number(entry.run.first_seconds, "{:.2f}"), of_servers=True),
    RunColumn("tokens/s", lambda entry: _number(entry.run.tokens_per_second, "{:.1f}" + _star(entry))),
    RunColumn("decode tokens/s", lambda entry: _number(entry.run.decode_tokens_per_second, "{:.1f}"), True),
    RunColumn("speed-up", _speedup),
    RunColumn("acceptance", lambda entry: _number(entry.run.acceptance_rate, "{:.3f}")),
    RunColumn("drafts/round", lambda entry: _number(entry.run.drafts_per_round, "{:.1f}")),
    RunColumn("tokens/forward", lambda entry: _number(entry.run.tokens_per_target_forward, "{:.2f}")),
    RunColumn("text", lambda entry: entry.comparison.text),
)
# Columns that are dropped on a narrow screen, in this order.
OPTIONAL = ("seconds", "drafts/round", "tokens", "first token, s", "acceptance", "decode tokens/s")
MAX_FIRST_WIDTH = 26  # of the first column of a list on a narrow screen
NUMERIC, NOISE = "-~0123456789", "noise"  # how the cells of a column of numbers begin, and the word among them
GAPS = (2, 1)  # columns between two cells of a report: wide if there is room, otherwise narrow


def comparison_table(compared: Sequence[ComparedRun], width: int) -> Table:
    """One row for each strategy and server, with the columns that fit."""
    beside_servers = not all(entry.run.is_local for entry in compared)
    columns = [column for column in COLUMNS if beside_servers or not column.of_servers]
    rows = [tuple(column.cell(entry) for column in columns) for entry in compared]
    colours = [entry.arm.colour for entry in compared]
    return report_table([column.heading for column in columns], rows, width, OPTIONAL, colours=colours)


def list_table(rows: Sequence[tuple[str, ...]], width: int) -> Table:
    """Rows without headings. The first column is bold and leaves room for the others."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for index in range(max(map(len, rows), default=0)):
        max_width = None if index else max(MAX_FIRST_WIDTH, width // 3)
        table.add_column(style="" if index else "bold", overflow="fold", max_width=max_width)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table


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

    @property
    def has_numbers(self) -> bool:
        return all(cell[:1] in NUMERIC or cell == NOISE for cell in self.cells)

    def heading_for(self, width: int) -> str:
        return self.heading if cell_len(self.heading) <= width else _in_lines(self.heading)


def _in_lines(heading: str) -> str:
    """A heading on two lines of similar width, if it has a blank or a slash as in tokens/forward (but not tokens/s)."""
    cuts = [match.end() for match in re.finditer(r" |/(?=\w\w)", heading)]
    forms = [f"{heading[:cut].rstrip()}\n{heading[cut:]}" for cut in cuts]
    return min(forms, key=lambda form: max(map(cell_len, form.split("\n"))), default=heading)


def report_table(
    headings: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    width: int,
    optional: Sequence[str] = (),
    *,
    colours: Sequence[str] = (),
) -> Table:
    """Rows under headings, one line each if the screen has room for that without the optional columns.

    The columns in `optional` are dropped on a narrow screen, the first one first. If there is still no room, cells are
    broken between words. On a very narrow screen each row becomes a list. `colours` are those of the first cells.
    """
    shown = [tuple(visible(cell) for cell in row) for row in rows]
    columns = [_Column(heading, cells) for heading, *cells in zip(headings, *shown, strict=True)]
    for heading in optional:
        if _fits([column.one_line for column in columns], width):
            break
        columns = [column for column in columns if column.heading != heading]
    if not _fits([column.least for column in columns], width):
        return _as_lists(columns, width)
    return _table(columns, width, colours)


def _fits(sizes: Sequence[int], width: int, gap: int = GAPS[-1]) -> bool:
    return sum(sizes) + gap * len(sizes) <= width


def _table(columns: Sequence[_Column], width: int, colours: Sequence[str]) -> Table:
    sizes = [column.least for column in columns]
    full = [column.one_line for column in columns]
    gap = next((gap for gap in GAPS if _fits(full, width, gap)), GAPS[-1])
    # Cells come before headings that would otherwise take two lines, and the first columns before others.
    for wanted in (full, [max(size, cell_len(column.heading)) for size, column in zip(full, columns, strict=True)]):
        for index, want in enumerate(wanted):
            sizes[index] += max(0, min(want - sizes[index], width - sum(sizes) - gap * len(sizes)))
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold")
    for column, size in zip(columns, sizes, strict=True):  # rich would break words of some columns
        justify: Literal["left", "right"] = "right" if column.has_numbers else "left"
        table.add_column(column.heading_for(size), justify=justify, overflow="fold", width=size)
    for index, (first, *others) in enumerate(zip(*(column.cells for column in columns), strict=True)):
        # Text objects, because rich would interpret square brackets of plain strings as markup.
        table.add_row(Text(first, style=colours[index] if colours else ""), *map(Text, others))
    return table


def _as_lists(columns: Sequence[_Column], width: int) -> Table:
    """Each row as a list of its cells, with a blank line between rows."""
    headings = [column.heading for column in columns]
    rows = zip(*(column.cells for column in columns), strict=True)
    lines = [pair for row in rows for pair in ((" ", ""), *zip(headings, row, strict=True))]
    return list_table(lines[1:], width)
