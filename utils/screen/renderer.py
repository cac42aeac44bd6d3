"""The only module that writes to the terminal: titles, streamed text, rounds, tables, replies and errors.

rich lays out tables, termcolor colours streamed text; `_console` decides for both whether a stream has colours. Text of
models and users is shown literally: without markup and control characters.
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

from utils.comparison.last_prompt import ComparedRun
from utils.comparison.reports import Column
from utils.comparison.strategies import Strategy
from utils.comparison.summary import ending
from utils.decode.steps import Step
from utils.metrics.divergence import Candidate, Cause, Divergence
from utils.metrics.draft_trace import DraftTrace
from utils.metrics.results import Generation
from utils.metrics.stopwatch import RoundTiming
from utils.screen.debug_rounds import Piece, legend, round_pieces, round_timing, trace_lines
from utils.screen.report_tables import report_table
from utils.screen.tables import comparison_table, list_table, side_by_side
from utils.text import token_piece, visible

IN_ASCII = str.maketrans("·─│┌┐└┘├┤┬┴┼", "-" + "-" + "|" + "+" * 9)

CAUSES = {
    Cause.SAMPLING: "sampling: expected under /verify {rule}; with /verify coupled the texts are the same",
    Cause.ROUNDING: "rounding tie: a different verify width moves logits by up to {drift:.2g} here",
    Cause.UNEXPLAINED: "unexplained: please report it with the output of /divergence",
}


class Renderer:
    """Writes results to `out` and messages to `messages`. colour: whether results may contain escape sequences."""

    def __init__(self, out: Console, messages: Console, *, colour: bool) -> None:
        self._out, self._messages, self.colour = out, messages, colour

    @property
    def width(self) -> int:
        """Width of the results in columns."""
        return self._out.width

    @property
    def stream_width(self) -> int | None:
        """Width of streamed text in columns; None if its lines must not be broken."""
        return self._out.width if self._out.is_terminal else None

    @staticmethod
    def cells(text: str) -> int:
        """Width of a text in columns."""
        return cell_len(text)

    def title(self, title: str, colour: str) -> None:
        self._out.print(Rule(Text(title), style=colour, align="left", characters="-" if self._is_ascii else "─"))

    def prompt(self, text: str) -> None:
        """The prompt of the following answers, for a screen on which it was not typed."""
        self._line(self._out, "> " + text, "bold")

    def stream(self, text: str, colour: str) -> None:
        """A piece of growing text, written immediately."""
        self._write(self._paint(visible(text), colour))

    def legend(self) -> None:
        """The meaning of the signs in rounds."""
        self._line(self._out, legend(ascii_only=self._is_ascii), "dim")

    def round(
        self,
        number: int,
        step: Step,
        tokenizer: Any,
        *,
        timing: RoundTiming | None = None,
        traces: Sequence[DraftTrace] = (),
    ) -> None:
        """A line with drafts, the target's token and the timing; with traces, lines that explain the drafts."""
        pieces = round_pieces(step, tokenizer, traces, ascii_only=self._is_ascii)
        times = round_timing(step, timing)
        self._pieces(f"{number:4d} ", [*pieces, (times, "dark_grey")] if times else pieces)
        for line in trace_lines(traces, tokenizer):
            self._pieces("     ", [(word, "dark_grey") for word in line.split(" ")])

    def _pieces(self, start: str, pieces: Iterable[Piece]) -> None:
        """Coloured pieces in as many lines as the terminal needs. Pieces are not broken."""
        room, used = self.stream_width, cell_len(start)
        text = start
        for piece, colour in pieces:
            size = 1 + cell_len(piece)
            # A piece that is longer than a whole line is written all the same; hence the test that the line is not
            # empty.
            if room is not None and used > len(start) and used + size > room:
                text, used = text + "\n" + " " * len(start), len(start)
            text, used = text + " " + self._paint(piece, colour), used + size
        self._write(text + "\n")

    @property
    def _is_ascii(self) -> bool:
        return self._out.encoding == "ascii"

    def figures(self, run: Generation, length: int, *, forwards: bool = True) -> None:
        """The line of figures below the text of a strategy. length: the maximum number of new tokens."""
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
        if words := ending(run, length):
            parts.append(words)
        self._line(self._out, " · ".join(parts), "dim")

    def comparison(self, compared: Sequence[ComparedRun]) -> None:
        """The table below all texts: one row per strategy."""
        self._out.print()
        self._out.print(comparison_table(compared, self._out.width))

    def divergence(self, strategy: Strategy, divergence: Divergence, tokenizer: Any, *, rule: str) -> None:
        """One line that explains why a text differs from the target's."""
        candidates = (divergence.ours, divergence.theirs, *divergence.highest)
        ours, theirs, *highest = (candidate_piece(tokenizer, candidate) for candidate in candidates)
        cause = CAUSES[divergence.cause].format(rule=rule, drift=divergence.rounding or 0)
        self.result(
            f"{strategy.name} differs at token {divergence.position + 1}: {ours}, target-only {theirs} "
            f"(the target's top two: {', '.join(highest)}, {divergence.gap:.2g} apart in raw logits) · {cause}"
        )

    def table(self, headings: Sequence[str], rows: Iterable[tuple[str, ...]], optional: Sequence[str] = ()) -> None:
        """Rows under headings. optional: the headings of columns that a narrow screen lacks, the first ones first."""
        self._out.print(report_table(headings, list(rows), self._out.width, optional))

    def result(self, text: str) -> None:
        """A sentence among the results."""
        self._line(self._out, text)

    def data(self, text: str) -> None:
        """Lines to copy, or of a plot. They are never broken."""
        self._write(self._drawable(visible(text)) + "\n")

    def reply(self, text: str) -> None:
        self._line(self._messages, text)

    def note(self, text: str) -> None:
        self._line(self._messages, text, "dim")

    def error(self, text: str) -> None:
        self._line(self._messages, text, "red")

    def crash(self) -> None:
        """The traceback of a bug."""
        self._messages.print_exception()

    def rows(self, rows: Iterable[tuple[str, ...]]) -> None:
        """Rows without headings; the first column is bold."""
        self._out.print(list_table(list(rows), self._out.width))

    def columns(self, columns: Sequence[Column]) -> None:
        """Texts side by side."""
        for table in side_by_side(columns, self._out.width, ">>" if self._is_ascii else "»"):
            self._out.print(table)

    def newline(self) -> None:
        self._write("\n")

    def clear(self) -> None:
        self._out.clear()

    def _line(self, console: Console, text: str, style: str = "") -> None:
        """One line, wrapped between words on a terminal only."""
        # A Text object, because rich would interpret square brackets of a plain string as markup.
        console.print(Text(self._drawable(visible(text)), style=style), soft_wrap=not console.is_terminal)

    def _drawable(self, text: str) -> str:
        """Frames and dots replaced by ASCII characters if the screen has no others."""
        return text.translate(IN_ASCII) if self._is_ascii else text

    def _paint(self, text: str, colour: str) -> str:
        # Both flags, because termcolor would otherwise decide by environment variables, differently from rich.
        return colored(text, colour, no_color=not self.colour, force_color=self.colour)

    def _write(self, text: str) -> None:
        # Not through rich, which would wrap the text and break the escape sequences of termcolor.
        self._out.file.write(text)
        self._out.file.flush()


def candidate_piece(tokenizer: Any, candidate: Candidate | None) -> str:
    """A token as a readable piece with its probability; None is the end of a text."""
    return (
        "(the end)" if candidate is None else f"{token_piece(tokenizer, candidate.token)} {candidate.probability:.3g}"
    )


def make_renderer(*, interactive: bool, plain: bool = False, silent: bool = False) -> Renderer:
    """The screen: results go to standard output; messages too if interactive, otherwise to standard error.

    A stream has colours if rich detects a terminal with colours, NO_COLOR is not set and `plain` is False. `silent`
    discards everything, for processes other than rank zero.
    """
    if silent:
        nowhere = _console(open(os.devnull, "w", encoding="utf-8"), plain)  # noqa: SIM115 (open until the process ends)
        return Renderer(nowhere, nowhere, colour=False)
    out = _console(sys.stdout, plain)
    return Renderer(out, out if interactive else _console(sys.stderr, plain), colour=not out.no_color)


def _console(stream: TextIO, plain: bool) -> Console:
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")  # the terminal may lack a character that the model generates
    # rich detects the terminal and NO_COLOR in its constructor; the decision then holds for both libraries.
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
