"""Builds rich tables: the comparison of strategies, lists, and texts side by side.

All tables adapt to the width of the screen. They are written by `utils.screen.renderer`.
"""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from utils.comparison.last_prompt import ComparedRun
from utils.comparison.reports import Column
from utils.comparison.summary import is_noise
from utils.text import visible

COLUMNS = (
    "strategy",
    "tokens",
    "seconds",
    "tokens/s",
    "speed-up",
    "acceptance",
    "drafts/\nround",
    "tokens/\nforward",
    "text",
)
OPTIONAL = (2, 6, 1, 5)  # columns that a narrow screen lacks, in this order
MIN_TEXT_WIDTH = 36  # of a text beside others
MAX_FIRST_WIDTH = 26  # of the first column of a list on a narrow screen


def comparison_table(compared: Sequence[ComparedRun], width: int) -> Table:
    """One row per strategy, with the columns that fit."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    rows = [[entry.strategy.name, *_cells(entry)] for entry in compared]
    lines = [[line for text in texts for line in text.split("\n")] for texts in zip(COLUMNS, *rows, strict=True)]
    sizes = [max(map(cell_len, texts)) for texts in lines]
    shown = list(range(len(COLUMNS)))
    for index in OPTIONAL:
        if sum(sizes[column] + 1 for column in shown) <= width:
            break
        shown.remove(index)
    for index in shown:
        # rich would otherwise break words to make a column narrower.
        longest = max(cell_len(word) for line in lines[index] for word in line.split())
        table.add_column(COLUMNS[index], justify="left" if index in (0, 8) else "right", min_width=longest)
    for (strategy, _, _), row in zip(compared, rows, strict=True):
        # Text objects, because rich would interpret square brackets of plain strings as markup.
        cells = (Text(strategy.name, style=strategy.colour), *map(Text, row[1:]))
        table.add_row(*(cells[index] for index in shown))
    return table


def _cells(compared: ComparedRun) -> list[str]:
    strategy, run, comparison = compared

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    return [
        str(len(run.tokens)),
        f"{run.seconds:.2f}",
        number(run.tokens_per_second, "{:.1f}"),
        "noise" if is_noise(compared) else number(comparison.speedup, "{:.2f}x"),
        number(run.acceptance_rate, "{:.3f}"),
        number(run.drafts_per_round if strategy.drafts else None, "{:.1f}"),
        number(run.tokens_per_target_forward if strategy.uses_target else None, "{:.2f}"),
        comparison.text,
    ]


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
