"""Runs prompts by arms in turns, for /race, /sweep and /server sweep.

The speed of a machine drifts. So arms are warmed up first, take turns at going first, and are compared within a repeat
of a prompt only. What Ctrl-C or an error ends keeps the finished prompts.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from utils.commands.experiments.paired_runs import PairedRuns, all_turns, check_prompt
from utils.commands.experiments.repeated_runs import RemainingTime, rotated
from utils.comparison.arms import Arm, complete
from utils.comparison.harness import Harness
from utils.comparison.reports import Note, Progress, ReportEvent
from utils.comparison.runs import Run
from utils.comparison.warm_up import shortened, warm_up
from utils.config.settings import Settings
from utils.errors import UserError
from utils.prompts.conversation import Turns
from utils.prompts.prompt_files import Prompt
from utils.text import count_of

MOST_NOTES = 6  # maximum number of notes on skipped prompts; a file of long prompts could have hundreds
FURTHER = "Further prompts are left out, too. The table shows how many were run."
MOST_FAILURES = 2  # after this many prompts in a row without an answer, a server is considered gone
GONE = "{} has not answered {} prompts in a row, so no further prompts are sent to it."
ONLY_FIRST_TURNS = "Only the first turn of each prompt is run, because a conversation needs a chat template (/chat on)."


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


@dataclass(frozen=True, slots=True)
class RaceResult:
    """An item by one arm in one repeat, which counts from 0."""

    item: RaceItem
    repeat: int
    runs: PairedRuns


@dataclass(slots=True)
class ArmRace:
    """The items and the results so far."""

    harness: Harness
    items: Sequence[RaceItem]
    repeats: int
    results: list[RaceResult] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)  # prompts in a row without an answer, by arm
    notes: set[str] = field(default_factory=set)
    places: dict[int, int] = field(default_factory=dict)  # of prompts that could be run, in their order

    def events(self) -> Iterator[ReportEvent]:
        """Warm up, then run every item `repeats` times. Raises UserError if nothing could be run."""
        if any(item.prompt.later and not item.settings.uses_chat for item in self.items):
            yield Note(ONLY_FIRST_TURNS)
        yield Progress(self._announcement())
        self._warm_up()
        time, done = RemainingTime(), 0
        # Whole passes over the items, so that a machine that slows down affects all of them alike.
        for repeat in range(self.repeats):
            # The prompts of a file keep their order; the values of a sweep take turns.
            for item in self.items if self._has_file else rotated(self.items, repeat):
                left = time.estimate(len(self.items) * self.repeats - done)
                done += 1
                yield Progress(f"{self._place(item, repeat, done)}{left} ...")
                seconds = yield from self._run(item, repeat)
                if seconds is not None:  # a refused prompt does not predict how long the others take
                    time.add(seconds)
        if not self.results:
            raise UserError("none of the prompts could be run.")

    def _announcement(self) -> str:
        names = ", ".join(dict.fromkeys(arm.name for item in self.items for arm in item.arms))
        if not self._has_file:
            groups = list(dict.fromkeys(item.group for item in self.items))
            names = ", ".join(groups) if len(groups) > 1 else names
            return f"warming up, then {count_of(self.repeats, 'repeat')} of {names} ..."
        each = count_of(self.repeats, "run")
        return f"warming up, then {count_of(len(self.items), 'prompt')} by {names}, {each} each ..."

    @property
    def _has_file(self) -> bool:
        """Whether the items are different prompts."""
        return len({item.number for item in self.items}) > 1

    def _place(self, item: RaceItem, repeat: int, done: int) -> str:
        if self._has_file:
            return f"{done} of {len(self.items) * self.repeats} ({item.group})"
        label = f"{item.group}, " if len(self.items) > 1 else ""
        return f"{label}repeat {repeat + 1} of {self.repeats}"

    def _warm_up(self) -> None:
        """Run every arm for a few tokens, because the first run may be slow."""
        if self._has_file and any(arm.strategy is not None for arm in self.items[0].arms):
            warm_up(self.harness, self.items[0].settings)
        for item in self.items[:1] if self._has_file else self.items:
            for arm in item.arms:
                if not self._has_file or arm.strategy is None:
                    with suppress(UserError):  # reported when the prompt is run
                        complete(arm.run(item.prompt.text, shortened(item.settings), item.history))

    def _run(self, item: RaceItem, repeat: int) -> Generator[ReportEvent, None, float | None]:
        """Run an item by all arms that are present. Returns the seconds, or None without an answer."""
        try:
            if self._has_file and any(arm.strategy is not None for arm in item.arms):
                check_prompt(self.harness, item.prompt, item.settings)
        except UserError as error:
            yield from self._notes_on([f"Prompt {item.number} is left out. {error}"])
            return None
        present = [arm for arm in item.arms if self.failures.get(arm.name, 0) < MOST_FAILURES]
        place = self.places.get(item.number, len(self.places))
        runs: list[tuple[Arm, tuple[Run, ...]]] = []
        problems: dict[str, str] = {}
        for arm in rotated(present, repeat + place):
            try:
                runs.append((arm, all_turns(arm, item.prompt, item.settings, item.history)))
            except UserError as error:
                problems[arm.name] = str(error)
        yield from self._notes_on(
            [f"{name}: prompt {item.number} is left out. {problem}" for name, problem in problems.items()]
        )
        yield from self._gone(present, problems)
        if runs:
            self.places[item.number] = place
        # Only complete items are added, so Ctrl-C cannot leave a run without its baseline's.
        in_order = sorted(runs, key=lambda pair: present.index(pair[0]))
        for arm, _ in in_order:
            self._add(RaceResult(item, repeat, PairedRuns.of(arm, in_order, item.settings)))
        return sum(run.seconds for _, turns in runs for run in turns) if runs else None

    def _add(self, result: RaceResult) -> None:
        self.results.append(result)
        if (address := result.runs.ours[0].address) is not None and result.runs.comparisons:
            first = result.runs.comparisons[0]
            self.harness.state.servers.note_text(address.name, result.item.prompt.text, first.same)

    def _notes_on(self, sentences: Sequence[str]) -> Iterator[Note]:
        """Each sentence once. A file of prompts that are too long has only a few."""
        for sentence in sentences:
            if sentence not in self.notes and len(self.notes) <= MOST_NOTES:
                yield Note(sentence if len(self.notes) < MOST_NOTES else FURTHER)
                self.notes.add(sentence)

    def _gone(self, present: Sequence[Arm], problems: dict[str, str]) -> Iterator[Note]:
        """Count the failures of servers, and report those that do not answer any more."""
        for arm in present:
            if arm.strategy is None:
                self.failures[arm.name] = self.failures.get(arm.name, 0) + 1 if arm.name in problems else 0
                if self.failures[arm.name] == MOST_FAILURES:
                    yield Note(GONE.format(arm.name, MOST_FAILURES))
