"""Tables as rich lays them out: the comparison of strategies, and texts beside each other. They are built here, and shown by the screen."""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from utils.comparison.harness import Compared
from utils.comparison.reports import Column
from utils.comparison.strategies import Strategy
from utils.metrics.results import Comparison, Generation
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
LEFT_OUT = (
    (92, ()),
    (76, (2,)),
    (0, (2, 6, 7)),
)  # of these columns, by the width of the screen: the lines above say it too
NARROWEST = 36  # columns of a text that stands beside others
WIDEST = 26  # of a list's first column, where the screen is narrow


def comparison_table(compared: Sequence[Compared], width: int) -> Table:
    """A row for each strategy, in so many columns of a screen as there are."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    rows = [[strategy.name, *_cells(strategy, run, comparison)] for strategy, run, comparison in compared]
    left_out = next(places for least, places in LEFT_OUT if width >= least)
    for place, heading in enumerate(COLUMNS):
        if place not in left_out:
            longest = max(len(word) for text in (heading, *(row[place] for row in rows)) for word in text.split())
            table.add_column(heading, justify="left" if place in (0, 8) else "right", min_width=longest)
    for (strategy, _, _), row in zip(compared, rows, strict=True):
        cells = (Text(strategy.name, style=strategy.colour), *map(Text, row[1:]))
        table.add_row(*(cell for place, cell in enumerate(cells) if place not in left_out))
    return table


def _cells(strategy: Strategy, run: Generation, comparison: Comparison) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    if comparison.same is None:
        text = "-"
    else:
        text = "same" if comparison.first_difference is None else f"differs at token {comparison.first_difference + 1}"
    return [
        str(len(run.tokens)),
        f"{run.seconds:.2f}",
        number(run.tokens_per_second, "{:.1f}"),
        number(comparison.speedup, "{:.2f}x"),
        number(run.acceptance_rate, "{:.3f}"),
        number(run.drafts_per_round if strategy.drafts else None, "{:.1f}"),
        number(run.tokens_per_target_forward if strategy.uses_target else None, "{:.2f}"),
        text,
    ]


def table_of(headings: Sequence[str], rows: Sequence[tuple[str, ...]], width: int) -> Table:
    """Rows under headings. On a narrow screen cells are broken between words; on one where that will not do, each row is a list."""
    shown = [[visible(cell) for cell in row] for row in rows]
    columns = list(zip(headings, *shown, strict=True))
    least = [max(cell_len(word) for text in texts for word in text.split() or [""]) for texts in columns]
    gap = next((gap for gap in (2, 1) if sum(least) + gap * len(least) <= width), None)
    if gap is None:
        return list_of([pair for row in shown for pair in ((" ", ""), *zip(headings, row, strict=True))][1:], width)
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold")
    left = width - sum(least) - gap * len(least)
    for heading, texts, size in zip(
        headings, columns, least, strict=True
    ):  # rich would take from words to give to others
        more = min(left, max(map(cell_len, texts)) - size)
        left -= more
        table.add_column(heading, overflow="fold", width=size + more)
    for row in shown:
        table.add_row(*map(Text, row))
    return table


def list_of(rows: Sequence[tuple[str, ...]], width: int) -> Table:
    """Lines in columns, the first one bold, and no wider than leaves room for the others."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for place in range(max(map(len, rows), default=0)):
        table.add_column(
            style="bold" if place == 0 else "",
            overflow="fold",
            max_width=max(WIDEST, width // 3) if place == 0 else None,
        )
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table


def texts_beside(columns: Sequence[Column], width: int, mark: str) -> Iterator[Table]:
    """Texts beside each other, as many as there is room for, the rest below; behind the mark a text leaves the target's."""
    beside = max(1, min(len(columns), width // NARROWEST))
    for first in range(0, len(columns), beside):
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", expand=True)
        shown = columns[first : first + beside]
        for column in shown:
            table.add_column(
                Text(", ".join(column.names) + "\n").append(column.about, "dim not bold"), ratio=1, overflow="fold"
            )
        table.add_row(*(_marked(column, mark) for column in shown))
        yield table


def _marked(column: Column, mark: str) -> Text:
    text = Text(visible(column.text))
    return text.append(mark + visible(column.other), "bold") if column.other else text
