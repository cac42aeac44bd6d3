"""The blocks that a report page consists of. How they look is left to `html_page` and `markdown_page`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from utils.comparison.charts import Chart
from utils.comparison.marked_text import TextPiece


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading. level: 1 is the title of the page."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A sentence or more. strong: whether it is the answer of the page."""

    text: str
    strong: bool = False


class Cell(NamedTuple):
    """A cell of a table. exact: the figure with all its digits, if it was rounded."""

    text: str
    exact: str = ""


@dataclass(frozen=True, slots=True)
class DataTable:
    """Rows under headings. Without headings, the first column names what the others hold."""

    rows: Sequence[Sequence[Cell]]
    headings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Text exactly as it is. Pieces from accepted drafts are marked."""

    pieces: Sequence[TextPiece]


@dataclass(frozen=True, slots=True)
class Plot:
    """A chart."""

    chart: Chart


Block = Heading | Paragraph | DataTable | Verbatim | Plot
