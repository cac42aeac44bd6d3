"""Explains the runs of one prompt: how a text ended, which arm was faster, and which command to type next.

Pure functions over finished runs. One run of each strategy proves nothing, so speeds are "about", and no gain is
claimed that the accepted drafts cannot explain.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from utils.comparison.arms import ComparedRun
from utils.comparison.runs import PREFIX, Run
from utils.comparison.session_state import LastPrompt
from utils.comparison.speed_claims import OTHER_REQUESTS, rough
from utils.comparison.strategies import STRATEGIES
from utils.decode.steps import FinishReason
from utils.engine.engine_choice import FasterEngine
from utils.metrics.divergence import Cause
from utils.servers.address import other_machine
from utils.text import count_of

FULL_CONTEXT = "cut at {}: the context is full"
TARGET = next(row.name for row in STRATEGIES if row.is_baseline)
NOTICEABLE = 0.05  # smaller differences between single runs are treated as noise
FEW_TOKENS = 16
NO_TOKENS = "No token was generated, so there is nothing to compare."
NOT_FINISHED = "Not finished, so not compared: {}."
NO_TARGET = "Without target-only there is nothing to compare the speed with: /target on."
FAILED_TARGET = "Target-only did not finish, so there is nothing to compare the speed with."
NO_RIVAL = "Nothing with drafts ran, so there is no speed-up to report: /speculative on or /ngram on."
BLANK = "The text shows as nothing, so its speed says nothing about real text."
LIMIT = "{}: {:.2f}x was measured, but {:.2f} tokens per forward cannot make it so fast."
DIFFERENT_LENGTHS = "The texts have different lengths, which affects tokens/s, too."
NOISE = "{}: no draft was {}, so any difference in speed is noise or the cost of drafting."
DIFFERENCES = {
    Cause.SAMPLING: "drew another text from the same distribution",
    Cause.ROUNDING: "differs from token {} by a rounding tie",
    Cause.QUANTIZATION: "differs from token {} because of its quantization",
    Cause.UNEXPLAINED: "differs from token {} for no known reason",
    None: "differs from token {}",
}
NOT_COUNTED = "{} gives neither token ids nor usage figures, so its tokens and its speed are unknown."
NO_BASELINE = (
    "Speed-ups need a baseline: /server add NAME URL baseline=NAME says with which server another is compared."
)
NO_RUN = "{} has no answer of {} to be compared with."
OTHER_LENGTHS = "{} and {} generated {} and {} tokens, which affects tokens/s, too."
SAMPLED = "Sampled texts need not be equal; /server text {} compares greedy ones."
LOCAL_BASELINE = "Texts of servers and of the local target are compared under greedy decoding only (/temperature 0)."
NO_DRAFTS = "No draft was {}, so any difference in speed is noise or the cost of drafting"


def ending(run: Run, length: int) -> str:
    """How a text ended. It is empty if the text ended by itself. `length` is the maximum number of new tokens."""
    match run.finish:
        case FinishReason.STOP:
            return ""
        case FinishReason.LENGTH:
            made = length if run.new_tokens is None else run.new_tokens
            return (
                f"cut at {count_of(made, 'token')} (/length)"
                if made >= length
                else FULL_CONTEXT.format(count_of(made, "token"))
            )
        case FinishReason.INTERRUPTED:
            return "interrupted"


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
        if self.speed is not Speed.FASTER or not self.about.startswith("at most"):
            return ""
        measured, bound = self.compared.comparison.speedup, self.compared.run.tokens_per_target_forward
        return LIMIT.format(self.name, measured, bound)

    @property
    def speed(self) -> Speed:
        if not self.compared.run.accepted:
            return Speed.UNEXPLAINED
        if abs(self.factor - 1) < NOTICEABLE:
            return Speed.EVEN
        return Speed.FASTER if self.factor > 1 else Speed.SLOWER


@dataclass(frozen=True, slots=True)
class PromptRuns:
    """The runs of one prompt.

    `planned` names the strategies that should run, and `blank` those whose text shows as nothing. `causes` explains
    differences between texts, by name. `faster_engine` is an engine in which the target alone would be faster.
    """

    compared: Sequence[ComparedRun]
    planned: Sequence[str]
    blank: Collection[str] = ()
    causes: Mapping[str, Cause] = field(default_factory=dict)
    faster_engine: FasterEngine | None = None

    @property
    def finished(self) -> list[ComparedRun]:
        return [entry for entry in self.compared if entry.run.finish is not FinishReason.INTERRUPTED]

    @property
    def baseline(self) -> ComparedRun | None:
        """The target's own run, if it is finished."""
        return next((entry for entry in self.finished if entry.run.name == TARGET), None)

    @property
    def missing(self) -> list[str]:
        """The strategies that failed, were interrupted or never started."""
        names = {entry.run.name for entry in self.finished}
        return [name for name in self.planned if name not in names]

    @property
    def rivals(self) -> list[Rival]:
        """The finished runs that guarantee the target's text or distribution, the fastest first."""
        found = [
            Rival(entry, factor)
            for entry in self.finished
            if entry.arm.strategy is not None and entry.arm.strategy.lossless and entry.run.name != TARGET
            if (factor := credible_speedup(entry)) is not None
        ]
        return sorted(found, key=lambda rival: -rival.factor)


def summary(runs: PromptRuns) -> str:
    """Which strategies were faster than target-only and by about how much, whether texts are equal, and the next
    command.
    """
    baseline, rivals = runs.baseline, runs.rivals
    if not runs.compared:
        return ""  # every strategy has reported its error
    if not any(entry.run.new_tokens for entry in runs.compared):
        return NO_TOKENS
    if baseline is None:
        return FAILED_TARGET if TARGET in runs.planned else NO_TARGET
    missing = NOT_FINISHED.format(_listed(runs.missing)) if runs.missing else ""
    if not rivals:
        return missing or NO_RIVAL
    if {TARGET, *(rival.name for rival in rivals)} & set(runs.blank):
        return BLANK
    lengths = {entry.run.new_tokens or 0 for entry in (baseline, *(rival.compared for rival in rivals))}
    parts = (_speeds(rivals) + _size(max(lengths)), _texts(runs, rivals))
    sentence = f"{', and '.join(filter(None, parts))}; {_next_command(runs, rivals)}."
    limit = next((rival.limit for rival in rivals if rival.speed is Speed.FASTER), "")
    elsewhere = runs.faster_engine.sentence if runs.faster_engine else ""
    further = (limit, elsewhere, _not_explained(rivals), DIFFERENT_LENGTHS if len(lengths) > 1 else "", missing)
    return " ".join([sentence, *filter(None, further)])


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _size(tokens: int) -> str:
    return f" (over only {count_of(tokens, 'token')})" if tokens < FEW_TOKENS else ""


def _unexplained(rivals: Sequence[Rival]) -> bool:
    """Whether no strategy had a draft accepted."""
    return all(rival.speed is Speed.UNEXPLAINED for rival in rivals)


def _speeds(rivals: Sequence[Rival]) -> str:
    """Which strategies were faster than target-only, and by about how much."""
    if _unexplained(rivals):
        return NO_DRAFTS.format(_lacking(rivals))
    judged = [rival for rival in rivals if rival.speed is not Speed.UNEXPLAINED]
    best, several = judged[0], len(judged) > 1
    factor = best.about
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


def _not_explained(rivals: Sequence[Rival]) -> str:
    """Which strategies had no accepted drafts while others had some."""
    without = [rival for rival in rivals if rival.speed is Speed.UNEXPLAINED]
    if not without or _unexplained(rivals):
        return ""
    return NOISE.format(_listed([rival.name for rival in without]), _lacking(without))


def _lacking(rivals: Sequence[Rival]) -> str:
    """Why nothing was accepted: there were no drafts, or all were rejected."""
    return "accepted" if any(rival.compared.run.drafted for rival in rivals) else "proposed"


def _texts(runs: PromptRuns, rivals: Sequence[Rival]) -> str:
    """Whether the texts are the target's own."""
    compared = [rival for rival in rivals if rival.compared.comparison.same is not None]
    same = [rival.name for rival in compared if rival.compared.comparison.same]
    parts = []
    for rival in compared:
        if not rival.compared.comparison.same:
            words = DIFFERENCES[runs.causes.get(rival.name)]
            position = rival.compared.comparison.first_difference or 0
            parts.append(f"{rival.name} {words.format(position + 1)}")
    differing = " and ".join(parts)
    if not same:
        return differing
    whose = f" of {_listed(same)}" if differing else ""
    return f"the text{whose} is the target's own" + (f", whereas {differing}" if differing else "")


def _next_command(runs: PromptRuns, rivals: Sequence[Rival]) -> str:
    """What to type next, and why."""
    if Cause.UNEXPLAINED in runs.causes.values():
        return "please report it with the output of /texts"
    speeds = {rival.speed for rival in rivals}
    if Speed.FASTER in speeds:
        return "/race 5 checks it"
    return "/race 5 tells more" if Speed.EVEN in speeds else "/verdict looks for settings that help"


def server_summary(prompt: LastPrompt) -> Iterator[str]:
    """The sentences on servers below the table."""
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
    sampled = (run for _, run, compared in finished if compared.speedup and compared.same is None)
    if (run := next(sampled, None)) is not None:
        yield LOCAL_BASELINE if run.baseline == TARGET else SAMPLED.format(run.name.removeprefix(PREFIX))


def _server_sentences(entry: ComparedRun, prompt: LastPrompt) -> Iterator[str]:
    _, run, comparison = entry
    baseline = comparison.baseline or ""
    other = next((one.run for one in prompt.compared if one.run.name == baseline), None)
    parts = list(filter(None, (_server_speed(entry), _server_text(entry))))
    if parts:
        yield f"{run.name}: {', and '.join(parts)}."
    elif baseline != TARGET and other is None:
        yield NO_RUN.format(run.name, baseline)
    if limit := _server_limit(entry):
        yield limit
    if other is not None and (reason := other_machine(run.address, other.address)):
        yield reason
    lengths = (run.new_tokens, comparison.baseline_tokens)
    if comparison.speedup is not None and None not in lengths and lengths[0] != lengths[1]:
        yield OTHER_LENGTHS.format(run.name, baseline, *lengths)


def _server_limit(entry: ComparedRun) -> str:
    """Why less is claimed of a server than was measured, or an empty text."""
    _, run, comparison = entry
    if run.accepted == 0 and run.drafted:
        return NOISE.format(run.name, "accepted")
    credible, measured = credible_speedup(entry), comparison.speedup
    if credible is None or measured is None or rough(credible) == rough(measured):
        return ""
    return LIMIT.format(run.name, measured, run.tokens_per_target_forward)


def _server_speed(entry: ComparedRun) -> str:
    speedup, decoding = credible_speedup(entry), entry.comparison.decode_speedup
    if speedup is None or is_noise(entry):
        return ""
    baseline = entry.comparison.baseline
    alone = "" if decoding is None or _server_limit(entry) else f" ({rough(decoding)} after the first token)"
    if abs(speedup - 1) < NOTICEABLE:
        return f"about as fast as {baseline}{alone}"
    return f"{Rival(entry, speedup).about} as fast as {baseline}{alone}"


def _server_text(entry: ComparedRun) -> str:
    comparison = entry.comparison
    if comparison.same is None:
        return ""
    if comparison.same:
        return f"the same text as {comparison.baseline}"
    place = (comparison.first_difference or 0) + 1
    name = entry.run.name.removeprefix(PREFIX)
    where = f"{comparison.unit} {place} (a rounding tie? see /server text {name})"
    return f"another text than {comparison.baseline} from {where}"
