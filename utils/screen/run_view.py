"""Shows one run as it progresses, the comparison of finished runs, and the findings of a report."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

from utils.comparison.arms import Arm
from utils.comparison.reports import Finding, Report
from utils.comparison.run_texts import (
    MarkedStream,
    divergence_sentence,
    relation,
    start_of_context,
    start_of_difference,
)
from utils.comparison.runs import Run
from utils.comparison.session_state import LastPrompt, own_conversations
from utils.comparison.summary import PromptRuns, ending, server_summary, summary
from utils.config.settings import Settings
from utils.decode.steps import Step
from utils.metrics.divergence import Cause, Divergence
from utils.metrics.draft_trace import DraftTrace
from utils.metrics.stopwatch import RoundTiming
from utils.screen.plots import text_plot
from utils.screen.renderer import Renderer
from utils.screen.tables import transposed_rows
from utils.screen.wrapped_text import Mark, MarkedPiece, WrappedText, as_marked, from_character, merged, plain_text
from utils.servers.kinds.completion import Piece
from utils.text import count_of, visible

OWN_CONVERSATION = "{}: its earlier answers differ since turn {}, so its text is not comparable"
NONE, NO_TEXT = "(no tokens)", "(no text)"
READS_THE_SAME = ", but the text reads the same"
Round = tuple[Step, RoundTiming | None, Sequence[DraftTrace]]


class RoundView:
    """Shows rounds as they come. Consecutive rounds without drafts become one line once their number is known."""

    def __init__(self, renderer: Renderer, tokenizer: Any) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self._number = 0  # the last round on the screen
        self._waiting: list[Round] = []

    @property
    def waiting(self) -> int:
        """The number of rounds that are not on the screen."""
        return len(self._waiting)

    def show(self, step: Step, timing: RoundTiming | None, traces: Sequence[DraftTrace] = ()) -> None:
        if step.drafted:
            self.end()
            self._round((step, timing, traces))
        else:
            self._waiting.append((step, timing, traces))

    def end(self) -> None:
        """Show the waiting rounds."""
        waiting, self._waiting = self._waiting, []
        if len(waiting) > 1:
            self._renderer.plain_rounds(self._number + 1, [timing for _, timing, _ in waiting])
            self._number += len(waiting)
        elif waiting:
            self._round(waiting[0])

    def _round(self, shown: Round) -> None:
        step, timing, traces = shown
        self._number += 1
        self._renderer.round(self._number, step, self._tokenizer, timing=timing, traces=traces)


class PromptView:
    """Shows the runs of one prompt: the first text in full, and the differences of the others.

    Texts of servers are shown apart from those of strategies. `tokenizer` is None without loaded models. `live` is True
    if the runs are still going on, so that progress is shown.
    """

    def __init__(self, renderer: Renderer, tokenizer: Any, settings: Settings, *, live: bool = True) -> None:
        self.renderer, self.tokenizer, self.settings = renderer, tokenizer, settings
        self.live, self.needs_legend = live, settings.debug == "full"
        self.shown: list[Run] = []  # finished runs whose texts are on the screen

    def begin(self, arm: Arm) -> "RunView":
        """The view of the next run. Its title is shown if its lines follow now."""
        view = RunView(self, arm)
        view.begin()
        return view


class RunView:
    """Shows one run: its text as it grows, or its progress and then its text. With /debug, every round comes first."""

    def __init__(self, prompt: PromptView, arm: Arm) -> None:
        self._prompt, self.arm, self._renderer = prompt, arm, prompt.renderer
        is_local = arm.strategy is not None
        self._earlier = [run for run in prompt.shown if run.is_local == is_local]
        level = prompt.settings.debug if arm.strategy is not None and arm.strategy.drafts else "off"
        self._rounds = None if level == "off" else RoundView(prompt.renderer, prompt.tokenizer)
        # With /debug full the drafts of each strategy are worth a look, even if the texts are equal.
        self._in_full = level == "full" or not self._earlier
        self._text = MarkedStream(prompt.tokenizer) if is_local else None
        self._lines = WrappedText(prompt.renderer.stream_width, prompt.renderer.cells)
        self._pieces: list[MarkedPiece] = []
        self._tokens = self._characters = 0

    @property
    def is_long(self) -> bool:
        """Whether its whole text or its rounds are shown."""
        return self._in_full or self._rounds is not None

    def begin(self) -> None:
        """Show what comes before the first step."""
        if self.is_long:
            self._renderer.title(self.arm.title, self.arm.colour)
        if self._rounds is not None and self._prompt.needs_legend:
            self._prompt.needs_legend = False
            self._renderer.legend()
        self._count("waiting for the first token ..." if self._text is None else "reading the prompt ...")

    def failed(self) -> None:
        """End the lines of a run without a result, whose title must be on the screen above its error."""
        self._renderer.end_progress()
        if not self.is_long:
            self._renderer.title(self.arm.title, self.arm.colour)
        elif self._pieces and self._rounds is None:
            self._write([])

    def reading(self, done: int, total: int) -> None:
        """Show the progress of reading a long prompt."""
        if self._prompt.live:
            self._renderer.step(f"{self.arm.name}: reading the prompt, {done:,} of {total:,} tokens")

    def step(self, step: Step, timing: RoundTiming | None, traces: Sequence[DraftTrace] = ()) -> None:
        """Show one more step of a strategy."""
        assert self._text is not None
        self._tokens += len(step.tokens)
        pieces = as_marked(self._text.add(step))
        self._pieces += pieces
        if self._rounds is not None:
            self._rounds.show(step, timing, traces)
        elif self._in_full:
            self._renderer.stream(self._lines.add(pieces))
            return
        if self._rounds is None or self._rounds.waiting:
            self._count(f"{self._tokens}/{self._prompt.settings.length} tokens ...")

    def piece(self, piece: Piece) -> None:
        """Show one more piece of a server's answer."""
        self._characters += len(piece.text)
        pieces = [(visible(piece.text), Mark.TEXT)]
        self._pieces += pieces
        if self._in_full:
            self._renderer.stream(self._lines.add(pieces))
        else:
            self._count(f"{count_of(self._characters, 'character')} ...")

    def _count(self, progress: str) -> None:
        if self._prompt.live:
            self._renderer.count(f"{self.arm.name}: {progress}")

    def end(self, run: Run) -> None:
        """Show the rest of the text, or the difference, and the figures of the finished run."""
        self._renderer.end_progress()
        rest = [] if self._text is None else as_marked(self._text.end())
        self._pieces += rest
        if self._rounds is not None:
            self._rounds.end()
        if self._in_full:
            self._end_in_full(run, self._pieces if self._rounds is not None else rest)
        else:
            self._show_difference(run)
        if self.is_long:
            self._renderer.figures(run, self._prompt.settings.length)
        self._prompt.shown.append(run)

    def _end_in_full(self, run: Run, rest: Sequence[MarkedPiece]) -> None:
        self._write(rest)
        if not plain_text(self._pieces).strip():
            tokens = run.new_tokens
            without = NO_TEXT if tokens is None else f"({count_of(tokens, 'token')} without visible text)"
            self._renderer.remark(NONE if tokens == 0 else without)
        self._explain_marks(self._pieces)

    def _show_difference(self, run: Run) -> None:
        """Show one line if the text is already on the screen, otherwise the text from the first difference on."""
        if not run.is_local:  # its pieces may contain the server's key
            self._pieces = [(visible(run.text), Mark.TEXT)]
        other, sentence = relation(run, self._earlier)
        ended, other_ended = (ending(one, self._prompt.settings.length) for one in (run, other))
        ours, theirs = plain_text(self._pieces), visible(other.text)
        if not sentence.endswith(":"):
            self._write(self._named(sentence + (f" ({ended})" if ended and ended != other_ended else "")))
        elif ours == theirs:
            self._write(self._named(sentence.removesuffix(":") + READS_THE_SAME))
        else:
            start = start_of_difference(ours, theirs)
            first = start_of_context(ours, start)
            shown = from_character(self._pieces, first)
            self._write([*self._named(f"{sentence} {'... ' if first else ''}"), *shown])
            if ended and ended != other_ended:
                self._renderer.remark(ended)
            self._explain_marks(shown)

    def _named(self, sentence: str) -> list[MarkedPiece]:
        """Write a sentence about the run, after its title if that is not on the screen yet."""
        title = [] if self.is_long else [(f"{self.arm.title} ", Mark.NAME)]
        return [*title, (sentence, Mark.NOTE)]

    def _write(self, pieces: Sequence[MarkedPiece]) -> None:
        self._renderer.stream(merged([*self._lines.add(pieces), *self._lines.end()]))
        self._renderer.newline()

    def _explain_marks(self, pieces: Sequence[MarkedPiece]) -> None:
        if any(mark is Mark.ACCEPTED for _, mark in pieces):
            self._renderer.explain_marks()


def show_prompt_runs(renderer: Renderer, last: LastPrompt, causes: Mapping[str, Divergence]) -> None:
    """Show the runs of a prompt again in the same way. `causes` explains differences between texts, by strategy."""
    renderer.prompt(last.text)
    prompt = PromptView(renderer, tokenizer_of(last), last.settings, live=False)
    for arm, run, _ in last.compared:
        view = prompt.begin(arm)
        if (generation := run.generation) is None:
            view.piece(Piece(run.text))
        else:
            # Not strict: a run without a tracer has no traces, so `repeat` fills in.
            rounds = zip(generation.steps, generation.timings, generation.traces or repeat(()), strict=False)
            for step, timing, traces in rounds:
                view.step(step, timing, traces)
        view.end(run)
    names = [run.name for _, run, _ in last.compared if run.name in causes]
    show_comparison(renderer, last, ((name, causes[name]) for name in names))


def tokenizer_of(last: LastPrompt) -> Any:
    """The tokenizer of the local runs, or None without any."""
    return last.job.pair.tokenizer if last.is_local else None


def show_comparison(renderer: Renderer, last: LastPrompt, causes: Iterable[tuple[str, Divergence]]) -> None:
    """Show the table of runs, a line for each text that differs or cannot be compared, and an explanation.

    `causes` has the names of strategies, and why their texts differ from the target's.
    """
    if last.compared:
        renderer.comparison(last.compared)
    if last.is_local:
        _explain_local_runs(renderer, last, causes)
    for sentence in server_summary(last):
        renderer.result(sentence)


def _explain_local_runs(renderer: Renderer, last: LastPrompt, causes: Iterable[tuple[str, Divergence]]) -> None:
    pair = last.job.pair
    for strategy, turn in own_conversations(last):
        renderer.result(OWN_CONVERSATION.format(strategy.name, turn))
    known: dict[str, Cause] = {}
    for name, divergence in causes:
        renderer.result(f"{name} {divergence_sentence(divergence, pair.tokenizer)}")
        known[name] = divergence.cause
    blank = [entry.run.name for entry in last.strategies if not entry.run.text.strip()]
    other = pair.engine.faster_baseline()
    runs = PromptRuns(last.strategies, list(last.jobs), blank=blank, causes=known, faster_engine=other)
    if sentence := summary(runs):
        renderer.result(sentence)


def show_report(renderer: Renderer, report: Report, findings: Sequence[Finding]) -> None:
    """Show the subject of a report, its findings as a table and plots, and its conclusion."""
    cells = [finding.cells for finding in findings if finding.cells]
    renderer.result(report.headline)
    if report.transposed:
        # One row for each heading, and one column for each finding.
        for rows in transposed_rows(report.headings, cells, renderer.width):
            renderer.rows(rows)
    else:
        renderer.table(report.headings, cells, report.optional)
    for table in report.tables(findings):
        renderer.newline()
        renderer.result(table.title)
        renderer.table(table.headings, table.rows)
        if table.note:
            renderer.remark(table.note)
            renderer.newline()
    for chart in report.charts(findings):
        renderer.data(text_plot(chart, width=renderer.width))
    for line in report.conclude(findings):
        renderer.result(line)
    if attachment := report.attachment(findings):
        renderer.data(attachment)
