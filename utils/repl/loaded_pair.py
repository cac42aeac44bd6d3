"""A loaded pair with its limits, its settings, its warm-up, and the harness that runs strategies on it.

Settings are adapted to the loaded pair, take effect when they change, and can be reverted. /load builds a new
LoadedPair beside the current one, so that the session is unchanged if anything fails.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Event, Thread

import torch

from utils.commands import Registry
from utils.comparison.harness import Harness
from utils.comparison.records import RecordFile
from utils.comparison.strategies import STRATEGIES, Strategy
from utils.comparison.warm_up import warm_up, with_costs
from utils.config.settings import Settings, listed_settings, reset_unsupported
from utils.config.value_types import Limits
from utils.engine.engine_choice import TYPICAL, Workload
from utils.engine.stored_results import ResultFile
from utils.errors import UserError
from utils.metrics.costs import Costs
from utils.pairs.doctor import OWN_PROMPT, settle_reading
from utils.pairs.drafter_kinds import surviving_kinds
from utils.pairs.pair import Pair, loaded_message
from utils.pairs.request import PAIRS, PairRequest, PairSpec
from utils.prompts.conversation import has_chat_template
from utils.repl.status import limits_of, pair_names
from utils.screen.renderer import Renderer
from utils.text import count_of

NO_TEMPLATE = "chat: off (this tokenizer has no chat template; prompts are sent without one)"
TEMPLATE = "chat: on (this tokenizer has a chat template; without it: /chat off)"
CONVERSATION_ENDED = "The conversation has ended: {} forgotten."
NOTHING_TO_UNDO = "No settings have been changed, so there is nothing to revert."
STARTING_ENGINE = "preparing the engine ({}) ..."
WARMING_UP = "warming up the models ..."
POLL = 0.05  # seconds; waiting in short pieces lets Ctrl-C in


class _Stopped(Exception):
    """The program is about to end."""


class BackgroundTask(Thread):
    """Work that is done once: in a thread after `start`, or in the first call of `finish` if `is_planned`.

    While the thread runs behind the prompt, nothing else may use the models: every line waits for it first.

    `work` receives a function that returns True if it should end early.
    """

    def __init__(self, work: Callable[[Callable[[], bool]], None]) -> None:
        super().__init__(daemon=True)  # a thread that hangs must not keep the program alive
        self._work, self._threads = work, torch.get_num_threads()
        self._stopped, self._ended = Event(), Event()
        self._error: BaseException | None = None
        self.is_planned = False

    def run(self) -> None:
        torch.set_num_threads(self._threads)  # a new thread may start with another number
        try:
            self._work(self._stopped.is_set)
        except BaseException as error:
            self._error = error
        self._ended.set()

    def wait(self) -> None:
        """Wait for the thread, if it was started. Raises the thread's error once."""
        self._join()
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
        # Python 3.11 takes a thread for dead after Ctrl-C in join().
        while self.is_alive() and not self._ended.wait(POLL):
            pass


@dataclass(frozen=True, slots=True)
class SessionTools:
    """The parts of a session.

    `records` is the file of --json. `interactive` is True if prompts are typed on the screen of the answers. `load`
    reports progress to its second argument. `results` stores the engine's results between starts.
    """

    registry: Registry
    renderer: Renderer
    records: RecordFile | None = None
    interactive: bool = True
    load: Callable[[PairRequest, Callable[[str], None]], Pair] | None = None
    pairs: Mapping[str, PairSpec] = field(default_factory=lambda: PAIRS)
    strategies: Sequence[Strategy] = STRATEGIES
    results: ResultFile | None = None


class LoadedPair:
    """A pair with everything that lives as long as it: the settings in use, and their earlier values for /undo."""

    def __init__(
        self, pair: Pair | None, tools: SessionTools, requested: Settings, *, defers_costs: bool = False
    ) -> None:
        """Start the engine and fit the settings to the models. Raises UserError if the engine cannot be used.

        `pair` is None in a session without local models. `defers_costs` leaves costs that are neither typed nor stored
        to `warming`.
        """
        self.harness = Harness.of(pair, requested, tools.strategies)
        self.harness.progress, self.harness.note = tools.renderer.progress, tools.renderer.note
        self.limits = Limits() if pair is None else limits_of(pair)
        self._note = tools.renderer.note
        self._earlier: list[tuple[Settings, Pair | None]] = []
        self._first_costs: Costs | None = None
        # Servers have chat templates and engines of their own.
        self.settings = replace(requested, length=min(requested.length, self.limits.context), chat_template=True)
        if pair is not None:
            pair.engine.results, pair.engine.report = tools.results, tools.renderer.step
            self._fit(pair, requested, defers_costs=defers_costs)
        self.warming = BackgroundTask(self.warm_up)

    def _fit(self, pair: Pair, requested: Settings, *, defers_costs: bool) -> None:
        """Reset what this pair does not support, and start its engine."""
        harness, engine = self.harness, pair.engine
        # The workload of the target's engine: the enabled strategies that use the target.
        enabled = harness.runnable(requested, enabled=True)
        alone, drafted = sum(row.is_baseline for row in enabled), sum(row.drafts for row in enabled)
        engine.workload = Workload(alone, drafted) if alone + drafted else TYPICAL
        # Decided for each tokenizer: a target without a template must not turn it off for the next one.
        template = has_chat_template(pair.tokenizer)
        settings = replace(reset_unsupported(self.settings, self.limits), chat_template=template)
        engine.defers_costs = defers_costs and settings.costs is None
        harness.start_engine(settings)
        engine.defers_costs = False
        if found := settle_reading(pair, lambda: harness.prompt_ids(OWN_PROMPT, settings)):
            self._note(found)  # before any measurement with it
        self.settings = settings if self._lacks_costs(settings) else self._with_costs(settings)
        self._first_costs = None if requested.costs else self.settings.costs
        if requested.uses_chat != settings.uses_chat:
            self._note(TEMPLATE if settings.uses_chat else NO_TEMPLATE)
        harness.state.storage = harness.new_storage(self.settings)

    def introduce(self) -> None:
        """Report which engine computes the pair, and what its loading found."""
        pair = self.harness.pair
        for line in (f"engine: {pair.engine.state.sentence()}", *pair.notes):
            self._note(line)

    def warm_up(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Warm up the models, and measure what was deferred or is stale. `stopped` returns True to end early."""
        self.measure_costs(stopped)
        warm_up(self.harness, self.settings, stopped)
        if not stopped():
            self.refresh_costs(stopped)

    def change(self, requested: Settings) -> None:
        """Use these settings. Nothing is changed if it raises UserError."""
        before = self.settings
        self._apply(requested)
        if self.settings != before:
            self._earlier.append((before, self.harness.loaded))

    def undo(self) -> str:
        """Revert the last change. Returns the changed values. Raises UserError if there was no change."""
        if not self._earlier:
            raise UserError(NOTHING_TO_UNDO)
        before, (earlier, pair) = self.settings, self._earlier.pop()
        if pair is not self.harness.loaded:
            self._use(pair)
            return f"undone: {pair_names(pair)}"
        # Not through `change`, which would store the reverted values as a new change.
        self._apply(earlier)
        values = [(name, entry.show(before), entry.show(self.settings)) for name, entry in listed_settings().items()]
        changes = "; ".join(f"{name} {new} (was {old})" for name, old, new in values if old != new)
        return f"undone: {changes or 'no setting differs'}"

    def use_drafter(self, pair: Pair) -> None:
        """Use the drafter of this pair, whose target and drafter kind are the present ones. /undo goes back."""
        self._earlier.append((self.settings, self.harness.loaded))
        self._use(pair)

    def _use(self, pair: Pair | None) -> None:
        self.harness.state.settle_records()
        self.harness.loaded = pair

    def retest_engine(self) -> str:
        """Test the engine and measure all costs again. Returns its state. Raises UserError if the test fails."""
        self.harness.state.settle_records()
        self.harness.start_engine(self.settings, anew=True)
        self.settings = self._with_costs(replace(self.settings, costs=None))
        return f"engine: {self.harness.pair.engine.state.sentence()}"

    def measure_costs(self, stopped: Callable[[], bool]) -> None:
        if self._lacks_costs(self.settings):
            self._measure_all(stopped)
            self._first_costs = self.settings.costs

    def refresh_costs(self, stopped: Callable[[], bool]) -> None:
        """Measure stale costs of an earlier start again, because the machine may have been busy. Typed costs stay."""
        engine, first = self.harness.pair.engine, self._first_costs
        if engine.has_stored_costs and first is not None and self.settings.costs == first and engine.costs_are_stale():
            self._measure_all(stopped)

    def _lacks_costs(self, settings: Settings) -> bool:
        return settings.costs is None and not self.harness.pair.engine.step_seconds

    def _measure_all(self, stopped: Callable[[], bool]) -> None:
        engine = self.harness.pair.engine
        report = engine.report

        def silent(text: str) -> None:  # while a user types
            if stopped():
                raise _Stopped

        try:
            with suppress(_Stopped):
                engine.report = silent
                engine.measure()
                self.settings = self._with_costs(replace(self.settings, costs=None))
                engine.store()
        finally:
            engine.report = report

    def _apply(self, settings: Settings) -> None:
        harness, before = self.harness, self.settings
        if settings.drafter_kind != before.drafter_kind:
            settings = with_costs(harness, settings)  # may raise for an unusable kind, so it comes before any change
        if settings.ngram_storage != before.ngram_storage:
            harness.state.storage = harness.new_storage(settings)
        elif settings.ngram_limit != before.ngram_limit:
            harness.state.storage.limit = settings.ngram_limit
        if (settings.engine, settings.threads) != (before.engine, before.threads):
            harness.state.settle_records()
            harness.start_engine(settings)
            self._note(f"engine: {harness.pair.engine.state.sentence()}")
            settings = replace(settings, costs=None)  # they depend on the kernels and the threads
        elif settings.costs is None and before.costs is not None:  # None twice: they could not be measured
            harness.pair.engine.measure()
            harness.pair.engine.store()
        self.settings = self._with_costs(settings) if settings.costs is None else settings
        conversations = harness.state.conversations
        if before.turns and not settings.turns and conversations:
            self._note(CONVERSATION_ENDED.format(count_of(len(conversations), "turn")))
            conversations.forget()

    def _with_costs(self, settings: Settings) -> Settings:
        """Measure missing draft costs. They stay unknown for a drafter that cannot be used."""
        with suppress(UserError):  # raised again when the drafter is run
            return with_costs(self.harness, settings)
        return settings


def load_beside(request: PairRequest, current: LoadedPair, tools: SessionTools) -> LoadedPair:
    """Load, prepare and warm up other models. Raises UserError if that fails, and then the current pair stays."""
    assert tools.load is not None
    renderer, threads = tools.renderer, torch.get_num_threads()
    note, announce = renderer.note, renderer.announce
    before, state = current.settings, current.harness.state
    state.settle_records()
    try:
        # The old pair stays loaded until the new one is ready, so both must fit into memory at once.
        pair = tools.load(request, announce)
        note(loaded_message(pair))
        announce(STARTING_ENGINE.format(before.engine))
        kinds = surviving_kinds(before.drafter_kind)
        # costs=None, because the old costs belong to the old pair.
        loaded = LoadedPair(pair, tools, replace(before, drafter_kind=kinds, costs=None))
        loaded.introduce()
        renderer.progress(WARMING_UP)
        loaded.warm_up()
    except BaseException:
        torch.set_num_threads(threads)  # the current engine was tested with this number of threads
        note(f"Still loaded: {pair_names(current.harness.loaded)}.")
        raise
    # Last, because these describe the state of the old pair.
    if state.storage and not before.reset_in_between:
        note("The n-gram storage is empty now: it held tokens of the old target.")
    if turns := len(state.conversations):
        note(CONVERSATION_ENDED.format(count_of(turns, "turn")))
    if state.training is not None:
        state.training.close()
    own = loaded.harness.state
    own.records, own.servers = state.records, state.servers  # /export has the last result of any pair
    own.prompts.extend(state.prompts)
    return loaded
