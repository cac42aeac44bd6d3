"""Runs prompts by arms in turns, for /race, /sweep and /verdict: figures, a table and sentences of the results.

The speed of a machine drifts. So arms are warmed up first, take turns at going first, and are compared within a repeat
of a prompt only. What Ctrl-C or an error ends keeps the finished prompts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Self, TypeVar

from utils.commands.shared.result_tables import NOTHING, ResultColumn, ResultTable, Row, figure, grouped, marked
from utils.comparison import speed_claims as claims
from utils.comparison.arms import PREFIX, Arm, LocalArm, Run, ServerArm, compare_run, complete, text_figures
from utils.comparison.harness import Harness
from utils.comparison.records import Countdown, gathered, shortened
from utils.comparison.warm_up import shortened as warm_up_settings
from utils.comparison.warm_up import warm_up
from utils.config.settings import Settings
from utils.decode.model_session import ModelSession
from utils.errors import UserError, naming
from utils.metrics.results import Comparison
from utils.prompts.conversation import Turn, Turns
from utils.prompts.prompt_files import ALL_TASKS, Prompt
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


def then_rows(work: Callable[[], None], rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Do the work, and yield the rows of finished runs, even if Ctrl-C or an error ends the work."""
    try:
        work()
    finally:  # Ctrl-C is raised again once the rows are consumed
        yield from rows()


def local_arms(harness: Harness, settings: Settings) -> list[Arm]:
    """The enabled strategies. Raises UserError if there is none."""
    return [harness.arm(strategy) for strategy in harness.enabled(settings)]


def server_arms(harness: Harness, servers: Sequence[Connection]) -> list[Arm]:
    """The servers, after the local target if one of them is compared with it."""
    needs_target = harness.has_pair and any(server.address.baseline == TARGET for server in servers)
    own = [harness.arm(harness.baseline)] if needs_target else []
    return [*own, *(ServerArm(server, harness.loaded) for server in servers)]


def requested(settings: Settings, prompt: Prompt) -> Settings:
    """The settings with the fields of a prompt's request, if it has any."""
    return replace(settings, request=prompt.request) if prompt.request else settings


def check_prompt(harness: Harness, prompt: Prompt, settings: Settings) -> None:
    """Refuse a prompt that the target cannot take, once instead of by every strategy. Raises UserError."""
    ids = harness.prompt_ids(prompt.text, requested(settings, prompt))
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
            with naming(f"Turn {len(runs) + 1}") if runs else nullcontext():
                runs.append(complete(arm.run(text, self.settings, history)))
            history = (*history, Turn(text, runs[-1].text))
        return tuple(runs)


@dataclass(frozen=True, slots=True)
class RaceResult:
    """All turns of an item by one arm in one repeat, counted from 0, and those of its baseline, if it has answered."""

    item: RaceItem
    repeat: int
    arm: Arm
    ours: tuple[Run, ...]
    theirs: tuple[Run, ...] = ()
    comparisons: tuple[Comparison, ...] = ()

    @classmethod
    def of(cls, item: RaceItem, repeat: int, runs: Sequence[tuple[Arm, tuple[Run, ...]]]) -> list[Self]:
        results = []
        for arm, ours in runs:
            theirs = next((turns for _, turns in runs if turns[0].name == ours[0].baseline), ())
            pairs = zip(ours, theirs, strict=False)
            compared = tuple(compare_run(run, (run, other), item.settings) for run, other in pairs)
            results.append(cls(item, repeat, arm, ours, theirs, compared))
        return results

    @property
    def speed(self) -> float | None:
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

    A count is unknown if one answer's is. An answer without figures of drafts among others with figures had no drafts,
    and as many forward passes as tokens, unless its figures are not its own.
    """
    are_own = all(run.acceptance is None or run.acceptance.valid for run in runs)
    if are_own and any(run.drafted is not None for run in runs):
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
    run, in their order. The notes of a silent race are not shown.
    """

    harness: Harness
    items: Sequence[RaceItem]
    repeats: int = 1
    is_silent: bool = False
    results: list[RaceResult] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)

    def run_all(self) -> None:
        """Warm up, then run every item `repeats` times. Raises UserError if nothing could be run."""
        if any(item.prompt.later and not item.settings.uses_chat for item in self.items):
            self.harness.note(ONLY_FIRST_TURNS)
        self.harness.progress("warming up ...")
        self._warm_up()
        # A long prompt takes longer than a short one.
        countdown, total, spent = Countdown(self.harness.progress), len(self.items) * self.repeats, 0
        whole = self.repeats * sum(len(item.prompt.text) for item in self.items)
        # Whole passes over the items, so that a machine that slows down affects all of them alike.
        for repeat in range(self.repeats):
            # The prompts of a file keep their order; the values of a sweep take turns.
            for place, item in enumerate(self.items if self._has_file else rotated(self.items, repeat)):
                done = repeat * len(self.items) + place
                where = f"{item.group}, " if len({one.group for one in self.items}) > 1 else ""
                where += f"{done + 1} of {total}" if self._has_file else f"repeat {repeat + 1} of {self.repeats}"
                countdown.progress(spent / whole, where)
                self.run(item, repeat)
                spent += len(item.prompt.text)
        if not self.results:
            raise UserError("none of the prompts could be run.")

    @property
    def _has_file(self) -> bool:
        return len({item.number for item in self.items}) > 1

    def _warm_up(self) -> None:
        """Run every arm for a few tokens, because the first run may be slow."""
        if self._has_file and any(arm.strategy is not None for arm in self.items[0].arms):
            warm_up(self.harness, self.items[0].settings)
        for item in self.items[:1] if self._has_file else self.items:
            for arm in item.arms:
                if not self._has_file or arm.strategy is None:
                    with suppress(UserError):  # reported when the prompt is run
                        complete(arm.run(item.prompt.text, warm_up_settings(item.settings), item.history))

    def run(self, item: RaceItem, repeat: int) -> None:
        """Run an item by all arms that are present."""
        try:
            if self._has_file and any(arm.strategy is not None for arm in item.arms):
                check_prompt(self.harness, item.prompt, item.settings)
        except UserError as error:
            self._note(f"Prompt {item.number} is left out. {error}")
            return
        present = [arm for arm in item.arms if not self.is_gone(arm)]
        place = self.places.get(item.number, len(self.places))
        runs: dict[str, tuple[Run, ...]] = {}
        for arm in rotated(present, repeat + place):
            try:
                runs[arm.name] = item.answers(arm)
            except UserError as error:
                self._note(f"{arm.name}: prompt {item.number} is left out. {error}")
            if arm.strategy is None:
                self.failures[arm.name] = 0 if arm.name in runs else self.failures.get(arm.name, 0) + 1
        for arm in present:
            if self.is_gone(arm):
                self._note(GONE.format(arm.name, MOST_FAILURES))
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
        return self.failures.get(arm.name, 0) >= MOST_FAILURES

    def _note(self, sentence: str) -> None:
        """Each sentence once. A file of prompts that are too long has only a few."""
        if sentence not in self.notes and len(self.notes) <= MOST_NOTES:
            sentence = sentence if len(self.notes) < MOST_NOTES else FURTHER
            self.notes.append(sentence)
            if not self.is_silent:
                self.harness.note(sentence)


REPEATS = 5  # of the last prompt
SHOWN_TASK = 16  # characters of a task in the table
SHOWN_PROMPTS = 8
NO_TARGET = "Nothing to compare with: /target on adds speed-ups."
NO_RIVAL = "No enabled strategy drafts, so there is nothing to compare."
UNPAIRED = "{}: no speed-up over {}. It needs answers of both to the same prompts, token counts, and one host."
OTHER_REASON = "{}: no drafts of these answers are known, so the difference may have another reason than speculation."
MORE_REPEATS = f"Next: /race {REPEATS} tells whether the difference is real."
OWN_PROMPTS = "Next: /whatif predicts other values of /gamma, and /race 3 FILE measures your own prompts."
LIMITS = "Next: /why shows what limits the speed-up of a prompt."


def race_table(items: Sequence[RaceItem], *, servers: bool = False) -> ResultTable:
    """The columns of a race: of one prompt with its repeats, or of the prompts of a file with their texts."""
    several = len({item.number for item in items}) > 1
    tasks = len({item.group for item in items}) > 1
    both = servers or several
    columns = [
        (tasks, ResultColumn("task", lambda row: shortened(row["task"], SHOWN_TASK))),
        (True, figure("server" if servers else "strategy", "strategy")),
        (several and not servers, figure("prompts", "prompts", drop=1)),
        (several, marked(figure("tokens/s", "pooled_tokens_per_second", "{:.1f}", drop=0 if servers else 7))),
        (not several, marked(spread("tokens/s", "tokens_per_second", "{:.1f}"))),
        (not both, RANGE),
        (not several or servers, spread("time to first token", "first_token_seconds", "{:.0f} ms", scale=1000, drop=4)),
        (not several or servers, spread("decoding", "decode_tokens_per_second", "{:.1f}", drop=3)),
        (True, ResultColumn("speed-up", claims.speedup_text)),
        (True, ResultColumn("95 % interval", lambda row: claims.interval_text(row["interval"]))),
        (both, figure("acceptance", "acceptance_rate", "{:.3f}", drop=6)),
        (both, figure("tokens/forward", "tokens_per_target_forward", "{:.2f}", drop=2 if servers else 0)),
        (both, SAME_TEXT),
        (not both, figure("verdict", "verdict")),
    ]
    return ResultTable(*(column for shown, column in columns if shown))


def _same_text(row: Row) -> str:
    return f"same {row['same_texts']}/{row['compared_texts']}" if row["compared_texts"] else NOTHING


SAME_TEXT = ResultColumn("text", _same_text)


def spread(heading: str, key: str, form: str, *, scale: float = 1, drop: int = 0) -> ResultColumn:
    def shown(row: Row) -> str:
        known = [value for value in row[key] if value]
        return form.format(scale * median(known)) if known else NOTHING

    return ResultColumn(heading, shown, drop)


def _range(row: Row) -> str:
    """The lowest and the highest speed, without decimals from 100 on."""
    values = row["tokens_per_second"]
    form = ".1f" if max(values) < 100 else ".0f"
    return f"{min(values):{form}}-{max(values):{form}}"


RANGE = ResultColumn("range", _range, 5)


def race_rows(
    results: Sequence[RaceResult], arms: Sequence[Arm], *, these_prompts: bool = False
) -> Iterator[dict[str, Any]]:
    """The figures of each group and arm. If there are several groups, one for all prompts comes last."""
    groups = list(dict.fromkeys(result.item.group for result in results))
    if len(groups) > 1:
        # Prompts without a task have this name too, and their group must not appear twice.
        groups = [*(group for group in groups if group != ALL_TASKS), ALL_TASKS]
    for group in groups:
        for arm in arms:
            chosen = [one for one in results if one.arm.name == arm.name and group in (ALL_TASKS, one.item.group)]
            if chosen:
                yield race_row(group, chosen, these_prompts=these_prompts)


def race_row(task: str, group: Sequence[RaceResult], *, these_prompts: bool = False) -> dict[str, Any]:
    """The figures of one arm. With `these_prompts`, the interval covers other repeats of these prompts only."""
    arm, settings, first = group[0].arm, group[0].item.settings, group[0].ours[0]
    lossless = arm.strategy is None or arm.strategy.lossless
    runs = [run for result in group for run in result.ours]
    total, groups = pooled_run(runs), speedups_by_prompt(group)
    per_forward = total.tokens_per_target_forward or None
    # Only drafts can save forward passes, so tokens per forward mean nothing for other arms.
    drafts = arm.strategy.drafts if arm.strategy is not None else bool(total.drafted)
    claim = claims.speed_claim(
        groups,
        baseline=first.name == first.baseline,
        tokens_per_forward=per_forward if drafts else None,
        these_prompts=these_prompts,
    )
    return {
        "task": task,
        "strategy": arm.name,
        **({} if first.is_local else _server_figures(group)),
        "prompts": len({result.item.number for result in group}),
        "new_tokens": total.new_tokens,
        "seconds": total.seconds,
        "tokens_per_second": [speed for result in group if (speed := result.speed)],
        "pooled_tokens_per_second": total.tokens_per_second or None,
        "first_token_seconds": [run.first_seconds for run in runs if run.first_seconds is not None],
        "decode_tokens_per_second": [run.decode_tokens_per_second for run in runs if run.decode_tokens_per_second],
        "speedups": [speedup for speedups in groups for speedup in speedups],
        "speedups_by_prompt": groups,
        **claim,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "acceptance_rate": total.acceptance_rate,
        "tokens_per_target_forward": per_forward,
        "lossless": lossless,
        "must_be_the_targets": arm.strategy is not None and arm.strategy.repeats_target(settings),
        "engine_verified": isinstance(arm, LocalArm) and arm.pair.engine.state.verified,
        **text_figures((result.item.number, result.same) for result in group if lossless),
    }


def _server_figures(group: Sequence[RaceResult]) -> dict[str, Any]:
    """The figures that only servers have: the baseline, and what else the server did meanwhile."""
    runs = [run for result in group for run in result.ours]
    others = [run.other_tokens for result in group for run in result.theirs]
    return {
        "baseline": runs[0].baseline,
        "other_tokens": [run.other_tokens for run in runs],
        "disturbed": any(run.other_tokens for run in runs) or any(others),
        "acceptance_unknown": claims.reasons_unknown(run.acceptance for run in runs),
    }


def speedups_by_prompt(group: Sequence[RaceResult]) -> list[list[float]]:
    known = ((result.item.number, speedup) for result in group if (speedup := result.speedup))
    return list(gathered(known).values())


def race_conclusion(rows: Sequence[Row], prompts: int | None = None) -> list[str]:
    """Which arms are faster, over all prompts and by task, whether texts are equal, and what to do next.

    `prompts` is the number of prompts of a file that should be run, or None for the last prompt.
    """
    tasks = grouped(rows, "task")
    overall = list(tasks.values())[-1]  # all prompts, or the only task
    finished = max(row["prompts"] for row in overall)
    lines = [f"{finished} of {prompts} prompts were run."] if prompts and finished < prompts else []
    lines += [sentence for row in overall if (sentence := claims.speed_sentence(row))]
    lines += best_of_each(dict(list(tasks.items())[:-1]))
    lines += other_reasons(overall)
    servers = "baseline" in overall[0]
    if servers or prompts:  # the texts of the last prompt have been compared before
        compared = (row for row in overall if row["compared_texts"] and row["verdict"] != claims.BASELINE)
        lines += [f"{row['strategy']}: {texts(row)}." for row in compared]
    return [*lines, *(_missing_baselines(overall) if servers else _next(overall, of_file=bool(prompts)))]


def best_of_each(groups: Mapping[str, Sequence[Row]]) -> list[str]:
    """A sentence on the fastest strategy of each task or value. Those with too few runs share one.

    Only strategies that preserve the target's distribution count, and one without a gain counts last.
    """
    lines, undecided = [], []
    for name, rows in groups.items():
        known = [
            row for row in rows if row["lossless"] and row["verdict"] != claims.BASELINE and row["speedup"] is not None
        ]
        if not known:
            continue
        best = max(known, key=lambda row: (not row["without_gain"] or row["speedup"] <= 1, row["speedup"]))
        is_noise = best["without_gain"] and best["speedup"] > 1
        if best["verdict"] == claims.TOO_FEW and not is_noise:
            undecided.append(f"{name}, {best['strategy']} {with_bounds(best)}")
        else:
            lines.append(f"{name}: {claims.speed_sentence(best)}")
    return [*([f"Too few runs to tell: {'; '.join(undecided)}."] if undecided else []), *lines]


def with_bounds(row: Row) -> str:
    """The speed-up of a task with its interval, if that has bounds."""
    if row["interval"] is None:
        return f"about {claims.rough(row['speedup'])}"
    return f"{row['speedup']:.2f}x ({row['interval'][0]:.2f} to {row['interval'][1]:.2f})"


def other_reasons(rows: Sequence[Row]) -> list[str]:
    doubtful = (row for row in rows if "baseline" in row and row["verdict"] == claims.FASTER and not row["drafted"])
    return [OTHER_REASON.format(row["strategy"]) for row in doubtful]


def texts(row: Row) -> str:
    """Whether the texts are the baseline's, and who explains a difference."""
    others = row["other_texts_at_prompts"]
    name = str(row["strategy"]).removeprefix(PREFIX)
    if "baseline" in row:
        if not row["compared_texts"]:
            return f"texts were not compared, because they are sampled: /server text {name} compares greedy ones"
        why = f"/server text {name} examines these"
    elif not row["must_be_the_targets"]:
        return "same distribution of texts as the target's, and with /verify coupled the same texts"
    else:
        # With a verified engine, logits do not depend on the verify width, so rounding cannot be the reason.
        why = "this should not happen" if row["engine_verified"] else "this engine does not guarantee equal bits"
        why += "; send such a prompt, then /texts explains it"
    identical = f"text identical on {row['same_texts']} of {row['compared_texts']}"
    numbers = ", ".join(map(str, others[:SHOWN_PROMPTS])) + (", ..." if len(others) > SHOWN_PROMPTS else "")
    return f"{identical} (not on prompt {numbers}: {why})" if others else identical


def _missing_baselines(rows: Sequence[Row]) -> list[str]:
    """The servers without a speed-up, and why, and what limits their figures."""
    notes = [note for row in rows for note in claims.server_notes(row["strategy"], row)]
    if all(row["baseline"] is None for row in rows):
        return [claims.NO_BASELINE, *notes]
    unpaired = (row for row in rows if row["baseline"] and not row["speedups"])
    return [*(UNPAIRED.format(row["strategy"], row["baseline"]) for row in unpaired), *notes]


def _next(rows: Sequence[Row], *, of_file: bool) -> list[str]:
    rivals = [row for row in rows if row["lossless"] and row["verdict"] != claims.BASELINE]
    if not rivals or all(row["speedup"] is None for row in rows):
        return [NO_TARGET if rivals else NO_RIVAL]
    verdicts = {row["verdict"] for row in rivals}
    if of_file and claims.FASTER not in verdicts and verdicts != {claims.SLOWER}:
        return ["Next: more prompts, or more repeats (/race 3 FILE), narrow the intervals."]
    if not of_file and claims.TOO_FEW in verdicts:
        return [MORE_REPEATS]
    return [OWN_PROMPTS if claims.FASTER in verdicts and not of_file else LIMITS]
