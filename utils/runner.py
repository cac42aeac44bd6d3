"""Runner: runs every chosen strategy on a prompt, or a report, shows it as it goes and keeps its records, also when it is interrupted.

What is run, and with which settings, is decided by its caller; decoders are reached through the table of strategies alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from traceback import clear_frames

from utils.bench import Asked, Bench, Last, divergence_of, own_conversations, unlike_target
from utils.conversation import advised
from utils.divergence import Divergence
from utils.errors import UserError
from utils.events import FinishReason
from utils.freed_memory import give_back_memory
from utils.laps import Stopwatch
from utils.models.failures import is_out_of_memory
from utils.notes import Notebook
from utils.printing import Renderer
from utils.processes import end_if_together
from utils.records import RecordFile, generation_records, report_record
from utils.reports import Finding, Progress, Report
from utils.results import Generation, collect
from utils.run_view import RunView, show_report
from utils.seeding import fix_seeds
from utils.strategies import Job, Strategy

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
        self._bench.memory.last, self._bench.memory.found = last, None
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
                    run = self._shown(strategy, job)
                except Exception as error:
                    explain_error(self._renderer, advised(error, job.history))
                    continue
                results.append((strategy, run))
                if run.finish is FinishReason.INTERRUPTED:
                    return True
        except KeyboardInterrupt:
            return True
        return False

    def _shown(self, strategy: Strategy, job: Job) -> Generation:
        """A run that is seen as it goes."""
        settings = job.settings
        watch, notebook = Stopwatch(), Notebook(judged=settings.verify == "rejection") if settings.debug == "full" else None
        view = RunView(self._renderer, job.pair.tokenizer, strategy, settings.debug)
        view.begin()
        steps = strategy.steps(replace(job, stopwatch=watch, notebook=notebook))
        run = collect(steps, view.show, stopwatch=watch, notebook=notebook)
        view.end(run)
        return run

    def _compare(self, last: Last, *, explained: bool) -> None:
        """The table, and a line for each text that is not the target's. Records are kept even if showing it all is interrupted."""
        causes: dict[str, Divergence] = {}
        try:
            if last.compared:
                self._renderer.comparison(last.compared)
            for strategy, turn in own_conversations(last) if explained else ():
                self._renderer.result(f"{strategy.name}: its conversation is its own since turn {turn}; its text is not compared")
            for strategy, run in unlike_target(last) if explained else ():
                causes[strategy.name] = divergence = divergence_of(last, strategy, run, self._bench.memory.rounding)
                self._renderer.divergence(strategy, divergence, last.job.pair.tokenizer, rule=last.job.settings.verify)
        except Exception as error:  # the runs themselves were fine
            self._renderer.note("Why the texts differ could not be found out:")
            explain_error(self._renderer, error)
        finally:
            if self._records is not None:
                self._records.append(generation_records(last, causes))

    def report(self, report: Report) -> Verdict:
        """Run a report to its end or to Ctrl-C; what it found until then is shown and recorded."""
        findings: list[Finding] = []
        finished = False
        try:
            for event in report.events:
                if isinstance(event, Progress):
                    self._renderer.note(event.text)
                else:
                    findings.append(event)
            finished = True
        except KeyboardInterrupt:
            self._renderer.note("Interrupted; what was finished:" if findings else "Interrupted before anything was finished.")
        finally:
            if findings:
                self._conclude(report, findings, finished=finished)
        return Verdict.DONE if finished else Verdict.INTERRUPTED

    def _conclude(self, report: Report, findings: list[Finding], *, finished: bool) -> None:
        if self._records is not None:
            self._records.append([report_record(report, findings, self._bench.pair, finished=finished)])
        self._bench.memory.found = report, findings, finished
        show_report(self._renderer, report, findings)
