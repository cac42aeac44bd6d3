"""Explains the runs of one prompt: how a text ended, which arm was faster, and which command to type next.

Pure functions over finished runs. One run of each strategy proves nothing, so speeds are "about", and no gain is
claimed that the accepted drafts cannot explain.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from utils.comparison.arms import ComparedRun
from utils.comparison.runs import PREFIX, Run
from utils.comparison.session_state import LastPrompt
from utils.comparison.speed_claims import OTHER_REQUESTS, rough
from utils.decode.steps import FinishReason
from utils.servers.address import TARGET, other_machine
from utils.text import count_of

NOTICEABLE = 0.05  # smaller differences between single runs are treated as noise
NO_TOKENS = "No token was generated, so there is nothing to compare."
NO_TARGET = "Without target-only there is nothing to compare the speed with: /target on."
FAILED_TARGET = "Target-only did not finish, so there is nothing to compare the speed with."
NO_RIVAL = "Nothing with drafts ran, so there is no speed-up to report: /speculative on or /ngram on."
LIMIT = "{}: {:.2f}x was measured, but {:.2f} tokens per forward cannot make it so fast."
NOISE = "{}: no draft was accepted, so any difference in speed is noise or the cost of drafting."
NOT_COUNTED = "{} gives neither token ids nor usage figures, so its tokens and its speed are unknown."
NO_BASELINE = (
    "Speed-ups need a baseline: /server add NAME URL baseline=NAME says with which server another is compared."
)
NO_RUN = "{} has no answer of {} to be compared with."
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
    is_server = run.drafted and comparison.baseline != TARGET
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


class Speed(Enum):
    """A run's speed relative to target-only."""

    FASTER = auto()
    EVEN = auto()
    SLOWER = auto()
    UNEXPLAINED = auto()  # no draft was accepted


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
    def speed(self) -> Speed:
        if not self.compared.run.accepted:
            return Speed.UNEXPLAINED
        if abs(self.factor - 1) < NOTICEABLE:
            return Speed.EVEN
        return Speed.FASTER if self.factor > 1 else Speed.SLOWER


def summary(compared: Sequence[ComparedRun], planned: Collection[str], elsewhere: str = "") -> str:
    """Which strategies were faster than target-only and by about how much, whether texts are equal, and the next
    command.

    `planned` names the strategies that should run. `elsewhere` is a sentence on an engine in which the target alone
    would be faster.
    """
    if not compared:
        return ""  # every strategy has reported its error
    if not any(entry.run.new_tokens for entry in compared):
        return NO_TOKENS
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
    limit = next((rival.limit for rival in rivals if rival.speed is Speed.FASTER), "")
    without = [rival.name for rival in rivals if rival.speed is Speed.UNEXPLAINED]
    noise = NOISE.format(_listed(without)) if 0 < len(without) < len(rivals) else ""
    return " ".join(filter(None, (sentence, limit, elsewhere, noise)))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _speeds(rivals: Sequence[Rival]) -> str:
    """Which strategies were faster than target-only, and by about how much."""
    judged = [rival for rival in rivals if rival.speed is not Speed.UNEXPLAINED]
    if not judged:
        return NO_DRAFTS
    best, several, factor = judged[0], len(judged) > 1, judged[0].about
    match best.speed:
        case Speed.FASTER:
            first = "the fastest, " if sum(rival.speed is Speed.FASTER for rival in judged) > 1 else ""
            return f"{best.name} was {first}{factor} as fast as target-only"
        case Speed.EVEN if several:
            return "Nothing was clearly faster than target-only"
        case Speed.EVEN:
            return f"{best.name} was about as fast as target-only"
        case _:
            who = f"the best, {best.name}," if several else best.name
            return f"Nothing was faster than target-only: {who} ran at {factor} its speed"


def _texts(rivals: Sequence[Rival]) -> str:
    """Whether the texts are the target's own. Other lines explain a difference."""
    compared = [rival for rival in rivals if rival.compared.comparison.same is not None]
    same = [rival.name for rival in compared if rival.compared.comparison.same]
    others = [rival.name for rival in compared if not rival.compared.comparison.same]
    if not others:
        return "the text is the target's own" if same else ""
    whose = f"the text of {_listed(same)} is the target's own, " if same else "the text is not the target's own: "
    return f"{whose}that of {_listed(others)} differs"


def _next(rivals: Sequence[Rival]) -> str:
    """What to type next, and why."""
    speeds = {rival.speed for rival in rivals}
    if Speed.FASTER in speeds:
        return "/race 5 checks it"
    return "/race 5 tells more" if Speed.EVEN in speeds else "/verdict looks for settings that help"


def server_summary(prompt: LastPrompt) -> Iterator[str]:
    """What the table does not show about servers."""
    finished = [entry for entry in prompt.servers if entry.run.finish is not FinishReason.INTERRUPTED]
    for entry in finished:
        if entry.run.new_tokens is None:
            yield NOT_COUNTED.format(entry.run.name)
        if entry.comparison.baseline is not None:
            yield from _server_sentences(entry, prompt)
        found, others = entry.run.acceptance, entry.run.other_tokens
        if others:
            yield OTHER_REQUESTS.format(entry.run.name, 1, "1 answer", count_of(others, "token"))
        if found is not None and found.note and (found.valid or not others):
            yield f"{entry.run.name}: {found.note}"
    if len(finished) > 1 and all(entry.comparison.baseline is None for entry in finished):
        yield NO_BASELINE


def _server_sentences(entry: ComparedRun, prompt: LastPrompt) -> Iterator[str]:
    _, run, comparison = entry
    baseline = comparison.baseline or ""
    other = next((one.run for one in prompt.compared if one.run.name == baseline), None)
    if comparison.same is False:
        yield OTHER_TEXT.format(run.name, baseline, run.name.removeprefix(PREFIX))
    if run.accepted == 0 and run.drafted:
        yield NOISE.format(run.name)
    elif (speedup := credible_speedup(entry)) is not None and (limit := Rival(entry, speedup).limit):
        yield limit
    if other is None and baseline != TARGET:
        yield NO_RUN.format(run.name, baseline)
    elif other is not None and (reason := other_machine(run.address, other.address)):
        yield reason
