"""Runs the enabled strategies on one prompt, shows and compares the runs, and stores their records.

Results are kept even if a run fails or is interrupted. Decoding and drawing are left to other packages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from traceback import clear_frames
from typing import Any

from utils.comparison.harness import Harness
from utils.comparison.job import Job
from utils.comparison.last_prompt import LastPrompt, PlannedRun, divergence_of, unlike_target
from utils.comparison.low_acceptance import low_acceptance_hint
from utils.comparison.marked_text import TextPiece, marked_text
from utils.comparison.records import RecordFile, generation_records
from utils.comparison.server_records import server_records
from utils.comparison.server_runs import ServerPrompt
from utils.comparison.session_state import SessionState, ShownResult
from utils.comparison.strategies import Strategy
from utils.config.settings import Settings
from utils.decode.engine_forward import reported_reading
from utils.decode.noise import fix_seeds
from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.freed_memory import release_memory
from utils.metrics.divergence import Divergence
from utils.metrics.draft_trace import DraftTracer
from utils.metrics.results import Generation, collect
from utils.metrics.stopwatch import Stopwatch
from utils.models.load_errors import is_out_of_memory
from utils.pairs.pair import Pair
from utils.prompts.conversation import with_reset_hint
from utils.repl.server_runner import ServerRunner
from utils.screen.renderer import Renderer
from utils.screen.run_view import PromptView, RunView, show_comparison
from utils.text import encodable

TURN_NOT_KEPT = "This turn is not part of the conversation, because not every strategy finished it."
SAME_REASON = "Not run, for the same reason as {}."
COMPARING = "{}: comparing its logits with target-only ..."
COMPARISON_STOPPED = "The comparison was stopped; the runs are kept."
NOT_EXPLAINED = "The reason why the texts differ could not be computed:"
OUT_OF_MEMORY = "Out of memory: try a shorter /length, a shorter prompt, or a smaller or quantized model."


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


class Refusals:
    """Explains why strategies did not run for a prompt. A shared reason is shown once."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._given: dict[str, str] = {}  # the first strategy that was refused for each reason

    def explain(self, name: str, error: Exception) -> None:
        reason = str(error) if isinstance(error, UserError) else ""
        if reason in self._given:
            self._renderer.error(SAME_REASON.format(self._given[reason]))
            return
        if reason:
            self._given[reason] = name
        explain_error(self._renderer, error)


@dataclass(frozen=True, slots=True)
class ResultLog:
    """Stores results: `state` keeps them for /export, and `file` appends their records (--json)."""

    state: SessionState
    file: RecordFile | None

    def add(self, result: ShownResult) -> None:
        self.state.results.add(result)
        if self.file is not None:
            self.file.append(result.records)


@dataclass(frozen=True, slots=True)
class PromptRunner:
    """Runs prompts with the enabled strategies.

    `echo` is True if the prompt must be shown, because it was not typed on this screen.
    """

    harness: Harness
    renderer: Renderer
    log: ResultLog
    echo: bool

    def run(self, text: str, settings: Settings) -> Verdict:
        """Run a prompt. With /turns on, add it to the conversations if every strategy finishes it.

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
        if self.echo:
            self.renderer.prompt(text)
        run = self._run_turn if settings.keeps_conversation else self._run_and_compare
        return run(text, planned, settings)

    def _run_turn(self, text: str, planned: Sequence[PlannedRun], settings: Settings) -> Verdict:
        verdict = Verdict.FAILED  # unless the runs return a verdict, so an exception counts as failed
        try:
            verdict = self._run_and_compare(text, planned, settings)
        finally:
            if verdict is Verdict.DONE:
                self.harness.keep_turn()
            else:
                self.renderer.note(TURN_NOT_KEPT)
        return verdict

    def _run_and_compare(self, text: str, planned: Sequence[PlannedRun], settings: Settings) -> Verdict:
        results: list[tuple[Strategy, Generation]] = []
        refusals, state = Refusals(self.renderer), self.harness.state
        servers = ServerRunner(self.harness, self.renderer, settings, refusals)
        interrupted = self._run_all(planned, results, refusals) or servers.run(text)
        # Before the comparison, which runs the target again and may be interrupted.
        state.last = LastPrompt.of(text, planned, results) if planned else None
        state.last_servers = servers.prompt(text, state.last)
        self._compare(state.last, state.last_servers, explain=not interrupted)
        if interrupted:
            return Verdict.INTERRUPTED
        done = len(results) + len(servers.runs)
        return Verdict.DONE if done == len(planned) + len(state.servers) else Verdict.FAILED

    def _run_all(
        self, planned: Sequence[PlannedRun], results: list[tuple[Strategy, Generation]], refusals: Refusals
    ) -> bool:
        """Run the strategies in order, and add each run to `results`. Returns whether Ctrl-C ended them."""
        if not planned:
            return False
        job = planned[0].job
        view = PromptView(self.renderer, job.pair.tokenizer, job.settings)
        try:
            for strategy, job in planned:
                # For each strategy, so that results do not depend on other enabled strategies.
                fix_seeds(job.settings.seed)
                try:
                    run = self._run_strategy(job, view.begin(strategy), results)
                except Exception as error:
                    view.failed(strategy)
                    refusals.explain(strategy.name, with_reset_hint(error, job.history))
                    continue
                if run.finish is FinishReason.INTERRUPTED:
                    return True
        except KeyboardInterrupt:
            return True
        return False

    def _run_strategy(self, job: Job, view: RunView, results: list[tuple[Strategy, Generation]]) -> Generation:
        """Run one strategy and show it. Its last lines may fail, so `results` gets the run before."""
        settings = job.settings
        # Only this rule accepts a draft by its own p/q.
        accepts_by_ratio = settings.verify == "rejection"
        tracer = DraftTracer(accepts_by_ratio=accepts_by_ratio) if settings.debug == "full" else None
        watch = Stopwatch()
        steps = view.strategy.steps(job.with_observers(watch, tracer))
        with reported_reading(view.reading):
            run = collect(steps, view.show, stopwatch=watch, tracer=tracer)
        results.append((view.strategy, run))
        view.end(run)
        return run

    def _compare(self, last: LastPrompt | None, servers: ServerPrompt | None, *, explain: bool) -> None:
        """Show the table, and a line for each text that differs from the target's. The records are always stored."""
        causes: dict[str, Divergence] = {}
        try:
            reasons = self._explain(last, causes) if explain and last is not None else ()
            show_comparison(self.renderer, last, reasons, servers)
            if last is not None and (hint := low_acceptance_hint(last, self.harness.state)):
                self.renderer.note(hint)
        except KeyboardInterrupt:
            self.renderer.note(COMPARISON_STOPPED)
            raise
        except Exception as error:
            self.renderer.note(NOT_EXPLAINED)
            explain_error(self.renderer, error)
        finally:
            self.log.add(_shown(last, servers, causes, self.harness.loaded))

    def _explain(self, last: LastPrompt, causes: dict[str, Divergence]) -> Iterator[tuple[Strategy, Divergence]]:
        """Compute the cause of each difference, and add it to `causes` at once."""
        for strategy, run in unlike_target(last):
            self.renderer.count(COMPARING.format(strategy.name))
            causes[strategy.name] = divergence_of(last, strategy, run, self.harness.state.rounding)
            yield strategy, causes[strategy.name]


def _shown(
    last: LastPrompt | None, servers: ServerPrompt | None, causes: dict[str, Divergence], pair: Pair | None
) -> ShownResult:
    """The records and texts of a prompt."""
    records: list[dict[str, Any]] = []
    texts: dict[str, Sequence[TextPiece]] = {}
    if last is not None:
        tokenizer = last.job.pair.tokenizer
        records += generation_records(last, causes)
        texts |= {strategy.name: marked_text(run.steps, tokenizer) for strategy, run, _ in last.compared}
    if servers is not None:
        records += server_records(servers, pair)
        texts |= {run.name: [TextPiece(run.text, False)] for run, _ in servers.compared}
    return ShownResult(records, causes=causes, texts=texts)
