"""What the screen shows: titles, streamed text, rounds, tables, progress, replies and errors.

rich lays out lines and tables, termcolor colours streamed text; `open_console` decides for both about colours. rich
only computes texts, because its buffer would keep interrupted output and print it a second time. Text of models and
users is shown literally, without markup and control characters.
"""

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from io import StringIO, TextIOWrapper
from typing import TextIO

import psutil
from rich.cells import cell_len as cell_len
from rich.console import COLOR_SYSTEMS, Console, RenderableType
from rich.rule import Rule
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text as Text
from termcolor import colored

from utils.screen import CLEAR_LINE
from utils.text import Count, byte_size, visible

STEP_SECONDS = 10.0
UNLIMITED = 10_000  # columns of a file or a pipe
MARGIN = 1  # columns right of a progress line: after the last one some terminals begin a new line
MOST_OFTEN = 0.1  # minimum seconds between two counts of the same work

MAX_FIRST_WIDTH = 26  # of the first column of a list on a narrow screen
NUMERIC, NOISE = "-~0123456789", "noise"  # how the cells of a column of numbers begin, and the word among them
GAPS = (2, 1)  # columns between two cells of a report: wide if there is room, otherwise narrow

KEPT = 50_000  # pieces of text that are kept for the page


# Styles of text that the writing model has not chosen itself.
ACCEPTED = "bold green"  # drafts that the target accepted; bold for eyes and screens without colours, too
NAME = "bold"  # of a strategy
NOTE = "dim"  # other text of the program
ColouredPiece = tuple[str, str]


class OutputError(BrokenPipeError):
    """A stream cannot be written for a reason that the user should see, such as a full disk."""


def put(console: Console, text: str) -> None:
    """Write immediately. Raises OutputError if that fails, and BrokenPipeError if nobody reads any more."""
    try:
        console.file.write(text)
        console.file.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from error


class ProgressLine:
    """One line of a terminal that is overwritten, and cleared before other output."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._is_shown = False
        self._next = 0.0

    @property
    def is_possible(self) -> bool:
        """Whether lines can be overwritten here."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def show(self, text: str) -> None:
        line = Text(" ".join(text.split()), style="dim", end="", no_wrap=True, overflow="crop")
        self._is_shown = True
        put(self._console, CLEAR_LINE + rendered(self._console, line, self._console.width - MARGIN))

    def count(self, text: str) -> None:
        """Like `show`, but skips a text that follows the one before it too soon."""
        if self._clock() >= self._next:
            self._next = self._clock() + MOST_OFTEN
            self.show(text)

    def clear(self) -> None:
        if self._is_shown:
            self._is_shown, self._next = False, 0.0
            put(self._console, CLEAR_LINE)


class Writer:
    """Writes to one stream, and adds the text to `kept`."""

    def __init__(self, console: Console, progress: ProgressLine, kept: deque[str]) -> None:
        self.console, self._progress, self._kept = console, progress, kept

    def write(self, text: str, *, kept: bool = True) -> None:
        self._progress.clear()
        put(self.console, text)
        if kept:
            self._kept.append(text)

    def line(self, text: str, style: str = "") -> None:
        """A line, wrapped between words on a terminal only."""
        if self.console.is_terminal:
            # A Text object, because rich would interpret square brackets of a plain string as markup.
            self.draw(Text(visible(text), style=style))
        else:
            self.write(visible(text) + "\n")

    def draw(self, content: RenderableType, width: int | None = None) -> None:
        """The layout of rich in at most `width` columns, without blanks at the ends of lines."""
        lines = rendered(self.console, content, width).split("\n")
        self.write("\n".join(line.rstrip(" ") for line in lines))


def rendered(console: Console, content: RenderableType, width: int | None = None) -> str:
    """The text of a layout of rich, with the escape sequences that the console allows."""
    options = console.options if width is None else console.options.update(width=width)
    name = None if console.no_color else console.color_system
    colours = None if name is None else COLOR_SYSTEMS[name]
    return "".join(
        segment.text if segment.style is None else segment.style.render(segment.text, color_system=colours)
        for segment in console.render(content, options)
    )


class Renderer:
    """Writes results to `out` and messages to `messages`.

    With `colour`, results may contain escape sequences. With `wraps`, tables must fit into the width of `out`.
    """

    def __init__(self, out: Console, messages: Console, *, colour: bool, wraps: bool = True) -> None:
        self._progress = ProgressLine(messages)
        self._kept: deque[str] = deque(maxlen=KEPT)
        self._out = Writer(out, self._progress, self._kept)
        self._messages = Writer(messages, self._progress, self._kept)
        self.colour = colour
        self._wraps = wraps or out.is_terminal
        self._has_explained = False
        self._last_step = time.monotonic()

    @property
    def width(self) -> int:
        return self._out.console.width

    @property
    def _table_width(self) -> int:
        return self.width if self._wraps else UNLIMITED

    @property
    def stream_width(self) -> int | None:
        """The width of streamed text in columns, or None if its lines must not be broken."""
        return self.width if self._out.console.is_terminal else None

    def title(self, title: str, colour: str) -> None:
        self._out.draw(Rule(Text(title), style=colour, align="left"))

    def prompt(self, text: str, *, echo: bool) -> None:
        """The prompt above its answers. Without `echo` it was typed on this screen, so only the page needs it."""
        if echo:
            self._out.line("> " + text, "bold")
        else:
            self.keep(f"> {text}\n")

    def keep(self, text: str) -> None:
        """Add a text to the page only."""
        self._kept.append(visible(text))

    def page(self) -> str:
        """Everything that was shown last, as an HTML page in the colours and the width of the screen."""
        console = Console(file=StringIO(), record=True, force_terminal=True, width=self._table_width)
        console.print(Text.from_ansi("".join(self._kept)))
        return console.export_html()

    def stream(self, text: Text, *, kept: bool = True) -> None:
        """A part of growing text, written immediately. Styles become colours, if there are any."""
        segments = Segment.simplify(text.render(self._out.console))
        self._out.write("".join(self._painted(visible(part), style) for part, style, _ in segments), kept=kept)

    def _painted(self, text: str, style: Style | None) -> str:
        """The text in one of the colours and attributes that rich and termcolor name alike, dim apart."""
        if not self.colour or not style:
            return text
        attributes = [name for name, is_set in (("bold", style.bold), ("dark", style.dim)) if is_set]
        # A flag, because termcolor would otherwise read environment variables and differ from rich.
        return colored(text, style.color and style.color.name, attrs=attributes, force_color=True)

    def explain_marks(self) -> None:
        """Explain the colours of a text, once."""
        if self.colour and not self._has_explained:
            self.remark(f"{ACCEPTED}: drafts that the target accepted")
            self._has_explained = True

    def pieces(self, start: str, pieces: Iterable[ColouredPiece]) -> None:
        """Coloured pieces on as many lines as the terminal needs. Pieces are not broken."""
        room, used, text = self.stream_width, cell_len(start), Text(start)
        for piece, colour in pieces:
            size = 1 + cell_len(piece)
            # An empty line is never broken: a piece longer than a line is written all the same.
            if room is not None and used > len(start) and used + size > room:
                text, used = text + "\n" + " " * len(start), len(start)
            text, used = text.append(" ").append(piece, colour), used + size
        self.stream(text.append("\n"))

    def remark(self, text: str) -> None:
        self._out.line(text, "dim")

    def table(
        self,
        headings: Sequence[str],
        rows: Iterable[tuple[str, ...]],
        optional: Sequence[str] = (),
        *,
        colours: Sequence[str] = (),
    ) -> None:
        """Rows under headings. The columns in `optional` are dropped on a narrow screen, the first one first. `colours`
        are those of the first cells.
        """
        width = self._table_width
        self._out.draw(report_table(headings, list(rows), width, optional, colours=colours), width)

    def result(self, text: str) -> None:
        self._out.line(text)

    def data(self, text: str) -> None:
        """Lines of data to copy. They are never broken."""
        self._out.write(visible(text) + "\n")

    def progress(self, text: str) -> None:
        """The current work. On a terminal the next output replaces this line, elsewhere it stays."""
        if isinstance(text, Count):
            self.count(text)
        elif self._progress.is_possible:
            self._progress.show(visible(text))
        else:
            self.note(text)

    def count(self, text: str) -> None:
        """The progress of work, many times a second. It is shown on a terminal only."""
        if self._progress.is_possible:
            self._progress.count(visible(text))

    def step(self, text: str) -> None:
        """The progress of a preparation, and the memory of this process. Where lines stay, one every STEP_SECONDS."""
        shown = f"{text} ({byte_size(psutil.Process().memory_info().rss)} of memory)"
        if self._progress.is_possible:
            self.count(shown)
        elif time.monotonic() - self._last_step >= STEP_SECONDS:
            self._last_step = time.monotonic()
            self.note(f"... {shown}")

    def announce(self, text: str) -> None:
        """A message of loading. One that ends with "..." is replaced by the next one."""
        if isinstance(text, Count):
            self.step(text)
        elif text.endswith("..."):
            self.progress(text)
        else:
            self.note(text)

    def end_progress(self) -> None:
        """Clear the line of `progress` and `count`."""
        self._progress.clear()

    def reply(self, text: str) -> None:
        self._messages.line(text)

    def note(self, text: str) -> None:
        self._messages.line(text, "dim")

    def error(self, text: str) -> None:
        self._messages.line(text, "red")

    def crash(self) -> None:
        self.end_progress()
        self._messages.console.print_exception()

    def rows(self, rows: Iterable[tuple[str, ...]]) -> None:
        self._out.draw(list_table(list(rows), self._table_width), self._table_width)

    def newline(self) -> None:
        self._out.write("\n")

    def clear(self) -> None:
        self.end_progress()
        self._out.console.clear()


def make_renderer(*, interactive: bool, plain: bool = False) -> Renderer:
    """The screen: results go to standard output, and so do messages if interactive, otherwise to standard error.

    A stream has colours if rich detects a terminal with colours, NO_COLOR is not set and `plain` is False.
    """
    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open until the process ends)
    # A stream is None if it was closed before the start.
    out = open_console(sys.stdout or nowhere, plain=plain)
    messages = out if interactive else open_console(sys.stderr or nowhere, plain=plain)
    has_width = os.environ.get("COLUMNS", "").isdigit()  # of output that is not a terminal
    return Renderer(out, messages, colour=not out.no_color, wraps=has_width)


def open_console(stream: TextIO, *, plain: bool) -> Console:
    """A console on a stream. It has colours on a terminal with colours, without NO_COLOR and `plain`."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")  # the terminal may lack a character that the model generates
    probe = Console(file=stream)  # rich detects the terminal and NO_COLOR in its constructor
    colour = probe.color_system is not None and not probe.no_color and not plain
    return Console(
        file=stream,
        no_color=not colour,
        # None leaves it to rich whether the stream is a terminal, which also decides whether lines are wrapped.
        force_terminal=True if colour else None,
        color_system="auto" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


def list_table(rows: Sequence[tuple[str, ...]], width: int) -> Table:
    """Rows without headings. The first column is bold and leaves room for the others."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for index in range(max(map(len, rows), default=0)):
        max_width = None if index else max(MAX_FIRST_WIDTH, width // 3)
        table.add_column(style="" if index else "bold", overflow="fold", max_width=max_width)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table


_Column = tuple[str, list[str]]  # a heading and the cells below it


def _in_lines(heading: str) -> str:
    """A heading on two lines of similar width, if it has a blank or a slash as in tokens/forward (but not tokens/s)."""
    cuts = [match.end() for match in re.finditer(r" |/(?=\w\w)", heading)]
    forms = [f"{heading[:cut].rstrip()}\n{heading[cut:]}" for cut in cuts]
    return min(forms, key=lambda form: max(map(cell_len, form.split("\n"))), default=heading)


def report_table(
    headings: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    width: int,
    optional: Sequence[str],
    *,
    colours: Sequence[str],
) -> Table:
    """Rows under headings, one line each if the screen has room for that without the optional columns.

    The columns in `optional` are dropped on a narrow screen, the first one first. If there is still no room, cells are
    broken between words. On a very narrow screen each row becomes a list. `colours` are those of the first cells.
    """
    columns = [(heading, list(map(visible, cells))) for heading, *cells in zip(headings, *rows, strict=True)]
    for heading in optional:
        if _fits([_size(*column) for column in columns], width):
            break
        columns = [column for column in columns if column[0] != heading]
    least = [_size(heading, " ".join(cells).split()) for heading, cells in columns]
    return _table(columns, least, width, colours) if _fits(least, width) else _as_lists(columns, width)


def _size(heading: str, texts: Iterable[str]) -> int:
    """The width at which no text is broken. The heading may take two lines."""
    return max(map(cell_len, (*_in_lines(heading).split("\n"), *texts)))


def _fits(sizes: Sequence[int], width: int, gap: int = GAPS[-1]) -> bool:
    return sum(sizes) + gap * len(sizes) <= width


def _table(columns: Sequence[_Column], sizes: list[int], width: int, colours: Sequence[str]) -> Table:
    """Columns with a heading and cells each, which become as wide as there is room beyond these sizes."""
    full = [_size(*column) for column in columns]
    gap = next((gap for gap in GAPS if _fits(full, width, gap)), GAPS[-1])
    # Cells come before headings that would otherwise take two lines, and the first columns before others.
    for wanted in (full, [max(size, cell_len(heading)) for size, (heading, _) in zip(full, columns, strict=True)]):
        for index, want in enumerate(wanted):
            sizes[index] += max(0, min(want - sizes[index], width - sum(sizes) - gap * len(sizes)))
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold")
    for (heading, cells), size in zip(columns, sizes, strict=True):  # rich would break words of some columns
        are_numbers = all(cell[:1] in NUMERIC or cell == NOISE for cell in cells)
        shown = heading if cell_len(heading) <= size else _in_lines(heading)
        table.add_column(shown, justify="right" if are_numbers else "left", overflow="fold", width=size)
    for index, (first, *others) in enumerate(zip(*(cells for _, cells in columns), strict=True)):
        # Text objects, because rich would interpret square brackets of plain strings as markup.
        table.add_row(Text(first, style=colours[index] if colours else ""), *map(Text, others))
    return table


def _as_lists(columns: Sequence[_Column], width: int) -> Table:
    """Each row as a list of its cells, with a blank line between rows."""
    headings, cells = zip(*columns, strict=True)
    lines = [pair for row in zip(*cells, strict=True) for pair in ((" ", ""), *zip(headings, row, strict=True))]
    return list_table(lines[1:], width)
