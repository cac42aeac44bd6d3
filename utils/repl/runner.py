"""Runs prompts with the enabled strategies and the servers, reports of commands, and work behind the prompt.

Results are shown and stored, even if a run fails or is interrupted. Decoding and drawing are left to other packages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache, partial
from threading import Event, Thread
from traceback import clear_frames
from typing import Any

import torch

from utils.comparison.harness import Harness
from utils.comparison.records import RecordFile, detail_records, report_record, run_records
from utils.comparison.reports import Finding, Note, Report, ReportEvent
from utils.comparison.runs import Run
from utils.comparison.session_state import (
    LastPrompt,
    PlannedRun,
    divergence_of,
    unlike_target,
)
from utils.config.settings import Settings
from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.freed_memory import release_memory
from utils.metrics.divergence import Divergence
from utils.models import Count
from utils.models.load_errors import is_out_of_memory
from utils.prompts.conversation import with_reset_hint
from utils.screen.renderer import Renderer
from utils.screen.run_view import PromptView, show_comparison, show_report
from utils.text import encodable

TURN_NOT_KEPT = "This turn is not part of the conversation, because not every strategy finished it."
SAME_REASON = "Not run, for the same reason as {}."
COMPARING = "{}: comparing its logits with target-only ..."
COMPARISON_STOPPED = "The comparison was stopped; the runs are kept."
NOT_EXPLAINED = "The reason why the texts differ could not be computed:"
OUT_OF_MEMORY = "Out of memory: try a shorter /length, a shorter prompt, or a smaller or quantized model."
NOTHING_FINISHED = "Stopped before anything was finished, so there is nothing to report."
FINISHED = "Stopped. Finished so far:"
POLL = 0.05  # seconds; waiting in short pieces lets Ctrl-C in


class Verdict(Enum):
    """How a line ended."""

    DONE = auto()
    FAILED = auto()
    INTERRUPTED = auto()
    QUIT = auto()


def explain_error(renderer: Renderer, error: Exception) -> None:
    """Show one sentence for an error that the user can fix, and a traceback for a bug."""
    if isinstance(error, UserError):
        renderer.error(str(error))
        return
    if is_out_of_memory(error):
        renderer.error(OUT_OF_MEMORY)
        clear_frames(error.__traceback__)  # their local variables hold the tensors that fill the memory
        release_memory()
    else:
        renderer.crash()


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs prompts with the enabled strategies and the servers, and reports. Their results are shown and stored.

    `records` is the file of --json. `echo` is True if a prompt must be shown, because it was not typed on this screen.
    """

    harness: Harness
    renderer: Renderer
    records: RecordFile | None
    echo: bool

    def prompt(self, text: str, settings: Settings) -> Verdict:
        """Run a prompt. With /turns on, add it to the conversations if every arm finishes it.

        Raises UserError for a prompt that the target cannot take.
        """
        # Bytes of the command line that are not UTF-8 are lone surrogates here, which tokenizers refuse.
        text = encodable(text)
        # Before the storage is emptied, so that a refused prompt changes nothing.
        planned = self.harness.plan(text, settings, self.renderer.note)
        self.harness.state.prompts.append(text)
        if settings.reset_in_between:
            self.harness.state.storage.reset()
            self.harness.state.caches.texts.clear()
        self.renderer.prompt(text, echo=self.echo)
        verdict = Verdict.FAILED  # unless the runs return a verdict, so an exception counts as failed
        try:
            verdict = self._run_and_compare(text, planned, settings)
        finally:
            if settings.keeps_conversation and verdict is Verdict.DONE:
                self.harness.keep_turn()
            elif settings.keeps_conversation:
                self.renderer.note(TURN_NOT_KEPT)
        return verdict

    def _run_and_compare(self, text: str, planned: Sequence[PlannedRun], settings: Settings) -> Verdict:
        runs: list[Run] = []
        interrupted = self._run_all(text, planned, settings, runs)
        # Before the comparison, which runs the target again and may be interrupted.
        state = self.harness.state
        last = state.last = LastPrompt.of(text, settings, planned, runs)
        for _, run, comparison in last.servers:
            if run.address is not None and not last.histories[run.name]:
                state.servers.note_text(run.address.name, text, comparison.same)
        self._compare(last, explain=not interrupted)
        if interrupted:
            return Verdict.INTERRUPTED
        return Verdict.DONE if len(runs) == len(planned) else Verdict.FAILED

    def _run_all(self, text: str, planned: Sequence[PlannedRun], settings: Settings, runs: list[Run]) -> bool:
        """Run the arms in order, and add each run to `runs`. Returns whether Ctrl-C ended them."""
        tokenizer = self.harness.pair.tokenizer if self.harness.has_pair else None
        prompt = PromptView(self.renderer, tokenizer, settings)
        refused: dict[str, str] = {}  # the first arm that was refused for each reason, which is shown once
        try:
            for arm, history in planned:
                view = prompt.begin(arm)
                try:
                    run = arm.run(text, settings, history, view)
                    runs.append(run)  # before its last lines, which may fail
                    view.end(run)
                except Exception as error:
                    view.failed()
                    shown = with_reset_hint(error, history)
                    first = refused.setdefault(str(shown), arm.name) if isinstance(shown, UserError) else arm.name
                    if first == arm.name:
                        explain_error(self.renderer, shown)
                    else:
                        self.renderer.error(SAME_REASON.format(first))
                    continue
                if run.finish is FinishReason.INTERRUPTED:
                    return True
        except KeyboardInterrupt:
            return True
        return False

    def _compare(self, last: LastPrompt, *, explain: bool) -> None:
        """Show the table, and a line for each text that differs from the target's. The records are always stored."""
        causes: dict[str, Divergence] = {}
        try:
            show_comparison(self.renderer, last, self._explain(last, causes) if explain else ())
        except KeyboardInterrupt:
            self.renderer.note(COMPARISON_STOPPED)
            raise
        except Exception as error:
            self.renderer.note(NOT_EXPLAINED)
            explain_error(self.renderer, error)
        finally:
            self.harness.state.causes = causes
            self._add(partial(run_records, last, causes, self.harness.loaded))

    def _explain(self, last: LastPrompt, causes: dict[str, Divergence]) -> Iterator[tuple[str, Divergence]]:
        """Compute the cause of each difference, and add it to `causes` at once."""
        for strategy, run in unlike_target(last):
            self.renderer.count(COMPARING.format(strategy.name))
            causes[strategy.name] = divergence_of(last, strategy, run, self.harness.state.rounding)
            yield strategy.name, causes[strategy.name]

    def report(self, report: Report) -> Verdict:
        """Run a report. After Ctrl-C the findings so far are shown and recorded."""
        findings: list[Finding] = []
        finished = False
        try:
            for event in report.events:
                if isinstance(event, Finding):
                    findings.append(event)
                elif isinstance(event, Note):
                    self.renderer.note(event.text)
                else:
                    show = self.renderer.count if isinstance(event.text, Count) else self.renderer.progress
                    show(event.text)
            finished = True
        except KeyboardInterrupt:
            findings += _remaining_findings(report.events)
            self.renderer.note(FINISHED if findings else NOTHING_FINISHED)
        finally:
            self.renderer.end_progress()
            if findings:  # also after an error, which is raised again afterwards
                self._conclude(report, findings, finished=finished)
        return Verdict.DONE if finished else Verdict.INTERRUPTED

    def _conclude(self, report: Report, findings: list[Finding], *, finished: bool) -> None:
        pair = self.harness.loaded
        other = None if pair is None else pair.engine.faster_baseline()
        # Servers have their own baselines.
        own = any(one.figures.get("speedup") is not None and "baseline" not in one.figures for one in findings)
        lines = [*report.conclude(findings), *([other.sentence] if other is not None and own else [])]
        record = report_record(report, findings, lines, pair, finished=finished)
        records = [record, *detail_records(report)]
        self._add(lambda: records)
        show_report(self.renderer, report, findings, lines)

    def _add(self, records: Callable[[], list[dict[str, Any]]]) -> None:
        """Store a result, whose records are made once: for the file, or when they are exported."""
        self.harness.state.records = cache(records)
        if self.records is not None:
            self.records.append(self.harness.state.records())


def _remaining_findings(events: Iterator[ReportEvent]) -> Iterator[Finding]:
    """The remaining findings of a report after Ctrl-C, which came within or between its events."""
    try:
        # The generator yields its last findings in finally blocks. If Ctrl-C came from inside it, it has already ended,
        # and `throw` raises at once.
        event: ReportEvent = events.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
        while True:
            if isinstance(event, Finding):
                yield event
            event = next(events)
    except (KeyboardInterrupt, StopIteration, AttributeError):  # AttributeError: the iterator is not a generator
        return


class BackgroundTask:
    """Work that is done once: in a thread after `start`, or in the first call of `finish` if `is_planned`.

    While the thread runs behind the prompt, nothing else may use the models: every line waits for it first.

    `work` receives a function that returns True if it should end early.
    """

    def __init__(self, work: Callable[[Callable[[], bool]], None]) -> None:
        self._work = work
        self._thread: Thread | None = None
        self._stopped = Event()
        self._error: BaseException | None = None
        self.is_planned = False

    @property
    def is_running(self) -> bool:
        """Whether a thread is working."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        # A daemon, so that a thread that hangs does not keep the program alive.
        self._thread = Thread(target=self._run, args=(torch.get_num_threads(),), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the thread, if there is one. Raises the thread's error once."""
        self._join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait for the thread, or do the planned work."""
        self.wait()
        if self.is_planned:
            self._work(lambda: False)
            self.is_planned = False  # after the work, so that interrupted work starts again

    def stop(self) -> None:
        """End the thread as soon as possible."""
        self._stopped.set()
        self._join()

    def _join(self) -> None:
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(POLL)

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # a new thread may start with another number
        try:
            self._work(self._stopped.is_set)
        except BaseException as error:
            self._error = error
