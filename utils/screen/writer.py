"""Writes to one terminal or file: text, layouts of rich, and a progress line that the next output replaces.

rich only computes texts here. Its buffer would keep interrupted output and print it a second time.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from io import TextIOWrapper
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import COLOR_SYSTEMS, Console, RenderableType
from rich.text import Text

UNLIMITED = 10_000  # columns of a file or a pipe
MARGIN = 1  # columns right of a progress line: after the last one some terminals begin a new line
MOST_OFTEN = 0.1  # minimum seconds between two counts of the same work
CLEAR_LINE = "\r\x1b[K"


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
        line, room = " ".join(text.split()), max(1, self._console.width - MARGIN)
        if cell_len(line) > room:
            line = set_cell_size(line, room)
        self._is_shown = True
        self._write(CLEAR_LINE + rendered(self._console, Text(line, style="dim", end="", no_wrap=True)))

    def count(self, text: str) -> None:
        """Like `show`, but skips a text that follows the one before it too soon."""
        if self._clock() >= self._next:
            self._next = self._clock() + MOST_OFTEN
            self.show(text)

    def clear(self) -> None:
        if self._is_shown:
            self._is_shown, self._next = False, 0.0
            self._write(CLEAR_LINE)

    def _write(self, text: str) -> None:
        put(self._console, text)


class Writer:
    """Writes to one stream, and adds the text to `kept`. With `wraps`, tables fit into the width of the console."""

    def __init__(self, console: Console, progress: ProgressLine, kept: deque[str], *, wraps: bool = True) -> None:
        self.console, self._progress, self._kept = console, progress, kept
        self.wraps = wraps or console.is_terminal

    @property
    def table_width(self) -> int:
        """The maximum width of a table, in columns."""
        return self.console.width if self.wraps else UNLIMITED

    def write(self, text: str, *, kept: bool = True) -> None:
        self._progress.clear()
        put(self.console, text)
        if kept:
            self._kept.append(text)

    def line(self, text: str, style: str = "") -> None:
        """A line, wrapped between words on a terminal only."""
        if self.console.is_terminal:
            # A Text object, because rich would interpret square brackets of a plain string as markup.
            self.draw(Text(text, style=style))
        else:
            self.write(text + "\n")

    def draw(self, content: RenderableType, width: int | None = None) -> None:
        """The layout of rich in at most `width` columns, without blanks at the ends of lines."""
        lines = rendered(self.console, content, width).split("\n")
        self.write("\n".join(line.rstrip(" ") for line in lines))

    def crash(self) -> None:
        """The traceback of the exception that is being handled."""
        self._progress.clear()
        self.console.print_exception()

    def clear(self) -> None:
        self._progress.clear()
        self.console.clear()


def rendered(console: Console, content: RenderableType, width: int | None = None) -> str:
    """The text of a layout of rich, with the escape sequences that the console allows."""
    options = console.options if width is None else console.options.update(width=width)
    name = None if console.no_color else console.color_system
    colours = None if name is None else COLOR_SYSTEMS[name]
    return "".join(
        segment.text if segment.style is None else segment.style.render(segment.text, color_system=colours)
        for segment in console.render(content, options)
    )


def open_console(stream: TextIO, *, plain: bool) -> Console:
    """A console on a stream. It has colours on a terminal with colours, without NO_COLOR and `plain`."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")  # the terminal may lack a character that the model generates
    # rich detects the terminal and NO_COLOR in its constructor; the decision then holds for termcolor, too.
    probe = Console(file=stream)
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


def has_width() -> bool:
    """Whether the user has set a width for output that is not a terminal."""
    return os.environ.get("COLUMNS", "").isdigit()
