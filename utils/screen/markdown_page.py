"""A report as Markdown that renders on GitHub: tables, plots as text, accepted drafts in bold.

GitHub shows no colours and no embedded pictures, so plots are those of the terminal. All text is escaped.
"""

import re
from collections.abc import Iterable, Sequence
from functools import singledispatch
from html import escape

from utils.comparison.marked_text import TextPiece
from utils.screen.plots import MAX_WIDTH, text_plot
from utils.screen.report_blocks import Block, Cell, DataTable, Heading, Paragraph, Plot, Verbatim
from utils.text import visible

SPECIAL = re.compile(r"([\\`*_\[\]|~$#])")  # what has a meaning in GitHub's Markdown anywhere in a line


def markdown_page(blocks: Iterable[Block]) -> str:
    """The page."""
    return "\n\n".join(_shown(block) for block in blocks) + "\n"


def _text(text: str) -> str:
    """Text in one line in which nothing is Markdown, HTML or the end of a table cell."""
    return escape(SPECIAL.sub(r"\\\1", " ".join(visible(text).split())), quote=False)


@singledispatch
def _shown(block: Block) -> str:
    raise TypeError(type(block))


@_shown.register
def _heading(block: Heading) -> str:
    return f"{'#' * block.level} {_text(block.text)}"


@_shown.register
def _paragraph(block: Paragraph) -> str:
    text = _first_escaped(_text(block.text))
    return f"> **{text}**" if block.strong else text


def _first_escaped(text: str) -> str:
    """The text of a paragraph that is no list, heading or rule."""
    return re.sub(r"^(\d+)([.)])|^([-+=])", lambda match: f"{match[1] or ''}\\{match[2] or match[3]}", text)


@_shown.register
def _table(block: DataTable) -> str:
    headings = block.headings or [""] * max(len(row) for row in block.rows)
    lines = [_row([_text(heading) for heading in headings]), _row(["---"] * len(headings))]
    return "\n".join([*lines, *(_row([_cell(cell) for cell in row]) for row in block.rows)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    return _text(cell.text)


@_shown.register
def _verbatim(block: Verbatim) -> str:
    """Lines of inline code as HTML, which GitHub wraps; a fenced block could not have bold parts."""
    lines: list[list[TextPiece]] = [[]]
    for piece in block.pieces:
        first, *rest = visible(piece.text).split("\n")
        lines[-1].append(TextPiece(first, piece.accepted))
        lines += ([TextPiece(part, piece.accepted)] for part in rest)
    # In one line, because an empty line would end the HTML.
    return f"<p>{'<br>'.join(map(_code_line, lines))}</p>"


def _code_line(line: Sequence[TextPiece]) -> str:
    shown = "".join(_piece(piece) for piece in line if piece.text)
    return f"<code>{shown}</code>" if shown else ""


def _piece(piece: TextPiece) -> str:
    text = escape(piece.text, quote=True)
    return f"<b>{text}</b>" if piece.accepted else text


@_shown.register
def _plot(block: Plot) -> str:
    plot = visible(text_plot(block.chart, width=MAX_WIDTH))
    # A fence must be longer than any run of backticks in it.
    fence = "`" * (3 + max(map(len, re.findall("`+", plot)), default=0))
    return f"{fence}text\n{plot}\n{fence}"
