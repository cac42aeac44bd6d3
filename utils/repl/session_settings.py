"""The settings of a session: they are adapted to the loaded pair, take effect when they change, and can be reverted.

Parsing and bounds of values are left to `utils.config`.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from utils.comparison.harness import Harness
from utils.comparison.warm_up import with_costs
from utils.config.setting_table import listed_settings, reset_unsupported
from utils.config.settings import Settings
from utils.config.value_types import Limits
from utils.errors import UserError
from utils.models.feature_drafter import Conventions, FeatureDrafter
from utils.pairs.doctor import OWN_PROMPT, settle_reading
from utils.prompts.chat_template import has_chat_template
from utils.prompts.conversation import format_turns

NO_TEMPLATE = "chat: off (this tokenizer has no chat template; prompts are sent without one)"
TEMPLATE = "chat: on (this tokenizer has a chat template; without it: /chat off)"
CONVERSATION_ENDED = "The conversation has ended: {} forgotten."
NOTHING_TO_UNDO = "There is no change of settings to revert."


class _Stopped(Exception):
    """The program is about to end."""


def _raise_if_stopped(stopped: Callable[[], bool], text: str) -> None:
    if stopped():
        raise _Stopped


class SessionSettings:
    """The settings in use for one loaded pair, and their earlier values for /undo."""

    def __init__(
        self,
        harness: Harness,
        limits: Limits,
        requested: Settings,
        note: Callable[[str], None],
        *,
        defers_costs: bool = False,
    ) -> None:
        """Reset what this pair does not support, and start the engine. Raises UserError if the engine is not usable.

        `defers_costs` leaves costs that are neither typed nor stored to `measure_costs`.
        """
        self._harness, self._note = harness, note
        self._earlier: list[Settings] = []
        shortened = replace(requested, length=min(requested.length, limits.context))
        if not harness.has_pair:
            # Servers have chat templates and engines of their own.
            self._conventions = self._first_costs = None
            self.current = replace(shortened, chat_template=True)
            return
        # Decided for each tokenizer: a target without a template must not turn it off for the next one.
        template = has_chat_template(harness.pair.tokenizer)
        settings = replace(reset_unsupported(shortened, limits), chat_template=template)
        harness.pair.engine.defers_costs = defers_costs and settings.costs is None
        harness.start_engine(settings)
        harness.pair.engine.defers_costs = False
        if found := settle_reading(harness.pair, lambda: harness.prompt_ids(OWN_PROMPT, settings)):
            note(found)  # before any measurement with it
        self._conventions = self._read_now()
        self.current = settings if self._lacks_costs(settings) else self._with_costs(settings)
        self._first_costs = None if requested.costs else self.current.costs
        if requested.uses_chat != settings.uses_chat:
            note(TEMPLATE if settings.uses_chat else NO_TEMPLATE)
        harness.state.storage = harness.new_storage(self.current)

    def change(self, requested: Settings, reply: str) -> str:
        """Use these settings. Returns the reply. Nothing is changed if it raises UserError."""
        before = self.current
        self._apply(requested)
        if self.current != before:
            self._earlier.append(before)
        return reply

    def undo(self) -> str:
        """Revert the last change. Returns the changed values. Raises UserError if there was no change."""
        if not self._earlier:
            raise UserError(NOTHING_TO_UNDO)
        before = self.current
        # Not through `change`, which would store the reverted values as a new change.
        self._apply(self._earlier.pop())
        values = [(name, entry.show(before), entry.show(self.current)) for name, entry in listed_settings().items()]
        changes = "; ".join(f"{name} {new} (was {old})" for name, old, new in values if old != new)
        return f"undone: {changes or 'no setting differs'}"

    def retest_engine(self) -> str:
        """Test the engine and measure all costs again. Returns its state. Raises UserError if the test fails."""
        self._harness.start_engine(self.current, anew=True)
        self.current = self._with_costs(replace(self.current, costs=None))
        return f"engine: {self._harness.pair.engine.state.sentence()}"

    def follow_drafter(self) -> None:
        """Measure the draft cost again if the drafter is now read in another way."""
        before, self._conventions = self._conventions, self._read_now()
        costs = self.current.costs
        if before == self._conventions or costs is None:
            return
        label = self._harness.pair.drafter_kind
        kept = replace(costs, draft=tuple(entry for entry in costs.draft if entry[0] != label))
        self.current = self._with_costs(replace(self.current, costs=kept))
        # /undo must not bring back the old costs.
        self._earlier = [
            replace(each, costs=self.current.costs) if each.costs == costs else each for each in self._earlier
        ]

    def _read_now(self) -> Conventions | None:
        drafter = self._harness.pair.drafter if self._harness.has_pair else None
        return drafter.conventions if isinstance(drafter, FeatureDrafter) else None

    def measure_costs(self, stopped: Callable[[], bool]) -> None:
        """Measure the costs that were deferred. `stopped` returns True to end early."""
        if self._lacks_costs(self.current):
            self._measure_all(stopped)
            self._first_costs = self.current.costs

    def refresh_costs(self, stopped: Callable[[], bool]) -> None:
        """Measure stale costs of an earlier start again, because the machine may have been busy.

        Typed costs stay. `stopped` returns True to end early.
        """
        engine = self._harness.pair.engine
        if not engine.has_stored_costs or self._first_costs is None or self.current.costs != self._first_costs:
            return
        if engine.costs_are_stale():
            self._measure_all(stopped)

    def _lacks_costs(self, settings: Settings) -> bool:
        return settings.costs is None and not self._harness.pair.engine.step_seconds

    def _measure_all(self, stopped: Callable[[], bool]) -> None:
        engine = self._harness.pair.engine
        report = engine.report
        try:
            with suppress(_Stopped):
                engine.report = partial(_raise_if_stopped, stopped)  # show nothing while a user types
                engine.measure()
                self.current = self._with_costs(replace(self.current, costs=None))
                engine.store()
        finally:
            engine.report = report

    def _apply(self, settings: Settings) -> None:
        harness, before = self._harness, self.current
        if settings.drafter_kind != before.drafter_kind:
            settings = with_costs(harness, settings)  # may raise for an unusable kind, so it comes before any change
        if settings.ngram_storage != before.ngram_storage:
            harness.state.storage = harness.new_storage(settings)
        elif settings.ngram_limit != before.ngram_limit:
            harness.state.storage.limit = settings.ngram_limit
        if (settings.engine, settings.threads) != (before.engine, before.threads):
            harness.start_engine(settings)
            self._note(f"engine: {harness.pair.engine.state.sentence()}")
            # Costs depend on the kernels and the threads.
            settings = replace(settings, costs=None)
        elif settings.costs is None and before.costs is not None:  # None twice: they could not be measured
            harness.pair.engine.measure()
            harness.pair.engine.store()
        self.current = self._with_costs(settings) if settings.costs is None else settings
        conversations = harness.state.conversations
        if before.turns and not settings.turns and conversations:
            self._note(CONVERSATION_ENDED.format(format_turns(len(conversations))))
            conversations.forget()

    def _with_costs(self, settings: Settings) -> Settings:
        """Measure missing draft costs. They stay unknown for a drafter that cannot be used."""
        with suppress(UserError):  # raised again when the drafter is run
            return with_costs(self._harness, settings)
        return settings
