"""The one place that writes to a screen: titles, streamed text, step traces, figures, tables, replies, errors.

rich lays out; termcolor paints what is streamed. For each stream both follow one decision about colour, made in `_console`. Everything that
comes from a model or a user is shown as text: no markup, no control characters.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from termcolor import colored

from utils.comparison.harness import Compared
from utils.comparison.reports import Column
from utils.comparison.strategies import Strategy
from utils.decode.steps import Step
from utils.metrics.divergence import Candidate, Cause, Divergence
from utils.metrics.draft_trace import DraftNote
from utils.metrics.results import Generation
from utils.metrics.stopwatch import Lap
from utils.screen.debug_rounds import Piece, explained, legend, pieces_of, spent
from utils.screen.tables import comparison_table, list_of, table_of, texts_beside
from utils.text import token_piece, visible

IN_ASCII = str.maketrans("·─│┌┐└┘├┤┬┴┼", "-" + "-" + "|" + "+" * 9)


class Renderer:
    """Writes results to `out` and messages to `messages`; `colour` says whether results may carry escapes."""

    def __init__(self, out: Console, messages: Console, *, colour: bool) -> None:
        self._out, self._messages, self.colour = out, messages, colour

    @property
    def width(self) -> int:
        """Columns of the screen that results go to."""
        return self._out.width

    @property
    def stream_width(self) -> int | None:
        """Columns for text that is streamed; None where lines are not to be broken."""
        return self._out.width if self._out.is_terminal else None

    @staticmethod
    def cells(text: str) -> int:
        """How many columns a text takes."""
        return cell_len(text)

    def title(self, title: str, colour: str) -> None:
        self._out.print(Rule(Text(title), style=colour, align="left", characters="-" if self._is_ascii else "─"))

    def prompt(self, text: str) -> None:
        """Which prompt the following answers, where nobody typed it on this screen."""
        self._line(self._out, "> " + text, "bold")

    def stream(self, text: str, colour: str) -> None:
        """A piece of growing text, written at once."""
        self._write(self._paint(visible(text), colour))

    def legend(self) -> None:
        """What the signs of rounds mean."""
        self._line(self._out, legend(ascii_only=self._is_ascii), "dim")

    def round(
        self, number: int, step: Step, tokenizer: Any, *, lap: Lap | None = None, notes: Sequence[DraftNote] = ()
    ) -> None:
        """A line of drafts, the target's token and where the time went; with notes, why a draft fell and where hits came from."""
        pieces = pieces_of(step, tokenizer, notes, ascii_only=self._is_ascii)
        self._pieces(f"{number:4d} ", [*pieces, (time, "dark_grey")] if (time := spent(step, lap)) else pieces)
        for line in explained(notes, tokenizer):
            self._pieces("     ", [(word, "dark_grey") for word in line.split(" ")])

    def _pieces(self, start: str, pieces: Iterable[Piece]) -> None:
        """Painted pieces, each whole, in as many lines as it takes on a terminal."""
        room, used = self.stream_width, cell_len(start)
        text = start
        for piece, colour in pieces:
            size = 1 + cell_len(piece)
            if room is not None and used > len(start) and used + size > room:
                text, used = text + "\n" + " " * len(start), len(start)
            text, used = text + " " + self._paint(piece, colour), used + size
        self._write(text + "\n")

    @property
    def _is_ascii(self) -> bool:
        return self._out.encoding == "ascii"

    def figures(self, run: Generation, *, forwards: bool = True) -> None:
        """The line of figures under a strategy's text."""
        parts = []
        if run.drafted:
            parts.append(f"acceptance {run.accepted}/{run.drafted} = {run.acceptance_rate:.3f}")
        if forwards and run.tokens_per_target_forward is not None:
            parts.append(f"{run.tokens_per_target_forward:.2f} tokens per target forward")
        speed = run.tokens_per_second
        parts += [
            f"{len(run.tokens)} tokens",
            f"{run.seconds:.2f} s",
            "- tokens/s" if speed is None else f"{speed:.1f} tokens/s",
        ]
        self._line(self._out, " · ".join(parts) + f" · {run.finish}", "dim")

    def comparison(self, compared: Sequence[Compared]) -> None:
        """The table at the end: one row per strategy."""
        self._out.print()
        self._out.print(comparison_table(compared, self._out.width))

    def divergence(self, strategy: Strategy, found: Divergence, tokenizer: Any, *, rule: str) -> None:
        """One line on why a text is not the target's."""
        said, target, *highest = (
            candidate_piece(tokenizer, candidate) for candidate in (found.ours, found.theirs, *found.highest)
        )
        why = {
            Cause.SAMPLING: f"sampling: expected under /verify {rule}; /verify coupled makes it the same text",
            Cause.ROUNDING: f"rounding tie: windows of another width move logits by up to {found.rounding or 0:.2g} here",
            Cause.UNEXPLAINED: "unexplained: please report, with what /divergence shows",
        }[found.cause]
        self.result(
            f"{strategy.name} differs at token {found.position + 1}: {said}, target-only {target} "
            f"(the target's highest two: {', '.join(highest)}, {found.gap:.2g} apart in raw logits) · {why}"
        )

    def table(self, headings: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
        """Rows of text under headings."""
        self._out.print(table_of(headings, list(rows), self._out.width))

    def result(self, text: str) -> None:
        """A sentence among the results."""
        self._line(self._out, text)

    def data(self, text: str) -> None:
        """Lines that are to be copied, or drawn: never broken."""
        self._write(self._drawable(visible(text)) + "\n")

    def reply(self, text: str) -> None:
        self._line(self._messages, text)

    def note(self, text: str) -> None:
        self._line(self._messages, text, "dim")

    def error(self, text: str) -> None:
        self._line(self._messages, text, "red")

    def crash(self) -> None:
        """A traceback: for bugs only."""
        self._messages.print_exception()

    def rows(self, rows: Iterable[tuple[str, ...]]) -> None:
        """Lines in columns, the first one bold."""
        self._out.print(list_of(list(rows), self._out.width))

    def columns(self, columns: Sequence[Column]) -> None:
        """Texts beside each other."""
        for table in texts_beside(columns, self._out.width, ">>" if self._is_ascii else "»"):
            self._out.print(table)

    def newline(self) -> None:
        self._write("\n")

    def clear(self) -> None:
        self._out.clear()

    def _line(self, console: Console, text: str, style: str = "") -> None:
        """A line of its own: wrapped between words on a terminal, left whole in a file or a pipe."""
        console.print(Text(self._drawable(visible(text)), style=style), soft_wrap=not console.is_terminal)

    def _drawable(self, text: str) -> str:
        """With frames and dots of our own that the screen has."""
        return text.translate(IN_ASCII) if self._is_ascii else text

    def _paint(self, text: str, colour: str) -> str:
        return colored(text, colour, no_color=not self.colour, force_color=self.colour)

    def _write(self, text: str) -> None:
        # Not through rich: it would wrap the stream and corrupt termcolor's escapes.
        self._out.file.write(text)
        self._out.file.flush()


def candidate_piece(tokenizer: Any, candidate: Candidate | None) -> str:
    """A token as a readable piece with its probability; where a text had ended, that."""
    return (
        "(the end)" if candidate is None else f"{token_piece(tokenizer, candidate.token)} {candidate.probability:.3g}"
    )


def make_renderer(*, interactive: bool, plain: bool = False, silent: bool = False) -> Renderer:
    """The screen: results on standard output; messages there too when interactive, otherwise on standard error.

    Each is coloured where rich finds a terminal that has colours, NO_COLOR is not set and `plain` is not asked for. silent: for
    a process beside the one that speaks.
    """
    if silent:
        nowhere = _console(open(os.devnull, "w", encoding="utf-8"), plain)  # noqa: SIM115 (for as long as the process lives)
        return Renderer(nowhere, nowhere, colour=False)
    out = _console(sys.stdout, plain)
    return Renderer(out, out if interactive else _console(sys.stderr, plain), colour=not out.no_color)


def _console(stream: TextIO, plain: bool) -> Console:
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")  # a terminal may lack a character that a model writes
    probe = Console(file=stream)
    colour = probe.color_system is not None and not probe.no_color and not plain
    return Console(
        file=stream,
        no_color=not colour,
        force_terminal=True if colour else None,
        color_system="auto" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
