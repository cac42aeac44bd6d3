"""What /verdict measures: a candidate beside its baseline, on which prompts, for how long, and with which figures.

A candidate that is chosen on the measured prompts would look better than it is, so it is chosen on a few others. Only
with too few prompts to divide are both done on the same prompts, in different repeats; then the answer holds for these
prompts only.
"""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from utils.bounds import MAX_SEED
from utils.commands.experiments import races
from utils.commands.experiments.speed_model import bottleneck
from utils.commands.shared.result_tables import NOTHING, ResultColumn, ResultTable, Row, figure
from utils.comparison import speed_claims as claims
from utils.comparison.arms import Arm, complete
from utils.config.settings import Settings, setting_fields
from utils.errors import UserError
from utils.metrics.intervals import speedup_interval
from utils.metrics.results import Clock
from utils.models.sources import parse_path
from utils.prompts.prompt_files import Prompt, read_prompts, spaced, tasks_in_turn
from utils.text import byte_size

BUILT_IN = "builtin"  # the argument that chooses the built-in prompts
FOLDER = Path(__file__).parent
FEW = 5  # this many prompts or fewer are not divided
MOST_TUNING = 3
MOST_MEASURED = 24  # of more prompts, this many are measured, evenly spaced
TUNING_SHARE = 4  # one of this many prompts is for tuning
SELECTION_SECONDS = 20.0  # no replay or trial begins after this, counted from the end of the warm-up
TOTAL_SECONDS = 150.0  # a further pass begins only if it ends before this
RUN_SECONDS = 4.5  # limit for a run by the target alone, which bounds its length
LENGTHS = (16, 32, 64, 128)
WANTED_PASSES = 6  # with few prompts, runs may take longer than RUN_SECONDS, as long as this many passes fit
ENOUGH_PROMPTS = 6  # a first pass with this many prompts may end early
LONGEST_SECONDS = 2 * TOTAL_SECONDS  # limit for a first pass with ENOUGH_PROMPTS
NARROW = 1.06  # an interval is narrow if the ratio of its ends is below this
MIN_PASSES = 2  # minimum for several prompts if the answer is for these prompts only
MOST_PASSES = 20
PROVISIONAL = 3  # runs needed to show an interval
WARM_UP_TOKENS = 2
NO_SPEEDUP = "no speed-up could be measured: {} or its baseline gives neither token ids nor usage figures."
Figures = dict[str, Any]  # of the candidate


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompts of one verdict.

    `source` describes the prompts, in plural. A candidate is chosen on the first turns of the `tuning` prompts, which
    differ from the measured ones if `divided`. `left_out` is the number of prompts beyond the maximum.
    """

    source: str
    measured: tuple[Prompt, ...]
    tuning: tuple[Prompt, ...]
    divided: bool = True
    left_out: int = 0


def plan_prompts(argument: str, typed: Sequence[str]) -> PromptPlan:
    """The prompts of the argument, else the typed ones, else the built-in ones. Raises UserError for a bad file."""
    if argument == BUILT_IN or not (argument or typed):
        tuning = tuple(read_prompts(FOLDER / "tuning.jsonl"))
        return PromptPlan("built-in prompts", tasks_in_turn(read_prompts(FOLDER / "prompts.jsonl")), tuning)
    if not argument:
        return divide("prompts of this session", [Prompt(text) for text in dict.fromkeys(typed)])
    path = parse_path(argument)
    return divide(f"prompts of {path.name}", list(dict.fromkeys(read_prompts(path))))


def divide(source: str, prompts: Sequence[Prompt]) -> PromptPlan:
    """Divide prompts into measured ones and a few for tuning, if there are enough.

    Tuning prompts are evenly spaced, and no task loses its first prompt to them, so that every task gets an answer.
    """
    divided, first = len(prompts) > FEW, {prompt.task: prompt for prompt in reversed(prompts)}
    spare = [prompt for prompt in prompts if prompt is not first[prompt.task]] if divided else prompts
    chosen = spaced(spare or prompts, min(MOST_TUNING, len(prompts) // TUNING_SHARE) if divided else MOST_TUNING)
    others = [prompt for prompt in prompts if prompt not in chosen] if divided else prompts
    measured = tasks_in_turn(spaced(others, MOST_MEASURED)) if divided else tuple(prompts)
    tuning = tuple(replace(prompt, later=()) for prompt in chosen)
    return PromptPlan(source, measured, tuning, divided, len(others) - len(measured))


def started_clock() -> Clock:
    began = time.monotonic()
    return lambda: time.monotonic() - began


def run_seconds(prompts: int) -> float:
    """The longest run by the target alone. With fewer prompts it is longer: short runs miss the end of an answer."""
    return max(RUN_SECONDS, (TOTAL_SECONDS - 1.5 * SELECTION_SECONDS) / (2 * WANTED_PASSES * prompts))


def run_length(step: float, longest: int, seconds: float = RUN_SECONDS) -> int:
    """The number of new tokens of one run: the largest of a few lengths that fits into the time, at most `longest`.

    `step` is the time of a decode step in seconds.
    """
    return min(longest, max((length for length in LENGTHS if length * step <= seconds), default=LENGTHS[0]))


@dataclass(slots=True)
class Measurement:
    """Passes over all prompts, until the answer is clear.

    The items of `race` have two arms, the baseline and the candidate, which `label` names. `divided` is True if the
    answer holds for other prompts of this kind, not only for these. `dropped` are prompts that cannot be run any more.
    """

    race: races.ArmRace
    label: str
    divided: bool
    clock: Clock
    dropped: set[int] = field(default_factory=set)

    @property
    def candidate(self) -> Arm:
        return self.race.items[0].arms[1]

    @property
    def settings(self) -> Settings:
        return self.race.items[0].settings

    @property
    def running(self) -> list[races.RaceItem]:
        return [item for item in self.race.items if item.number not in self.dropped]

    @property
    def pairs(self) -> list[races.RaceResult]:
        """The candidate's results beside the baseline's, in the order of the prompts."""
        pairs = [one for one in self.race.results if one.arm is self.candidate and one.theirs]
        return sorted(pairs, key=lambda one: one.item.number)

    @property
    def baseline_results(self) -> list[races.RaceResult]:
        places = {(one.item.number, one.repeat) for one in self.pairs}
        own = (one for one in self.race.results if one.arm is not self.candidate)
        return [one for one in own if (one.item.number, one.repeat) in places]

    @property
    def speedups(self) -> list[list[float]]:
        """The speed-ups of the repeats of each measured prompt."""
        return races.speedups_by_prompt(self.pairs)

    @property
    def is_repeated(self) -> bool:
        """Whether the answer holds for these prompts only, and each of them was repeated.

        An interval over prompts also holds for these prompts, but it is wider. It serves until all were repeated.
        """
        counts = Counter(one.item.number for one in self.pairs)
        return not self.divided and min(counts.values(), default=0) > 1

    def run(self) -> None:
        """Run passes until the interval is narrow or the time is over. Raises UserError if nothing can be measured."""
        began, ended = self.clock(), False
        for passed in range(MOST_PASSES):
            for place, item in enumerate(self.running):
                # A slow machine ends the first pass early, after one prompt of each task.
                if not passed and len(self.speedups) >= ENOUGH_PROMPTS and self.clock() > LONGEST_SECONDS:
                    return
                self.race.harness.progress(self._progress(passed, place, began))
                self._measure(item, passed)
                if ended := any(map(self.race.is_gone, item.arms)):
                    break
            if not self.pairs:
                raise UserError(f"none of the prompts could be measured. {' '.join(self.race.notes[:1])}")
            if not self.speedups:
                raise UserError(NO_SPEEDUP.format(self.label))
            if ended or not self.running or self._is_enough(passed + 1, began):
                return

    def _is_enough(self, passes: int, began: float) -> bool:
        """Whether the measurement can end after this many passes, the first of which began at `began`."""
        interval, seconds = speedup_interval(self.speedups, these_prompts=self.is_repeated), self.clock()
        if seconds + (seconds - began) / passes > TOTAL_SECONDS:
            return True
        # An answer needs MIN_VALUES speed-ups, however narrow an interval of fewer is.
        least = max(1 if self.divided else MIN_PASSES, ceil(claims.MIN_VALUES / len(self.speedups)))
        return passes >= least and interval.high / max(interval.low, 1e-9) < NARROW

    def _measure(self, item: races.RaceItem, passed: int) -> None:
        """Run a prompt by both arms, or drop the prompt if one of them cannot run it."""
        finished = len(self.pairs)
        if not passed and self.candidate.strategy is not None:
            # The first prefill of a length may be slow, and must not count against the first run.
            with suppress(UserError):
                complete(self.candidate.run(item.prompt.text, replace(item.settings, length=WARM_UP_TOKENS)))
        # Each pass has other random numbers: repeats of a sampled text must show how much such texts differ.
        settings = replace(item.settings, seed=(item.settings.seed + 1 + passed) % (MAX_SEED + 1))
        self.race.run(replace(item, settings=settings), passed)
        if len(self.pairs) == finished:
            self.dropped.add(item.number)

    def _progress(self, passed: int, place: int, began: float) -> str:
        """The interval so far, an estimate of the remaining time, and the current prompt."""
        prompts, parts = len(self.running), []
        if self.speedups:
            interval = speedup_interval(self.speedups, these_prompts=self.is_repeated)
            shown = len(self.pairs) >= PROVISIONAL and interval.is_bounded
            bounds = f" (95 % interval {interval.low:.2f} to {interval.high:.2f})" if shown else ""
            parts.append(f"{interval.estimate:.2f}x so far{bounds}")
            left = max(0.0, TOTAL_SECONDS - (self.clock() - began))
            parts += [f"about {left:.0f} s left"] if left else []
        where = f"prompt {place + 1} of {prompts}{f', pass {passed + 1}' if passed else ''}"
        return " · ".join([*parts, f"{self.label}, {where if prompts > 1 else f'repeat {passed + 1}'}"])

    def candidate_row(self, plan: PromptPlan, settings: Settings) -> Figures:
        """The figures that every candidate has. `settings` are the session's."""
        pairs, repeated = self.pairs, self.is_repeated
        by_task = list(races.race_rows(pairs, [self.candidate], these_prompts=repeated))
        whole = by_task[-1]
        return {
            **whole,
            "runs": sum(len(one.ours) for one in pairs),
            "pairs": len(pairs),
            "passes": 1 + max(one.repeat for one in pairs),
            "interval_over": "repeats" if repeated or whole["prompts"] == 1 else "prompts",
            "tasks": {one["task"]: one for one in by_task[:-1] or by_task if one["speedup"]},
            "conversations": len({one.item.number for one in pairs if len(one.ours) > 1}),
            "divided": plan.divided,
            "source": plan.source,
            "left_out": plan.left_out,
            "turns": settings.keeps_conversation,
            "processor": setting_fields()["processor"].show(settings),
            "length": self.settings.length,
            "length_setting": settings.length,
        }


SMALL_GAIN = 1.03  # smaller speed-ups are not worth a recommendation
LITTLE_GAIN, MIN_PROMPTS = 1.02, 3  # a task does not profit if its interval over so many prompts is below this gain


def verdict_table(*, servers: bool) -> ResultTable:
    """A column of the screen for the baseline and one for the candidate; each heading is a line."""
    memory = [] if servers else [ResultColumn("extra weights", _memory)]
    return ResultTable(
        figure("", "name"),
        ResultColumn("whole run", _whole_run),
        races.spread("decoding", "decode_tokens_per_second", "{:.1f} tokens/s"),
        races.spread("time to first token", "first_token_seconds", "{:.0f} ms", scale=1000),
        ResultColumn("acceptance", _acceptance),
        figure("tokens per forward", "tokens_per_target_forward", "{:.2f}"),
        *memory,
    )


def _whole_run(row: Row) -> str:
    if row["pooled_tokens_per_second"] is None:
        return NOTHING
    speed = f"{row['pooled_tokens_per_second']:.1f} tokens/s"
    return f"{speed}, {row['speedup']:.2f}x{claims.star(row)}" if "candidate" in row else speed


def _acceptance(row: Row) -> str:
    return f"{row['accepted']}/{row['drafted']} = {row['acceptance_rate']:.3f}" if row["drafted"] else NOTHING


def _memory(row: Row) -> str:
    memory = row.get("extra_memory")
    return NOTHING if memory is None else byte_size(memory) if memory else "none"


def sentences(row: Row) -> list[str]:
    """All sentences, the answer first. `row` has the figures of the candidate."""
    lines = [answer(row), conditions(row), *tasks(row)]
    lines += [f"The bottleneck is {bottleneck(row)}."] if row.get("bottleneck") else []
    return [*lines, *races.other_reasons([row]), *_selection(row), *row["skipped"], *_apply(row)]


def answer(row: Row) -> str:
    """Whether it helps, with which settings, and whether the text is the baseline's."""
    name, verdict, same = row["candidate"], row["verdict"], races.texts(row)
    these = "this prompt" if row["prompts"] == 1 else f"these {row['prompts']} prompts"
    here = "here" if row["divided"] else f"on {these}"
    per_prompt = row["interval_over"] == "prompts"
    over = f"{row['prompts']} prompts" if per_prompt else f"{row['pairs']} repeats"
    ratio = claims.claim_text(row, f" over {over}")
    if row["interval"] is None or verdict == claims.TOO_FEW:
        so_far = f"{name} was about {claims.rough(row['speedup'])}{claims.star(row)} {claims.baseline_name(row)} so far"
        if row["without_gain"]:
            so_far = f"the drafts of {name} have saved no forward pass so far"
        return f"Too few runs for an answer: {so_far}, {same}."
    if row["without_gain"]:
        return (
            f"Speculative decoding does not help {here}: the drafts of the best candidate, {name}, saved no forward "
            f"pass of the target (1.00 tokens each); {ratio}, {same}."
        )
    if verdict == claims.SLOWER:
        return f"Speculative decoding does not help {here}: the best candidate, {name}, is slower: {ratio}, {same}."
    if helps(row):
        return f"{'Use' if row['divided'] else f'On {these}, use'} {name}: {ratio}, {same}."
    if verdict == claims.FASTER:
        return f"Speculative decoding hardly helps {here}: {name} is {ratio}, {same}."
    found = f"{name} is {ratio}, {claims.no_difference(row)}; {same}."
    return f"Speculative decoding makes no measurable difference {here}: {found}"


def helps(row: Row) -> bool:
    return bool(row["verdict"] == claims.FASTER and row["speedup"] >= SMALL_GAIN)


def conditions(row: Row) -> str:
    servers = "baseline" in row
    what = "requests, one at a time" if servers else "runs with prefill"
    passes = f"{row['passes']} pass{'es' * (row['passes'] > 1)} over {row['prompts']} {row['source']}"
    where = passes if row["prompts"] > 1 else f"{row['pairs']} repeats"
    shorter = f" (/length is {row['length_setting']})" if row["length"] < row["length_setting"] else ""
    further = {
        f"{row['conversations']} of the prompts were conversations of several turns.": row["conversations"],
        "Every prompt began a new conversation.": row["turns"] and not servers,
        f"{row['left_out']} further prompts were left out.": row["left_out"],
    }
    measured = (
        f"Measured: whole {what}, up to {row['length']} new tokens{shorter}, {row['processor']}, {where}, in turns "
        f"with {claims.baseline_name(row)}."
    )
    return " ".join([measured, *(sentence for sentence, applies in further.items() if applies)])


def tasks(row: Row) -> list[str]:
    """The speed-up of each task with its interval, and the tasks whose interval excludes a gain.

    With two prompts an interval is too narrow too often: if prompts differ by 15 %, one of six tasks with a gain of
    1.10 is denied it in 8 % of verdicts, and with three prompts in less than 3 %.
    """
    known = row["tasks"]
    if len(known) < 2:
        return []
    lines = [f"By task: {', '.join(f'{task} {races.with_bounds(one)}' for task, one in known.items())}."]
    decided = row["interval"] is not None and row["verdict"] != claims.TOO_FEW
    enough = {
        task: one for task, one in known.items() if one["prompts"] >= MIN_PROMPTS and one["verdict"] != claims.TOO_FEW
    }
    without = [task for task, one in enough.items() if decided and one["interval"][1] < LITTLE_GAIN]
    return [*lines, *([f"It does not help with {', '.join(without)}."] if without else [])]


def _selection(row: Row) -> list[str]:
    shown = ", ".join(f"{name} {speedup:.2f}x" for name, speedup in row["considered"].items())
    on = "other prompts" if row["divided"] else "runs that are not counted"
    how = "Measured" if "baseline" in row else "Predicted"
    lines = [f"{how} on {on}: {shown}."] if len(row["considered"]) > 1 else []
    if row.get("not_tried"):
        lines.append(f"There was no time to replay: {', '.join(row['not_tried'])}.")
    return lines


def _apply(row: Row) -> list[str]:
    if "baseline" in row:
        return []
    if helps(row):
        commands = " and ".join(row["commands"])
        return [f"To use it here: /verdict apply, or {commands}." if commands else "This session uses it already."]
    return ["/verdict apply turns speculative decoding off here."] if row["verdict"] == claims.SLOWER else []
