"""Runs a report to its end or to Ctrl-C, shows its findings and stores its record.

The command that made a report decides what it measures (`utils.commands.experiments`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from utils.comparison.records import report_record
from utils.comparison.reports import Finding, Note, Report, ReportEvent
from utils.comparison.second_baseline import with_second_baseline
from utils.comparison.session_state import ShownResult
from utils.models import Count
from utils.pairs.pair import Pair
from utils.repl.runner import ResultLog, Verdict
from utils.screen.renderer import Renderer
from utils.screen.run_view import show_report

NOTHING_FINISHED = "Stopped before anything was finished, so there is nothing to report."
FINISHED = "Stopped. Finished so far:"


@dataclass(frozen=True, slots=True)
class ReportRunner:
    """Runs reports. `pair` has the loaded models for the record, or is None."""

    pair: Pair | None
    renderer: Renderer
    log: ResultLog

    def run(self, report: Report) -> Verdict:
        """Run a report. After Ctrl-C the findings so far are shown and recorded."""
        findings: list[Finding] = []
        finished = False
        try:
            for event in report.events:
                self._receive(event, findings)
            finished = True
        except KeyboardInterrupt:
            findings += _remaining_findings(report.events)
            self.renderer.note(FINISHED if findings else NOTHING_FINISHED)
        finally:
            self.renderer.end_progress()
            # Also after an error, which is raised again afterwards.
            if findings:
                self._conclude(report, findings, finished=finished)
        return Verdict.DONE if finished else Verdict.INTERRUPTED

    def _receive(self, event: ReportEvent, findings: list[Finding]) -> None:
        if isinstance(event, Finding):
            findings.append(event)
        elif isinstance(event, Note):
            self.renderer.note(event.text)
        elif isinstance(event.text, Count):
            self.renderer.count(event.text)
        else:
            self.renderer.progress(event.text)

    def _conclude(self, report: Report, findings: list[Finding], *, finished: bool) -> None:
        # After `concluded`, so that the sentence is added to those of every report alike.
        other = None if self.pair is None else self.pair.engine.faster_baseline()
        report, findings = with_second_baseline(report.concluded(findings), findings, other)
        record = report_record(report, findings, self.pair, finished=finished)
        self.log.add(ShownResult([record], report, findings))
        show_report(self.renderer, report, findings)


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
