"""Runner: runs every chosen strategy on a prompt, or a report, shows it as it goes and keeps its records, also when it is interrupted.

What is run, and with which settings, is decided by its caller; decoders are reached through the table of strategies alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto
from traceback import clear_frames

from utils.comparison.harness import Asked, Bench, Last, Shown, divergence_of, unlike_target
from utils.comparison.records import RecordFile, generation_records, report_record
from utils.comparison.reports import Finding, Progress, Report
from utils.comparison.strategies import Job, Strategy
from utils.decode.noise import fix_seeds
from utils.decode.steps import FinishReason
from utils.distributed import end_if_together
from utils.errors import UserError
from utils.freed_memory import give_back_memory
from utils.metrics.divergence import Divergence
from utils.metrics.draft_trace import Notebook
from utils.metrics.results import Generation, collect
from utils.metrics.stopwatch import Stopwatch
from utils.models.load_errors import is_out_of_memory
from utils.prompts.conversation import advised
from utils.screen.renderer import Renderer
from utils.screen.run_view import RunView, show_comparison, show_report

Result = tuple[Strategy, Generation]


class Verdict(Enum):
    """How a line went."""

    DONE = auto()
    FAILED = auto()
    INTERRUPTED = auto()
    QUIT = auto()


def explain_error(renderer: Renderer, error: Exception) -> None:
    """A sentence for what a user can mend, a traceback for a bug."""
    if isinstance(error, UserError):
        renderer.error(str(error))
        return
    if is_out_of_memory(error):
        renderer.error("Out of memory: try a shorter /length, a shorter prompt, or a smaller or quantized model.")
        clear_frames(error.__traceback__)  # what they hold is what is lacking
        give_back_memory()
    else:
        renderer.crash()
    end_if_together()


class Runner:
    """Runs on one bench, shows on one screen, records into one file (or none)."""

    def __init__(self, bench: Bench, renderer: Renderer, records: RecordFile | None) -> None:
        self._bench, self._renderer, self._records = bench, renderer, records

    def prompt(self, text: str, asked: Sequence[Asked]) -> Verdict:
        """Run the strategies that are asked one after the other from the same seed, and compare them."""
        results: list[Result] = []
        interrupted = self._run_all(asked, results)
        last = Last.of(text, asked, results)
        self._bench.memory.last = last
        self._compare(last, explained=not interrupted)
        if interrupted:
            return Verdict.INTERRUPTED
        return Verdict.DONE if len(results) == len(asked) else Verdict.FAILED

    def _run_all(self, asked: Sequence[Asked], results: list[Result]) -> bool:
        """Each run is added to `results`; whether Ctrl-C ended it. A run that fails says why."""
        try:
            for strategy, job in asked:
                fix_seeds(job.settings.seed)
                try:
                    run = self._shown(strategy, job, results)
                except Exception as error:
                    explain_error(self._renderer, advised(error, job.history))
                    continue
                if run.finish is FinishReason.INTERRUPTED:
                    return True
        except KeyboardInterrupt:
            return True
        return False

    def _shown(self, strategy: Strategy, job: Job, results: list[Result]) -> Generation:
        """A run that is seen as it goes, and added to the results whatever becomes of showing it."""
        settings = job.settings
        watch, notebook = (
            Stopwatch(),
            Notebook(judged=settings.verify == "rejection") if settings.debug == "full" else None,
        )
        view = RunView(self._renderer, job.pair.tokenizer, strategy, settings.debug)
        view.begin()
        steps = strategy.steps(replace(job, stopwatch=watch, notebook=notebook))
        run = collect(steps, view.show, stopwatch=watch, notebook=notebook)
        results.append((strategy, run))
        view.end(run)
        return run

    def _compare(self, last: Last, *, explained: bool) -> None:
        """The table, and a line for each text that is not the target's. Records are kept even if showing it all is interrupted."""
        causes: dict[str, Divergence] = {}
        try:
            show_comparison(self._renderer, last, self._explained(last, causes) if explained else ())
        except Exception as error:  # the runs themselves were fine
            self._renderer.note("Why the texts differ could not be found out:")
            explain_error(self._renderer, error)
        finally:
            self._keep(Shown(generation_records(last, causes), causes=causes))

    def _explained(self, last: Last, causes: dict[str, Divergence]) -> Iterator[tuple[Strategy, Divergence]]:
        for strategy, run in unlike_target(last):
            causes[strategy.name] = divergence_of(last, strategy, run, self._bench.memory.rounding)
            yield strategy, causes[strategy.name]

    def _keep(self, shown: Shown) -> None:
        self._bench.memory.shown = shown
        if self._records is not None:
            self._records.append(shown.records)

    def report(self, report: Report) -> Verdict:
        """Run a report to its end or to Ctrl-C; what it found until then is shown and recorded."""
        findings: list[Finding] = []
        finished = False
        try:
            for event in report.events:
                self._take(event, findings)
            finished = True
        except KeyboardInterrupt:
            findings += _what_was_done(report.events)
            self._renderer.note(
                "Interrupted; what was finished:" if findings else "Interrupted before anything was finished."
            )
        finally:
            if findings:
                self._conclude(report, findings, finished=finished)
        return Verdict.DONE if finished else Verdict.INTERRUPTED

    def _take(self, event: Progress | Finding, findings: list[Finding]) -> None:
        if isinstance(event, Finding):
            findings.append(event)
        else:
            self._renderer.note(event.text)

    def _conclude(self, report: Report, findings: list[Finding], *, finished: bool) -> None:
        report = report.concluded(findings)
        record = report_record(report, findings, self._bench.pair, finished=finished)
        self._keep(Shown([record], report, findings))
        show_report(self._renderer, report, findings)


def _what_was_done(events: Iterator[Progress | Finding]) -> Iterator[Finding]:
    """What a report has to say when Ctrl-C comes between two of its events, or has come within one."""
    try:
        event: Progress | Finding = events.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
        while True:
            if isinstance(event, Finding):
                yield event
            event = next(events)
    except (KeyboardInterrupt, StopIteration, AttributeError):  # no generator has anything to say
        return
