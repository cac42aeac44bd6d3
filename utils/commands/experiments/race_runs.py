"""Runs prompts by arms in turns, for /race, /sweep and /verdict.

The speed of a machine drifts. So arms are warmed up first, take turns at going first, and are compared within a repeat
of a prompt only. What Ctrl-C or an error ends keeps the finished prompts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from utils.comparison.arms import Arm, ServerArm, complete
from utils.comparison.harness import Harness
from utils.comparison.reports import Countdown, Finding, Note, Progress, ReportEvent
from utils.comparison.runs import Run, compare_run
from utils.comparison.warm_up import shortened, warm_up
from utils.config.settings import Settings
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.metrics.results import Comparison
from utils.prompts.conversation import Turn, Turns
from utils.prompts.prompt_files import Prompt
from utils.servers.address import TARGET
from utils.servers.connection import Connection

MOST_NOTES = 6  # maximum number of notes on skipped prompts; a file of long prompts could have hundreds
FURTHER = "Further prompts are left out, too. The table shows how many were run."
MOST_FAILURES = 2  # after this many prompts in a row without an answer, a server is considered gone
GONE = "{} has not answered {} prompts in a row, so no further prompts are sent to it."
ONLY_FIRST_TURNS = "Only the first turn of each prompt is run, because a conversation needs a chat template (/chat on)."
Item = TypeVar("Item")


def rotated(items: Sequence[Item], start: int) -> list[Item]:
    """All items in order, beginning at index `start` modulo their number."""
    return [items[(index + start) % len(items)] for index in range(len(items))]


def then_findings(events: Iterator[ReportEvent], findings: Callable[[], Iterable[Finding]]) -> Iterator[ReportEvent]:
    """The events, followed by the findings of finished runs, even if Ctrl-C or an error ends the events."""
    try:
        yield from events
    finally:  # Ctrl-C is raised again once the findings are consumed
        yield from findings()


def local_arms(harness: Harness, settings: Settings) -> list[Arm]:
    """The enabled strategies. Raises UserError if there is none."""
    return [harness.arm(strategy) for strategy in harness.enabled(settings)]


def server_arms(harness: Harness, servers: Sequence[Connection]) -> list[Arm]:
    """The servers, after the local target if one of them is compared with it."""
    needs_target = harness.has_pair and any(server.address.baseline == TARGET for server in servers)
    own = [harness.arm(harness.baseline)] if needs_target else []
    return [*own, *(ServerArm(server, harness.loaded) for server in servers)]


def check_prompt(harness: Harness, prompt: Prompt, settings: Settings) -> None:
    """Refuse a prompt that the target cannot take, once instead of by every strategy. Raises UserError."""
    ids = harness.prompt_ids(prompt.text, settings)
    ModelSession(harness.pair.target, use_cache=False).begin(ids)


@dataclass(frozen=True, slots=True)
class RaceItem:
    """A prompt and its settings. `number` is its place in the file, from 1. `group` is its task or the swept value.

    `history` is the conversation that it continues.
    """

    number: int
    prompt: Prompt
    group: str
    settings: Settings
    arms: Sequence[Arm]
    history: Turns = ()

    def answers(self, arm: Arm) -> tuple[Run, ...]:
        """The answers to all turns of the prompt, as the conversations of Spec-Bench and SPEED-Bench are run.

        Every arm continues with its own answers, and every turn has a prefill of the whole conversation so far. Raises
        UserError without an answer, and KeyboardInterrupt on Ctrl-C.
        """
        runs: list[Run] = []
        history = self.history
        for text in (self.prompt.text, *self.prompt.later) if self.settings.uses_chat else (self.prompt.text,):
            try:
                runs.append(complete(arm.run(text, self.settings, history)))
            except UserError as error:
                raise UserError(f"Turn {len(runs) + 1}: {error}") if runs else error from error
            history = (*history, Turn(text, runs[-1].text))
        return tuple(runs)


@dataclass(frozen=True, slots=True)
class RaceResult:
    """All turns of an item by one arm in one repeat, which counts from 0, and those of its baseline.

    `theirs` is empty without the baseline's answers, and then there are no comparisons.
    """

    item: RaceItem
    repeat: int
    arm: Arm
    ours: tuple[Run, ...]
    theirs: tuple[Run, ...] = ()
    comparisons: tuple[Comparison, ...] = ()

    @classmethod
    def of(cls, item: RaceItem, repeat: int, runs: Sequence[tuple[Arm, tuple[Run, ...]]]) -> list[Self]:
        """The results of all arms, from their runs."""
        results = []
        for arm, ours in runs:
            theirs = next((turns for _, turns in runs if turns[0].name == ours[0].baseline), ())
            pairs = zip(ours, theirs, strict=False)
            compared = tuple(compare_run(run, (run, other), item.settings) for run, other in pairs)
            results.append(cls(item, repeat, arm, ours, theirs, compared))
        return results

    @property
    def speed(self) -> float | None:
        """Tokens per second over all turns."""
        return pooled_run(self.ours).tokens_per_second

    @property
    def speedup(self) -> float | None:
        """The ratio of tokens per second over all turns, if the speeds can be compared."""
        if not self.comparisons or self.comparisons[0].speedup is None:
            return None
        ours, theirs = self.speed, pooled_run(self.theirs).tokens_per_second
        return ours / theirs if ours and theirs else None

    @property
    def same(self) -> bool | None:
        """Whether all texts are the baseline's, or None if they were not compared."""
        if not self.comparisons or self.comparisons[0].same is None:
            return None
        return not any(comparison.same is False for comparison in self.comparisons)


def pooled_run(runs: Sequence[Run]) -> Run:
    """The counts and the seconds of several answers of one arm as those of one run.

    A count is unknown if one answer's is. Drafts are unknown if an answer's figures are not its own. An answer without
    figures among others with figures had no drafts, and as many forward passes as tokens.
    """
    if any(run.acceptance is not None and not run.acceptance.valid for run in runs):
        runs = [replace(run, drafted=None, accepted=None, target_forwards=None) for run in runs]
    elif any(run.drafted is not None for run in runs):
        runs = [
            replace(run, drafted=0, accepted=0, target_forwards=run.new_tokens) if run.drafted is None else run
            for run in runs
        ]

    def total(name: str) -> int | None:
        counts = [getattr(run, name) for run in runs]
        return None if None in counts else sum(counts)

    summed: dict[str, Any] = {name: total(name) for name in ("new_tokens", "drafted", "accepted", "target_forwards")}
    return replace(runs[0], seconds=sum(run.seconds for run in runs), **summed)


@dataclass(slots=True)
class ArmRace:
    """The items and the results so far.

    `failures` counts, by server, the prompts in a row without an answer. `places` are those of prompts that could be
    run, in their order.
    """

    harness: Harness
    items: Sequence[RaceItem]
    repeats: int = 1
    results: list[RaceResult] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)

    def events(self) -> Iterator[ReportEvent]:
        """Warm up, then run every item `repeats` times. Raises UserError if nothing could be run."""
        if any(item.prompt.later and not item.settings.uses_chat for item in self.items):
            yield Note(ONLY_FIRST_TURNS)
        yield Progress("warming up ...")
        self._warm_up()
        countdown, total = Countdown(), len(self.items) * self.repeats
        # Whole passes over the items, so that a machine that slows down affects all of them alike.
        for repeat in range(self.repeats):
            # The prompts of a file keep their order; the values of a sweep take turns.
            for place, item in enumerate(self.items if self._has_file else rotated(self.items, repeat)):
                done = repeat * len(self.items) + place
                where = f"{item.group}, " if len({one.group for one in self.items}) > 1 else ""
                where += f"{done + 1} of {total}" if self._has_file else f"repeat {repeat + 1} of {self.repeats}"
                yield countdown.progress(done / total, where)
                yield from self.run(item, repeat)
        if not self.results:
            raise UserError("none of the prompts could be run.")

    @property
    def _has_file(self) -> bool:
        """Whether the items are different prompts."""
        return len({item.number for item in self.items}) > 1

    def _warm_up(self) -> None:
        """Run every arm for a few tokens, because the first run may be slow."""
        if self._has_file and any(arm.strategy is not None for arm in self.items[0].arms):
            warm_up(self.harness, self.items[0].settings)
        for item in self.items[:1] if self._has_file else self.items:
            for arm in item.arms:
                if not self._has_file or arm.strategy is None:
                    with suppress(UserError):  # reported when the prompt is run
                        complete(arm.run(item.prompt.text, shortened(item.settings), item.history))

    def run(self, item: RaceItem, repeat: int) -> Iterator[Note]:
        """Run an item by all arms that are present."""
        try:
            if self._has_file and any(arm.strategy is not None for arm in item.arms):
                check_prompt(self.harness, item.prompt, item.settings)
        except UserError as error:
            yield from self._note(f"Prompt {item.number} is left out. {error}")
            return
        present = [arm for arm in item.arms if not self.is_gone(arm)]
        place = self.places.get(item.number, len(self.places))
        runs: dict[str, tuple[Run, ...]] = {}
        for arm in rotated(present, repeat + place):
            try:
                runs[arm.name] = item.answers(arm)
            except UserError as error:
                yield from self._note(f"{arm.name}: prompt {item.number} is left out. {error}")
            if arm.strategy is None:
                self.failures[arm.name] = 0 if arm.name in runs else self.failures.get(arm.name, 0) + 1
        for arm in present:
            if self.is_gone(arm):
                yield from self._note(GONE.format(arm.name, MOST_FAILURES))
        if not runs:
            return
        self.places[item.number] = place
        # Only complete items are added, so Ctrl-C cannot leave a run without its baseline's.
        results = RaceResult.of(item, repeat, [(arm, runs[arm.name]) for arm in present if arm.name in runs])
        self.results += results
        for one in results:
            if (address := one.ours[0].address) is not None and one.comparisons:
                self.harness.state.servers.note_text(address.name, item.prompt.text, one.comparisons[0].same)

    def is_gone(self, arm: Arm) -> bool:
        """Whether a server does not answer any more."""
        return self.failures.get(arm.name, 0) >= MOST_FAILURES

    def _note(self, sentence: str) -> Iterator[Note]:
        """Each sentence once. A file of prompts that are too long has only a few."""
        if sentence not in self.notes and len(self.notes) <= MOST_NOTES:
            sentence = sentence if len(self.notes) < MOST_NOTES else FURTHER
            self.notes.append(sentence)
            yield Note(sentence)
