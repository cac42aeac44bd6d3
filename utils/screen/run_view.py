"""Shows one run as it progresses, the comparison of finished runs, and the findings of a report."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

from utils.comparison.last_prompt import LastPrompt, own_conversations
from utils.comparison.reports import Finding, Report
from utils.comparison.strategies import Strategy
from utils.decode.steps import Step
from utils.metrics.divergence import Divergence
from utils.metrics.draft_trace import DraftTrace
from utils.metrics.results import Generation
from utils.metrics.stopwatch import RoundTiming
from utils.screen.plots import text_plot
from utils.screen.renderer import Renderer
from utils.screen.report_tables import transposed_rows
from utils.text import TextStream, WrappedText

OWN_CONVERSATION = "{}: its conversation differs since turn {}, so its text is not compared"


class RunView:
    """Shows the text of a run as it grows, or with /debug every round and then the text.

    level: the value of /debug. length: the maximum number of new tokens.
    """

    def __init__(self, renderer: Renderer, tokenizer: Any, strategy: Strategy, *, level: str, length: int) -> None:
        self._renderer, self._tokenizer, self._strategy = renderer, tokenizer, strategy
        self._level = level if strategy.drafts else "off"
        self._length = length
        # Tokens become text first, and text is wrapped afterwards: a character may need several tokens, a line several
        # words.
        self._text, self._lines = TextStream(tokenizer), WrappedText(renderer.stream_width, renderer.cells)
        self._count = 0
        self._pending = ""

    def begin(self) -> None:
        """Show the title of the run."""
        self._renderer.title(self._strategy.title, self._strategy.colour)
        if self._level == "full":
            self._renderer.legend()

    def show(self, step: Step, timing: RoundTiming | None, traces: Sequence[DraftTrace] = ()) -> None:
        """Show one more step."""
        self._count += 1
        text = self._text.add(step.tokens)
        if self._level != "off":
            self._renderer.round(self._count, step, self._tokenizer, timing=timing, traces=traces)
            self._pending += text  # shown in one piece below the rounds
        else:
            self._renderer.stream(self._lines.add(text), self._strategy.colour)

    def end(self, run: Generation) -> None:
        """Show the rest of the text and the figures of the finished run."""
        rest = self._lines.add(self._pending + self._text.end()) + self._lines.end()
        self._renderer.stream(rest, self._strategy.colour)
        self._renderer.newline()
        self._renderer.figures(run, self._length, forwards=self._strategy.uses_target)


def show_prompt_runs(renderer: Renderer, last: LastPrompt, causes: Mapping[str, Divergence]) -> None:
    """Show the runs of a prompt again, round by round. causes: why texts differ, by the name of the strategy."""
    renderer.prompt(last.text)
    for strategy, run, _ in last.compared:
        level = "full" if run.traces else "on"
        view = RunView(renderer, last.job.pair.tokenizer, strategy, level=level, length=last.job.settings.length)
        view.begin()
        # Not strict: a run without a tracer has no traces, so `repeat` fills in.
        for step, timing, traces in zip(run.steps, run.timings, run.traces or repeat(()), strict=False):
            view.show(step, timing, traces)
        view.end(run)
    divergences = [(strategy, causes[strategy.name]) for strategy, _, _ in last.compared if strategy.name in causes]
    show_comparison(renderer, last, divergences)


def show_comparison(renderer: Renderer, last: LastPrompt, causes: Iterable[tuple[Strategy, Divergence]]) -> None:
    """Show the table of runs, and a line for each text that differs or that cannot be compared."""
    if last.compared:
        renderer.comparison(last.compared)
    for strategy, turn in own_conversations(last):
        renderer.result(OWN_CONVERSATION.format(strategy.name, turn))
    for strategy, divergence in causes:
        renderer.divergence(strategy, divergence, last.job.pair.tokenizer, rule=last.job.settings.verify)


def show_report(renderer: Renderer, report: Report, findings: Sequence[Finding]) -> None:
    """Show what a report is about, its findings as a table and plots, and its conclusion."""
    cells = [finding.cells for finding in findings]
    renderer.result(report.headline)
    if report.transposed:
        # One row per heading, and one column per finding.
        for rows in transposed_rows(report.headings, cells, renderer.width):
            renderer.rows(rows)
    else:
        renderer.table(report.headings, cells, report.optional)
    for chart in report.charts(findings):
        renderer.data(text_plot(chart, width=renderer.width))
    for line in report.conclude(findings):
        renderer.result(line)
    if attachment := report.attachment(findings):
        renderer.data(attachment)
