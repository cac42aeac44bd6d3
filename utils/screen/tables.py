"""Builds rich tables: the comparison of strategies and servers, lists, and texts side by side.

All tables adapt to the width of the screen. `utils.screen.renderer` writes them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from utils.comparison.arms import ComparedRun
from utils.comparison.reports import Column
from utils.comparison.summary import is_noise
from utils.text import visible


class TableColumn(NamedTuple):
    """A column of the comparison: its heading, and a run's cell. Some columns are shown only beside servers."""

    heading: str
    cell: Callable[[ComparedRun], str]
    of_servers: bool = False


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _speedup(entry: ComparedRun) -> str:
    return "noise" if is_noise(entry) else _number(entry.comparison.speedup, "{:.2f}x")


COLUMNS = (
    TableColumn("strategy", lambda entry: entry.run.name),
    TableColumn("tokens", lambda entry: _number(entry.run.new_tokens, "{}")),
    TableColumn("seconds", lambda entry: f"{entry.run.seconds:.2f}"),
    TableColumn("first\ntoken, s", lambda entry: _number(entry.run.first_seconds, "{:.2f}"), of_servers=True),
    TableColumn("tokens/s", lambda entry: _number(entry.run.tokens_per_second, "{:.1f}")),
    TableColumn("decode\ntokens/s", lambda entry: _number(entry.run.decode_tokens_per_second, "{:.1f}"), True),
    TableColumn("speed-up", _speedup),
    TableColumn("acceptance", lambda entry: _number(entry.run.acceptance_rate, "{:.3f}")),
    TableColumn("drafts/\nround", lambda entry: _number(entry.run.drafts_per_round, "{:.1f}")),
    TableColumn("tokens/\nforward", lambda entry: _number(entry.run.tokens_per_target_forward, "{:.2f}")),
    TableColumn("text", lambda entry: entry.comparison.text),
)
# Columns that are dropped on a narrow screen, in this order.
OPTIONAL = ("seconds", "drafts/\nround", "tokens", "first\ntoken, s", "acceptance", "decode\ntokens/s")
LEFT = ("strategy", "text")  # columns of words
MIN_TEXT_WIDTH = 36  # of a text beside others
MAX_FIRST_WIDTH = 26  # of the first column of a list on a narrow screen


def comparison_table(compared: Sequence[ComparedRun], width: int) -> Table:
    """One row for each strategy and server, with the columns that fit."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    beside_servers = not all(entry.run.is_local for entry in compared)
    shown = [column for column in COLUMNS if beside_servers or not column.of_servers]
    columns = {column.heading: [column.cell(entry) for entry in compared] for column in shown}
    lines = {name: [line for cell in (name, *cells) for line in cell.split("\n")] for name, cells in columns.items()}
    sizes = {name: max(map(cell_len, texts)) for name, texts in lines.items()}
    for name in OPTIONAL:
        if sum(size + 1 for size in sizes.values()) <= width:
            break
        sizes.pop(name, None)
    for name in sizes:
        # rich would otherwise break words to make a column narrower.
        longest = max(cell_len(word) for line in lines[name] for word in line.split())
        table.add_column(name, justify="left" if name in LEFT else "right", min_width=longest)
    for index, entry in enumerate(compared):
        # Text objects, because rich would interpret square brackets of plain strings as markup.
        cells = [Text(columns[name][index]) for name in sizes]
        cells[0].stylize(entry.arm.colour)
        table.add_row(*cells)
    return table


def list_table(rows: Sequence[tuple[str, ...]], width: int) -> Table:
    """Rows without headings. The first column is bold and leaves room for the others."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for index in range(max(map(len, rows), default=0)):
        max_width = None if index else max(MAX_FIRST_WIDTH, width // 3)
        table.add_column(style="" if index else "bold", overflow="fold", max_width=max_width)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table


def side_by_side(columns: Sequence[Column], width: int, marker: str) -> Iterator[Table]:
    """Tables of as many texts as fit side by side. The marker precedes the part that differs from the target's text."""
    beside = max(1, min(len(columns), width // MIN_TEXT_WIDTH))
    for first in range(0, len(columns), beside):
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", expand=True)
        shown = columns[first : first + beside]
        for column in shown:
            table.add_column(
                Text(", ".join(column.names) + "\n").append(column.about, "dim not bold"), ratio=1, overflow="fold"
            )
        table.add_row(*(_marked(column, marker) for column in shown))
        yield table


def _marked(column: Column, marker: str) -> Text:
    text = Text(visible(column.text))
    return text.append(marker + visible(column.other), "bold") if column.other else text
