"""What may be claimed about a measured speed-up, and its wording: one rule for all reports.

A strategy is called faster or slower only if the 95 % interval of its speed-ups excludes 1 and its repeats agree.
Without accepted drafts it cannot be faster, whatever the clock shows.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import comb, inf
from typing import Any

from utils.comparison.arms import PREFIX, ComparedRun, Run
from utils.comparison.harness import LastPrompt
from utils.comparison.records import Row
from utils.decode.steps import FinishReason
from utils.metrics.intervals import FASTER as FASTER
from utils.metrics.intervals import SLOWER as SLOWER
from utils.metrics.intervals import UNCLEAR, speedup_interval
from utils.servers.address import TARGET, other_machine
from utils.servers.kinds.completion import ServerAcceptance
from utils.text import count_of

BASELINE, TOO_FEW, NOT_DISTINGUISHABLE = "baseline", "too few", "not distinguishable"
MIN_VALUES = 5  # minimum number of speed-ups for a verdict
MAX_CHANCE = 1 / 16  # probability that equal strategies agree by chance: five repeats that all agree
NO_GAIN = 1.005  # fewer tokens per target forward are shown as 1.00
ROUGH = 0.1  # smaller differences need a second decimal
STAR = "*"  # marks the figures of a server that had other requests
OTHER_REQUESTS = (
    STAR
    + " {} had other requests during {} of {} ({} more), so its speed and what is compared with it are not its own."
)
NO_GAIN_SENTENCE = "with 1.00 tokens per target forward its drafts saved nothing"


def speed_claim(
    groups: Sequence[Sequence[float]],
    *,
    baseline: bool = False,
    tokens_per_forward: float | None = None,
    these_prompts: bool = False,
) -> dict[str, Any]:
    """The claim for speed-ups over a baseline, grouped by prompt, as figures for the JSON record.

    `verdict` is BASELINE, TOO_FEW, FASTER, SLOWER or NOT_DISTINGUISHABLE, or "-" if there is nothing to compare. An
    unbounded interval is null, and the baseline has none. `without_gain` is True if the strategy drafts, but needs as
    many forward passes as the target alone; `tokens_per_forward` is None for strategies without drafts. With
    `these_prompts` the claim covers only other repeats of these prompts, as in `speedup_interval`.
    """
    groups = [positive for group in groups if (positive := [value for value in group if value > 0])]
    if not groups:
        return {"speedup": None, "interval": None, "verdict": "-", "without_gain": False}
    interval = speedup_interval(groups, these_prompts=these_prompts)
    without_gain = not baseline and tokens_per_forward is not None and tokens_per_forward < NO_GAIN
    verdict = interval.verdict
    if baseline:
        verdict = BASELINE
    elif sum(map(len, groups)) < MIN_VALUES:
        verdict = TOO_FEW
    # The repeats of one prompt must agree. Prompts may differ: the claim is about their mean.
    elif verdict == UNCLEAR or (len(groups) == 1 and not agree(groups[0])) or (without_gain and verdict == FASTER):
        verdict = NOT_DISTINGUISHABLE
    bounds = [interval.low, interval.high] if interval.is_bounded and not baseline else None
    return {"speedup": interval.estimate, "interval": bounds, "verdict": verdict, "without_gain": without_gain}


def agree(ratios: Sequence[float]) -> bool:
    """Whether the ratios agree on one side of 1 so clearly that chance does this at most once in 16 (a sign test)."""
    above, below = sum(ratio > 1 for ratio in ratios), sum(ratio < 1 for ratio in ratios)
    fewer = min(above, below) + len(ratios) - above - below  # ties count against both
    chance = 2 * sum(comb(len(ratios), count) for count in range(fewer + 1)) / 2 ** len(ratios)
    return bool(chance <= MAX_CHANCE)


def interval_text(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def speedup_text(row: Row) -> str:
    """The speed-up of a record in a table, a dash, or "noise" where drafts cannot have caused it."""
    if row["speedup"] is None:
        return "-"
    return "noise" if row["without_gain"] and row["speedup"] > 1 else f"{row['speedup']:.2f}x{star(row)}"


def star(row: Row) -> str:
    """Marks a speed-up over or of a server that had other requests."""
    return STAR if row.get("disturbed") else ""


def server_notes(name: str, row: Row, unit: str = "answer") -> list[str]:
    """What limits the figures of a server: other requests during its answers, and why its acceptance is unknown."""
    disturbed = [tokens for tokens in row["other_tokens"] if tokens]
    lines = [f"{name}: its acceptance is not known, because {reason}." for reason in row["acceptance_unknown"]]
    if not disturbed:
        return lines
    counted = count_of(len(row["other_tokens"]), unit), count_of(sum(disturbed), "token")
    return [OTHER_REQUESTS.format(name, len(disturbed), *counted), *lines]


def reasons_unknown(found: Iterable[ServerAcceptance | None]) -> list[str]:
    """Why figures of drafts are not valid, without the numbers, which differ between answers."""
    return sorted({one.note.partition(":")[0] for one in found if one is not None and not one.valid})


def rough(speedup: float) -> str:
    """A speed-up without an interval. Near 1 it has a second decimal, so that 1.05 does not become 1.1."""
    return f"{speedup:.{1 if abs(speedup - 1) >= ROUGH else 2}f}x"


def claim_text(row: Row, over: str = "") -> str:
    """The speed-up of a record with its interval: 1.52x target-only (95 % interval 1.41 to 1.63)."""
    text = f"{row['speedup']:.2f}x{star(row)} {baseline_name(row)}"
    if (interval := row["interval"]) is None:
        return text
    return f"{text} (95 % interval {interval[0]:.2f} to {interval[1]:.2f}{over})"


def speed_sentence(row: Row) -> str:
    """A sentence on the speed of a record's strategy. It is empty for the baseline and where nothing was compared."""
    name, verdict = row["strategy"], row["verdict"]
    if verdict in (BASELINE, "-"):
        return ""
    if row["without_gain"] and row["speedup"] > 1:
        return f"{name}: {NO_GAIN_SENTENCE}, so {row['speedup']:.2f}x is noise."
    if verdict == TOO_FEW:
        return f"{name}: about {rough(row['speedup'])}{star(row)} {baseline_name(row)}, but too few runs to tell."
    if verdict == NOT_DISTINGUISHABLE:
        return f"{name}: {claim_text(row)}, {no_difference(row)}."
    return f"{name} is {verdict}: {claim_text(row)}."


def no_difference(row: Row) -> str:
    """The words for a speed-up that is not distinguishable from 1."""
    low, high = row["interval"] or (0.0, inf)
    # An interval that excludes 1 would otherwise seem to contradict them.
    why = "" if low <= 1 <= high else ", because too many of its repeats are on the other side of 1"
    return f"not distinguishable from no difference{why}"


def baseline_name(row: Row) -> str:
    """What a speed-up is relative to. Only the records of servers name it."""
    return row.get("baseline") or "target-only"


EVEN = "about as fast as"
NEXT = {FASTER: "/race 5 checks it", EVEN: "/race 5 tells more"}  # what to type after the fastest run
NOTICEABLE = 0.05  # smaller differences between single runs are treated as noise
NO_TARGET = "Without target-only there is nothing to compare the speed with: /target on."
FAILED_TARGET = "Target-only did not finish, so there is nothing to compare the speed with."
NO_RIVAL = "Nothing with drafts ran, so there is no speed-up to report: /speculative on or /ngram on."
LIMIT = "{}: {:.2f}x was measured, but {:.2f} tokens per forward cannot make it so fast."
NOISE = "{}: no draft was accepted, so any difference in speed is noise or the cost of drafting."
NOT_COUNTED = "{} gives neither token ids nor usage figures, so its tokens and its speed are unknown."
NO_BASELINE = (
    "Speed-ups need a baseline: /server add NAME URL baseline=NAME says with which server another is compared."
)
OTHER_TEXT = "{0}: another text than {1} (a rounding tie? see /server text {2})."
NO_DRAFTS = "No draft was accepted, so any difference in speed is noise or the cost of drafting"


def ending(run: Run, length: int) -> str:
    """How a text ended. It is empty if the text ended by itself. `length` is the maximum number of new tokens."""
    if run.finish is not FinishReason.LENGTH:
        return "interrupted" if run.finish is FinishReason.INTERRUPTED else ""
    made = length if run.new_tokens is None else run.new_tokens
    return f"cut at {count_of(made, 'token')}{' (/length)' if made >= length else ': the context is full'}"


def credible_speedup(compared: ComparedRun) -> float | None:
    """The speed-up as far as accepted drafts explain it.

    A verify pass takes at least as long as a decode step, so tokens per target forward bound the speed-up of a run
    that samples from the target. The same holds for a server with drafts beside another server.
    """
    arm, run, comparison = compared
    if comparison.speedup is None:
        return None
    is_server = run.drafted and run.baseline != TARGET
    bounded = arm.strategy.lossless if arm.strategy is not None else is_server
    bound = run.tokens_per_target_forward if bounded else None
    return comparison.speedup if bound is None else min(comparison.speedup, bound)


def is_noise(compared: ComparedRun) -> bool:
    """Whether a run looks faster than its baseline although hardly a draft was accepted."""
    run = compared.run
    credible, measured = credible_speedup(compared), compared.comparison.speedup
    if credible is None or measured is None:
        return False
    if not run.is_local and run.accepted == 0 and run.drafted and measured > 1:
        return True
    # Both as in the table: 1.00x counts as no gain.
    return round(credible, 2) < round(measured, 2) and credible < 1 + NOTICEABLE


@dataclass(frozen=True, slots=True)
class Rival:
    """A run with drafts beside the target's. `factor` is its credible speed-up."""

    compared: ComparedRun
    factor: float

    @property
    def name(self) -> str:
        return self.compared.run.name

    @property
    def about(self) -> str:
        """The factor in words: "at most about" if accepted drafts explain less than was measured."""
        measured = self.compared.comparison.speedup or self.factor
        less = self.factor < measured and rough(self.factor) != rough(measured)
        return f"{'at most ' * less}about {rough(self.factor)}"

    @property
    def limit(self) -> str:
        """Why less is claimed than was measured. It is empty otherwise."""
        measured, bound = self.compared.comparison.speedup, self.compared.run.tokens_per_target_forward
        return LIMIT.format(self.name, measured, bound) if self.about.startswith("at most") else ""

    @property
    def speed(self) -> str:
        """FASTER, SLOWER or EVEN, or empty: without accepted drafts nothing explains the speed."""
        if not (self.compared.run.accepted or self.compared.run.forced):
            return ""
        return EVEN if abs(self.factor - 1) < NOTICEABLE else FASTER if self.factor > 1 else SLOWER


def summary(compared: Sequence[ComparedRun], planned: Collection[str], elsewhere: str = "") -> str:
    """Which strategies were faster than target-only and by about how much, whether texts are equal, and the next
    command.

    `planned` names the strategies that should run. `elsewhere` is a sentence on an engine in which the target alone
    would be faster.
    """
    if not compared:
        return ""  # every strategy has reported its error
    if not any(entry.run.new_tokens for entry in compared):
        return "No token was generated, so there is nothing to compare."
    finished = [entry for entry in compared if entry.run.finish is not FinishReason.INTERRUPTED]
    if not any(entry.run.name == TARGET for entry in finished):
        return FAILED_TARGET if TARGET in planned else NO_TARGET
    found = [
        Rival(entry, factor)
        for entry in finished
        if entry.arm.strategy is not None and entry.arm.strategy.lossless and entry.run.name != TARGET
        if (factor := credible_speedup(entry)) is not None
    ]
    if not found:
        return NO_RIVAL
    rivals = sorted(found, key=lambda rival: -rival.factor)
    sentence = f"{', and '.join(filter(None, (_speeds(rivals), _texts(rivals))))}; {_next(rivals)}."
    limit = next((rival.limit for rival in rivals if rival.speed == FASTER), "")
    without = [rival.name for rival in rivals if not rival.speed]
    noise = NOISE.format(_listed(without)) if 0 < len(without) < len(rivals) else ""
    return " ".join(filter(None, (sentence, limit, elsewhere, noise)))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _speeds(rivals: Sequence[Rival]) -> str:
    """The fastest strategy, and by about how much it was faster than target-only."""
    judged = [rival for rival in rivals if rival.speed]
    if not judged:
        return NO_DRAFTS
    best = judged[0]
    if best.speed == SLOWER:
        return f"Nothing was faster than target-only: {best.name} ran at {best.about} its speed"
    return f"{best.name} was {EVEN if best.speed == EVEN else f'{best.about} as fast as'} target-only"


def _texts(rivals: Sequence[Rival]) -> str:
    """Whether the texts are the target's own. Other lines explain a difference."""
    compared = [rival for rival in rivals if rival.compared.comparison.same is not None]
    others = [rival.name for rival in compared if not rival.compared.comparison.same]
    if others:
        return f"the text of {_listed(others)} is not the target's own"
    return "the text is the target's own" if compared else ""


def _next(rivals: Sequence[Rival]) -> str:
    speeds = {rival.speed for rival in rivals}
    return next((words for speed, words in NEXT.items() if speed in speeds), "/verdict looks for settings that help")


def server_summary(prompt: LastPrompt) -> Iterator[str]:
    """What the table does not show about servers."""
    finished = [entry for entry in prompt.servers if entry.run.finish is not FinishReason.INTERRUPTED]
    for entry in finished:
        if entry.run.new_tokens is None:
            yield NOT_COUNTED.format(entry.run.name)
        if entry.run.baseline is not None:
            yield from _server_sentences(entry, prompt)
        found, others = entry.run.acceptance, entry.run.other_tokens
        if others:
            yield OTHER_REQUESTS.format(entry.run.name, 1, "1 answer", count_of(others, "token"))
        if found is not None and found.note and (found.valid or not others):
            yield f"{entry.run.name}: {found.note}"
    if len(finished) > 1 and all(entry.run.baseline is None for entry in finished):
        yield NO_BASELINE


def _server_sentences(entry: ComparedRun, prompt: LastPrompt) -> Iterator[str]:
    _, run, comparison = entry
    baseline = run.baseline or ""
    other = next((one.run for one in prompt.compared if one.run.name == baseline), None)
    if comparison.same is False:
        yield OTHER_TEXT.format(run.name, baseline, run.name.removeprefix(PREFIX))
    if run.accepted == 0 and run.drafted:
        yield NOISE.format(run.name)
    elif (speedup := credible_speedup(entry)) is not None and (limit := Rival(entry, speedup).limit):
        yield limit
    if other is None and baseline != TARGET:
        yield f"{run.name} has no answer of {baseline} to be compared with."
    elif other is not None and (reason := other_machine(run.address, other.address)):
        yield reason
