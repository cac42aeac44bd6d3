"""What the screen shows of one run as its steps pass, and of a finished prompt or report once more."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

from utils.comparison.harness import Last, own_conversations
from utils.comparison.reports import Finding, Report
from utils.comparison.strategies import Strategy
from utils.decode.steps import Step
from utils.metrics.divergence import Divergence
from utils.metrics.draft_trace import DraftNote
from utils.metrics.results import Generation
from utils.metrics.stopwatch import Lap
from utils.screen.plots import line_plot
from utils.screen.renderer import Renderer
from utils.text import TextStream, WrappedText


class RunView:
    """Its text as it grows; or every round, and then its text. level: of /debug."""

    def __init__(self, renderer: Renderer, tokenizer: Any, strategy: Strategy, level: str) -> None:
        self._renderer, self._tokenizer, self._strategy = renderer, tokenizer, strategy
        self._level = level if strategy.drafts else "off"
        self._text, self._lines = TextStream(tokenizer), WrappedText(renderer.stream_width, renderer.cells)
        self._count = 0
        self._held = ""

    def begin(self) -> None:
        """Say what is run."""
        self._renderer.title(self._strategy.title, self._strategy.colour)
        if self._level == "full":
            self._renderer.legend()

    def show(self, step: Step, lap: Lap | None, notes: Sequence[DraftNote] = ()) -> None:
        """Show one more step."""
        self._count += 1
        text = self._text.add(step.tokens)
        if self._level != "off":
            self._renderer.round(self._count, step, self._tokenizer, lap=lap, notes=notes)
            self._held += text
        else:
            self._renderer.stream(self._lines.add(text), self._strategy.colour)

    def end(self, run: Generation) -> None:
        """The run is over: show what was held back, and what it came to."""
        rest = self._lines.add(self._held + self._text.end()) + self._lines.end()
        self._renderer.stream(rest, self._strategy.colour)
        self._renderer.newline()
        self._renderer.figures(run, forwards=self._strategy.uses_target)


def show_again(renderer: Renderer, last: Last, causes: Mapping[str, Divergence]) -> None:
    """A prompt's runs once more, round by round, with such notes as were taken. causes: why texts differ, by the strategy's name."""
    renderer.prompt(last.text)
    for strategy, run, _ in last.compared:
        view = RunView(renderer, last.job.pair.tokenizer, strategy, "full" if run.notes else "on")
        view.begin()
        for step, lap, notes in zip(run.steps, run.laps, run.notes or repeat(()), strict=False):
            view.show(step, lap, notes)
        view.end(run)
    show_comparison(
        renderer,
        last,
        [(strategy, causes[strategy.name]) for strategy, _, _ in last.compared if strategy.name in causes],
    )


def show_comparison(renderer: Renderer, last: Last, causes: Iterable[tuple[Strategy, Divergence]]) -> None:
    """The table of a prompt's runs, and a line for each text that is another, or an answer to something else."""
    if last.compared:
        renderer.comparison(last.compared)
    for strategy, turn in own_conversations(last):
        renderer.result(f"{strategy.name}: its conversation is its own since turn {turn}; its text is not compared")
    for strategy, divergence in causes:
        renderer.divergence(strategy, divergence, last.job.pair.tokenizer, rule=last.job.settings.verify)


def show_report(renderer: Renderer, report: Report, findings: Sequence[Finding]) -> None:
    """What a report found, as a table and a plot, and what follows from it."""
    cells = [finding.cells for finding in findings]
    if report.upright:
        renderer.rows(zip(report.headings, *cells, strict=True))
    else:
        renderer.table(report.headings, cells)
    if chart := report.chart(findings):
        renderer.data(line_plot(chart, width=renderer.width))
    for line in report.conclude(findings):
        renderer.result(line)
    if attachment := report.attachment(findings):
        renderer.data(attachment)
