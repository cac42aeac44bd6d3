"""Shows one run as it progresses, the comparison of finished runs, and the findings of a report."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

from utils.comparison.last_prompt import LastPrompt, own_conversations
from utils.comparison.marked_text import MarkedStream
from utils.comparison.reports import Finding, Report
from utils.comparison.server_runs import ServerPrompt
from utils.comparison.server_summary import server_summary
from utils.comparison.strategies import Strategy
from utils.comparison.summary import PromptRuns, ending, summary
from utils.comparison.text_relation import EarlierRun, relation, start_of_context, start_of_difference
from utils.config.settings import Settings
from utils.decode.steps import Step
from utils.metrics.divergence import Cause, Divergence
from utils.metrics.draft_trace import DraftTrace
from utils.metrics.results import Generation
from utils.metrics.stopwatch import RoundTiming
from utils.screen.divergence_words import divergence_sentence
from utils.screen.marked_text import Mark, MarkedPiece, WrappedText, as_marked, from_character, merged, plain_text
from utils.screen.plots import text_plot
from utils.screen.renderer import Renderer
from utils.screen.report_tables import transposed_rows
from utils.screen.round_view import RoundView
from utils.screen.server_view import show_server_runs
from utils.text import count_of, decode, visible

OWN_CONVERSATION = "{}: its earlier answers differ since turn {}, so its text is not comparable"
NONE = "(no tokens)"
READS_THE_SAME = ", but the text reads the same"


class PromptView:
    """Shows the runs of one prompt: the first text in full, and the differences of the others.

    `live` is True if the runs are still going on, so that progress is shown.
    """

    def __init__(self, renderer: Renderer, tokenizer: Any, settings: Settings, *, live: bool = True) -> None:
        self.renderer, self.tokenizer, self.settings = renderer, tokenizer, settings
        self.live, self.needs_legend = live, settings.debug == "full"
        self.shown: list[EarlierRun] = []  # finished runs whose texts are on the screen

    def begin(self, strategy: Strategy) -> "RunView":
        """The view of the next run. Its title is shown if its lines follow now."""
        view = RunView(self, strategy)
        if view.is_long:
            self.renderer.title(strategy.title, strategy.colour)
        view.begin()
        return view

    def failed(self, strategy: Strategy) -> None:
        """Show the title of a run without a result above its error, unless it is on the screen."""
        self.renderer.end_progress()
        if not RunView(self, strategy).is_long:
            self.renderer.title(strategy.title, strategy.colour)


class RunView:
    """Shows one run: its text as it grows, or its progress and then its text. With /debug, every round comes first."""

    def __init__(self, prompt: PromptView, strategy: Strategy) -> None:
        self._prompt, self.strategy, self._renderer = prompt, strategy, prompt.renderer
        level = prompt.settings.debug if strategy.drafts else "off"
        self._rounds = None if level == "off" else RoundView(prompt.renderer, prompt.tokenizer)
        # With /debug full the drafts of each strategy are worth a look, even if the texts are equal.
        self._in_full = level == "full" or not prompt.shown
        self._text = MarkedStream(prompt.tokenizer)
        self._lines = WrappedText(prompt.renderer.stream_width, prompt.renderer.cells)
        self._pieces: list[MarkedPiece] = []
        self._tokens = 0

    @property
    def is_long(self) -> bool:
        """Whether its whole text or its rounds are shown."""
        return self._in_full or self._rounds is not None

    def begin(self) -> None:
        """Show what comes before the first step."""
        if self._rounds is not None and self._prompt.needs_legend:
            self._prompt.needs_legend = False
            self._renderer.legend()
        self._count("reading the prompt ...")

    def reading(self, done: int, total: int) -> None:
        """Show the progress of reading a long prompt."""
        if self._prompt.live:
            self._renderer.step(f"{self.strategy.name}: reading the prompt, {done:,} of {total:,} tokens")

    def show(self, step: Step, timing: RoundTiming | None, traces: Sequence[DraftTrace] = ()) -> None:
        """Show one more step."""
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

    def _count(self, progress: str) -> None:
        if self._prompt.live:
            self._renderer.count(f"{self.strategy.name}: {progress}")

    def end(self, run: Generation) -> None:
        """Show the rest of the text, or the difference, and the figures of the finished run."""
        self._renderer.end_progress()
        rest = as_marked(self._text.end())
        self._pieces += rest
        if self._rounds is not None:
            self._rounds.end()
        if self._in_full:
            self._end_in_full(run, self._pieces if self._rounds is not None else rest)
        else:
            self._show_difference(run)
        if self.is_long:
            self._renderer.figures(run, self._prompt.settings.length)
        self._prompt.shown.append((self.strategy, run))

    def _end_in_full(self, run: Generation, rest: Sequence[MarkedPiece]) -> None:
        self._write(rest)
        if not plain_text(self._pieces).strip():
            self._renderer.remark(
                f"({count_of(len(run.tokens), 'token')} without visible text)" if run.tokens else NONE
            )
        self._explain_marks(self._pieces)

    def _show_difference(self, run: Generation) -> None:
        """Show one line if the text is already on the screen, otherwise the text from the first difference on."""
        found = relation(run, self._prompt.shown)
        sentence, (_, other) = found.sentence(), found.other
        ended, other_ended = (ending(one, self._prompt.settings.length) for one in (run, other))
        ours, theirs = plain_text(self._pieces), visible(decode(self._prompt.tokenizer, other.tokens))
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
        title = [] if self.is_long else [(f"{self.strategy.title} ", Mark.NAME)]
        return [*title, (sentence, Mark.NOTE)]

    def _write(self, pieces: Sequence[MarkedPiece]) -> None:
        self._renderer.stream(merged([*self._lines.add(pieces), *self._lines.end()]))
        self._renderer.newline()

    def _explain_marks(self, pieces: Sequence[MarkedPiece]) -> None:
        if any(mark is Mark.ACCEPTED for _, mark in pieces):
            self._renderer.explain_marks()


def show_prompt_runs(
    renderer: Renderer, last: LastPrompt | None, causes: Mapping[str, Divergence], servers: ServerPrompt | None = None
) -> None:
    """Show the runs of a prompt again in the same way. `causes` explains differences between texts, by strategy."""
    renderer.prompt(last.text if last is not None else servers.text if servers is not None else "")
    if last is not None:
        _show_local_runs(renderer, last)
    if servers is not None:
        show_server_runs(renderer, servers)
    compared = () if last is None else last.compared
    divergences = [(strategy, causes[strategy.name]) for strategy, _, _ in compared if strategy.name in causes]
    show_comparison(renderer, last, divergences, servers)


def _show_local_runs(renderer: Renderer, last: LastPrompt) -> None:
    prompt = PromptView(renderer, last.job.pair.tokenizer, last.job.settings, live=False)
    for strategy, run, _ in last.compared:
        view = prompt.begin(strategy)
        # Not strict: a run without a tracer has no traces, so `repeat` fills in.
        for step, timing, traces in zip(run.steps, run.timings, run.traces or repeat(()), strict=False):
            view.show(step, timing, traces)
        view.end(run)


def show_comparison(
    renderer: Renderer,
    last: LastPrompt | None,
    causes: Iterable[tuple[Strategy, Divergence]],
    servers: ServerPrompt | None = None,
) -> None:
    """Show the table of runs, a line for each text that differs or cannot be compared, and an explanation.

    `last` has the local runs, `servers` those of servers; None means no runs.
    """
    compared = () if last is None else last.compared
    asked = () if servers is None else servers.compared
    if compared or asked:
        renderer.comparison(compared, asked)
    if last is not None:
        _explain_local_runs(renderer, last, causes)
    if servers is not None:
        for sentence in server_summary(servers):
            renderer.result(sentence)


def _explain_local_runs(renderer: Renderer, last: LastPrompt, causes: Iterable[tuple[Strategy, Divergence]]) -> None:
    tokenizer = last.job.pair.tokenizer
    own = own_conversations(last)
    for strategy, turn in own:
        renderer.result(OWN_CONVERSATION.format(strategy.name, turn))
    known: dict[str, Cause] = {}
    for strategy, divergence in causes:
        renderer.result(divergence_sentence(strategy.name, divergence, tokenizer))
        known[strategy.name] = divergence.cause
    blank = [entry.strategy.name for entry in last.compared if not decode(tokenizer, entry.run.tokens).strip()]
    other = last.job.pair.engine.faster_baseline()
    runs = PromptRuns(last.compared, list(last.jobs), blank=blank, causes=known, faster_engine=other)
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
