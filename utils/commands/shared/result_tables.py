"""The table of a report: its columns make the cells of a row from its figures."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from utils.comparison.records import Report, gathered
from utils.comparison.records import Row as Row
from utils.comparison.speed_claims import STAR
from utils.config.settings import Settings

NOTHING = "-"  # a cell without a value
FULL, EIGHTHS = "\u2588", ("", *"\u258f\u258e\u258d\u258c\u258b\u258a\u2589")  # of a cell of a bar


@dataclass(frozen=True, slots=True)
class ResultColumn:
    """One column. `shown` makes the cell from the figures of a row. A narrow screen drops the columns with a `drop`
    above 0, the smallest first.
    """

    heading: str
    shown: Callable[[Row], str]
    drop: int = 0


def figure(heading: str, key: str, form: str = "{}", *, drop: int = 0) -> ResultColumn:
    """A column that formats one figure, with a dash where the row has none."""

    def shown(row: Row) -> str:
        value = row.get(key)
        return NOTHING if value is None else form.format(value)

    return ResultColumn(heading, shown, drop)


def bar(
    heading: str, value: Callable[[Row], float | None], shown: Callable[[Row], str], *, cells: int, most: float = 1
) -> ResultColumn:
    """A column with a bar of up to so many cells, for a value up to `most`, before the cell that `shown` makes."""

    def drawn(row: Row) -> str:
        if (number := value(row)) is None:
            return NOTHING
        whole, eighths = divmod(round(8 * cells * min(number / most, 1)), 8)
        return f"{FULL * whole + EIGHTHS[eighths]:<{cells}} {shown(row)}"

    return ResultColumn(heading, drawn)


def marked(column: ResultColumn) -> ResultColumn:
    """The column with a mark in the rows of servers that had other requests."""
    return replace(column, shown=lambda row: column.shown(row) + STAR * any(row.get("other_tokens") or ()))


def _acceptance(row: Row) -> str:
    return f"{row['accepted'] / row['drafted']:.3f}" if row["drafted"] else NOTHING


ACCEPTANCE = ResultColumn("acceptance", _acceptance)


class ResultTable:
    """The columns of a report: `headings` and `optional` are those of the report."""

    def __init__(self, *columns: ResultColumn) -> None:
        self._columns = columns
        self.headings = tuple(column.heading for column in columns)
        dropped = sorted((column for column in columns if column.drop), key=lambda column: column.drop)
        self.optional = tuple(column.heading for column in dropped)

    def cells(self, row: Row) -> tuple[str, ...]:
        return tuple(column.shown(row) for column in self._columns)

    def report(
        self,
        name: str,
        prompt: str,
        settings: Settings,
        rows: Iterator[Row],
        **options: Any,
    ) -> Report:
        """The report with this table. The `options` are further fields of Report."""
        return Report(name, prompt, settings, self.headings, self.cells, rows, optional=self.optional, **options)


def grouped(rows: Iterable[Row], key: str) -> dict[str, list[Row]]:
    return gathered((row[key], row) for row in rows)
