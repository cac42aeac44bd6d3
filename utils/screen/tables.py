"""Builds rich tables: the comparison of strategies and servers, lists, and texts side by side.

All tables adapt to the width of the screen. `utils.screen.renderer` writes them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from utils.comparison.last_prompt import ComparedRun
from utils.comparison.reports import Column
from utils.comparison.server_runs import COLOURS, ComparedServer
from utils.comparison.server_summary import is_noise as is_server_noise
from utils.comparison.summary import is_noise
from utils.text import visible

COLUMNS = (
    "strategy",
    "tokens",
    "seconds",
    "first\ntoken, s",
    "tokens/s",
    "decode\ntokens/s",
    "speed-up",
    "acceptance",
    "drafts/\nround",
    "tokens/\nforward",
    "text",
)
OF_SERVERS = ("first\ntoken, s", "decode\ntokens/s")  # columns of tables with servers
# Columns that are dropped on a narrow screen, in this order.
OPTIONAL = ("seconds", "drafts/\nround", "tokens", "first\ntoken, s", "acceptance", "decode\ntokens/s")
LEFT = ("strategy", "text")  # columns of words
MIN_TEXT_WIDTH = 36  # of a text beside others
MAX_FIRST_WIDTH = 26  # of the first column of a list on a narrow screen


class ComparisonRow(NamedTuple):
    """A row of the comparison. `cells` has one cell for each of COLUMNS, the name first."""

    colour: str
    cells: Sequence[str]


def comparison_table(compared: Sequence[ComparedRun], width: int, servers: Sequence[ComparedServer] = ()) -> Table:
    """One row for each strategy and server, with the columns that fit."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    rows = [*map(_strategy_row, compared), *(_server_row(index, entry) for index, entry in enumerate(servers))]
    columns = {name: [row.cells[index] for row in rows] for index, name in enumerate(COLUMNS)}
    if not servers:
        columns = {name: cells for name, cells in columns.items() if name not in OF_SERVERS}
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
    for index, row in enumerate(rows):
        # Text objects, because rich would interpret square brackets of plain strings as markup.
        cells = [Text(columns[name][index]) for name in sizes]
        cells[0].stylize(row.colour)
        table.add_row(*cells)
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _strategy_row(compared: ComparedRun) -> ComparisonRow:
    strategy, run, comparison = compared
    cells = (
        strategy.name,
        str(len(run.tokens)),
        f"{run.seconds:.2f}",
        _number(run.first_seconds, "{:.2f}"),
        _number(run.tokens_per_second, "{:.1f}"),
        _number(run.decode_tokens_per_second, "{:.1f}"),
        "noise" if is_noise(compared) else _number(comparison.speedup, "{:.2f}x"),
        _number(run.acceptance_rate, "{:.3f}"),
        _number(run.drafts_per_round if strategy.drafts else None, "{:.1f}"),
        _number(run.tokens_per_target_forward if strategy.uses_target else None, "{:.2f}"),
        comparison.text,
    )
    return ComparisonRow(strategy.colour, cells)


def _server_row(index: int, compared: ComparedServer) -> ComparisonRow:
    run, comparison = compared
    cells = (
        run.name,
        _number(run.new_tokens, "{}"),
        f"{run.seconds:.2f}",
        _number(run.first_seconds, "{:.2f}"),
        _number(run.tokens_per_second, "{:.1f}"),
        _number(run.decode_tokens_per_second, "{:.1f}"),
        "noise" if is_server_noise(compared) else _number(comparison.speedup, "{:.2f}x"),
        _number(run.acceptance_rate, "{:.3f}"),
        _number(run.drafts_per_round, "{:.1f}"),
        _number(run.tokens_per_target_forward, "{:.2f}"),
        comparison.text,
    )
    return ComparisonRow(COLOURS[index % len(COLOURS)], cells)


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
