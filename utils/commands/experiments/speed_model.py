"""The model of a speculative run's time: predictions for /whatif and the choice of /verdict, and what limits a measured
run.

Leviathan et al. 2023, section 3.3, with measured costs: a round of k drafts takes 1 + v(k) + c k decode steps, where
v(k) is the extra time of a verify pass with k drafts and c the time of one draft. The time of a decode step comes from
the target's own run. Under a response format, each draft adds the time of a mask.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple, Self

import torch

from sampling.counterfactual import (
    FinishedText,
    RecordedDrafter,
    TextNoise,
    chain_single_drafts,
    drafts_along,
    expected_counts,
    replay,
)
from utils.bounds import AUTO_GAMMA
from utils.commands.shared.result_tables import NOTHING, ResultColumn, Row
from utils.comparison.harness import LastPrompt
from utils.comparison.records import Countdown
from utils.comparison.strategies import Job, Strategy
from utils.decode.drafts import Draft
from utils.decode.grammar import Grammar
from utils.decode.model_info import vocabulary_size
from utils.decode.model_session import ModelSession
from utils.decode.steps import Step
from utils.errors import UserError
from utils.logits_processor import MultinomialProcessor
from utils.metrics.costs import Costs
from utils.metrics.draft_causes import Counts
from utils.metrics.results import Generation, RoundTiming, pooled
from utils.pairs.drafter_kinds import BuiltDrafter, Replay, drafter_kind
from utils.pairs.request import LOADED


class GammaRounds(NamedTuple):
    """The rounds of one strategy with one gamma; None is adaptive. `timings` have numbers of drafts, but no times."""

    strategy: Strategy
    gamma: int | None
    steps: list[Step]
    timings: list[RoundTiming]


def replayed_rounds(
    job: Job, strategies: Sequence[Strategy], tokens: list[int], progress: Callable[[str], None]
) -> Iterator[GammaRounds]:
    """The rounds of each strategy for gamma 0, 1, ... and for adaptive gamma, if the text were `tokens`.

    All strategies must draft. The job's storages and texts are used, but not changed. Raises UserError if a strategy
    cannot be run.
    """
    needs_features = any(strategy.needs_drafter for strategy in strategies)
    text = read_text(job, tokens, job.pair.feature_layers if needs_features else ())
    countdown = Countdown(progress)
    for place, strategy in enumerate(strategies):
        # A smaller gamma gets the first drafts of the longest round, so one recording serves all, except for NEVER.
        longest = _build(job, strategy, AUTO_GAMMA)
        # Under a grammar, which drafts count depends on the rejected ones before them: those that are forced do not.
        by_token = longest.replay is Replay.BY_TOKEN and job.grammar() is None
        drafts: list[Draft] = []
        if longest.replay is not Replay.NEVER:
            for draft in drafts_along(text, longest.drafter, 1 if by_token else AUTO_GAMMA):
                drafts.append(draft)
                done = place + len(drafts) / (len(tokens) + AUTO_GAMMA)
                countdown.at(done / len(strategies), strategy.name)
        if by_token:
            drafts = [Draft(tokens) for tokens in chain_single_drafts([draft.tokens for draft in drafts], AUTO_GAMMA)]
        recorded = RecordedDrafter(drafts, len(text.context)) if drafts else None
        for gamma in range(AUTO_GAMMA + 1):
            drafter = recorded or _build(job, strategy, gamma).drafter
            yield GammaRounds(strategy, gamma, *replay(text, drafter, job.decoding, gamma=gamma))
            if not recorded:
                done = place + (gamma + 1) / (AUTO_GAMMA + 2)
                countdown.at(done / len(strategies), strategy.name)
        adaptive = _build(job, strategy, None).drafter
        yield GammaRounds(strategy, None, *replay(text, adaptive, job.decoding, gamma=AUTO_GAMMA))


@torch.no_grad()
def read_text(job: Job, tokens: list[int], features: tuple[int, ...] = ()) -> FinishedText:
    """Run the target once over the prompt and a finished text. Raises UserError for an unusable prompt."""
    session = ModelSession(job.pair.target, use_cache=False, rewinds=False, features=features)
    session.grammar = job.grammar()
    context = session.begin(job.prompt)
    logits = session.feed([*context, *tokens[:-1]], keep=len(tokens))  # (T, V); nothing follows the last token
    return FinishedText(
        list(job.prompt), context, tokens, logits, session.take_features(), session.name, session.context_length
    )


def expected_drafts(
    job: Job, text: FinishedText, temperature: float, count: int, *, counts_ends: bool = False
) -> tuple[Counts, Counts]:
    """The expected counts of the loaded drafter, with `count` drafts a round, if others have generated the text: for
    drafts drawn from its distribution, and for its likeliest tokens. `counts_ends` is as in `expected_counts`.
    """
    inputs = replace(job, settings=replace(job.settings, gamma=count, verify="rejection")).drafter_inputs()
    noise, processor = TextNoise(0, tokens=tuple(text.tokens)), MultinomialProcessor(temperature or 1.0)
    forced = replace(inputs, decoding=replace(inputs.decoding, noise=noise, processor=processor))
    built = drafter_kind(LOADED).build(forced)
    return expected_counts(text, built.drafter, temperature, count, counts_ends=counts_ends)


def _build(job: Job, strategy: Strategy, gamma: int | None) -> BuiltDrafter:
    """A separate drafter that works on copies of the storage and of earlier texts."""
    caches = replace(job.caches, texts=deepcopy(job.caches.texts))
    # Shared noise is keyed by position alone, so a draft does not depend on where its round began.
    settings = replace(job.settings, gamma=gamma, verify="coupled")
    own = replace(job, drafter=strategy.word, storage=deepcopy(job.storage), caches=caches, settings=settings)
    return replace(own, prefills=None, stopwatch=None, tracer=None).build_drafter()


MASKED = 32  # tokens whose masks are timed
MANY_DECLINED = 0.5  # share of rounds without drafts above which declining is the limit
CAUSES = {
    "drafting": "the cost of drafting",
    "verifying": "the cost of verifying several tokens at once",
    "rejection": "the rejection of drafts",
    "other": "work outside the models",
    "prefill": "reading the prompt, which speculative decoding does not make faster",
}


@dataclass(frozen=True, slots=True)
class TargetTiming:
    """Seconds of the target's own run before its decode steps (mostly the prefill), and per decode step."""

    start: float
    step: float

    @classmethod
    def of(cls, run: Generation) -> Self:
        """Computed from the target's own run. Raises UserError if it has fewer than two tokens."""
        if len(run.steps) < 2 or run.first_seconds is None:
            raise UserError("the target's own run needs at least two tokens: send a prompt with a longer answer.")
        # The first step contains the prefill, so only the others are averaged.
        step = (run.seconds - run.first_seconds) / (len(run.steps) - 1)
        return cls(max(0.0, run.first_seconds - step), step)

    def alone(self, tokens: int) -> float:
        return self.start + self.step * tokens

    def predict(self, steps: Sequence[Step], costs: Costs, drafting: float) -> float:
        """Seconds of these rounds, with `drafting` decode steps spent on all of their drafts."""
        verifying = sum(1 + costs.verify_cost(len(step.drafted)) for step in steps)
        return self.start + self.step * (drafting + verifying)


def target_run(last: LastPrompt) -> Generation:
    """The target's own run of the last prompt. Raises UserError if the target did not run."""
    if last.target is not None:
        return last.target
    if last.job.settings.target:
        raise UserError("the last prompt was interrupted before the target's own run: send it again.")
    raise UserError("the target's own run is needed: turn it on with /target on, and send a prompt.")


def gamma_text(gamma: int | None) -> str:
    return "auto" if gamma is None else str(gamma)


class Prediction(NamedTuple):
    """The rounds of a strategy with one gamma, where None is adaptive, their seconds, and the speed-up."""

    strategy: Strategy
    gamma: int | None
    steps: Sequence[Step]
    seconds: float
    speedup: float


def predictions(
    job: Job, strategies: Sequence[Strategy], run: Generation, progress: Callable[[str], None]
) -> Iterator[Prediction]:
    """Replay every gamma of each strategy along the target's own run. `progress` receives what is being replayed.

    Raises UserError if the run has fewer than two tokens.
    """
    timing, tokens, prompt = TargetTiming.of(run), run.tokens, len(job.prompt)
    # Times grow linearly with the context, so the costs in the middle of the run are the mean costs.
    costs = (job.settings.costs or Costs()).at(prompt + len(tokens) // 2)
    masking = 0.0 if (grammar := job.grammar()) is None else mask_seconds(grammar, tokens, job.pair.target)
    for strategy, gamma, steps, timings in replayed_rounds(job, strategies, tokens, progress):
        # Every draft at the cost of its drafter kind, which also reads the prompt once.
        drafts = [(timing.kind or strategy.drafter_label(job.pair), timing.drafts) for timing in timings]
        drafting = sum(count * costs.draft_cost(kind) for kind, count in drafts)
        drafting += sum(costs.reading_cost(kind, prompt) for kind in {kind for kind, count in drafts if count})
        seconds = timing.predict(steps, costs, drafting) + masking * sum(len(step.drafted) for step in steps)
        yield Prediction(strategy, gamma, steps, seconds, timing.alone(len(tokens)) / seconds)


def mask_seconds(grammar: Grammar, tokens: list[int], target: Any) -> float:
    """The time that a grammar takes for a token. A decode step includes it, and every draft adds it to a round."""
    some = tokens[:MASKED]
    logits, start = torch.zeros(len(some), vocabulary_size(target)), perf_counter()
    grammar.masked(logits, some)
    return (perf_counter() - start) / len(some)


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """How runs with drafts spent their seconds.

    `steps` is one decode step of the target for each round, and `verifying` the extra time of verify passes. The first
    pass of a run reads the prompt, whose time can differ between runs by more than drafts cost: its extra time is taken
    to be that of the others, and the rest is the `prefill`. `target` is the time of the target's runs, and
    `target_prefill` that of their prefills.
    """

    prefill: float
    steps: float
    verifying: float
    drafting: float
    other: float
    target: float
    target_prefill: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[Generation, Generation]]) -> Self | None:
        """The split of runs beside the target's. None if the target's answers are too short to time a decode step."""
        timed = [(run, target, TargetTiming.of(target)) for run, target in pairs if len(target.steps) > 1]
        if not timed:
            return None
        parts = [part for run, _, _ in timed for part in run.timings]
        first = sum(run.timings[0].verifying for run, _, _ in timed)
        steps = sum(timing.step * len(run.steps) for run, _, timing in timed)
        first_steps = sum(timing.step for _, _, timing in timed)
        later = max(0.0, sum(part.verifying for part in parts) - first - (steps - first_steps))
        verifying = later * steps / (steps - first_steps) if steps > first_steps else 0.0
        prefill = max(0.0, first - first_steps - (verifying - later))
        drafting, other = sum(part.drafting for part in parts), sum(part.other for part in parts)
        starts = sum(timing.start for _, _, timing in timed)
        return cls(prefill, steps, verifying, drafting, other, sum(target.seconds for _, target, _ in timed), starts)

    @property
    def total(self) -> float:
        return self.prefill + self.steps + self.verifying + self.drafting + self.other


def limits(split: TimeSplit, run: Generation, speedup: float) -> dict[str, float]:
    """The speed-up without each cause of lost time, by cause."""
    total, decoding = split.total, split.total - split.prefill
    # The tokens of a round, and those without rejections. Tokens that a grammar forces are generated in both.
    accepted, drafts = (1 + (count + run.forced) / len(run.steps) for count in (run.accepted, run.drafted))
    causes = {
        "drafting": total - split.drafting,
        "verifying": total - split.verifying,
        "other": total - split.other,
        "rejection": split.prefill + decoding * accepted / drafts,
    }
    gains = {cause: speedup * total / max(left, 1e-9) for cause, left in causes.items()}
    # Without a prefill both runs would be faster, so this is the ratio of their decode times.
    target = split.target - split.target_prefill
    gains["prefill"] = speedup * (target / split.target) / (decoding / total) if split.target and decoding else speedup
    return gains


def draft_figures(pairs: Sequence[tuple[Generation, Generation]], speedup: float) -> dict[str, Any]:
    run, split = pooled(ours for ours, _ in pairs), TimeSplit.of(pairs)
    drafts = sum(part.drafts for ours, _ in pairs for part in ours.timings)
    figures: dict[str, Any] = {
        "drafted": run.drafted,
        "accepted": run.accepted,
        "acceptance_rate": run.acceptance_rate,
        "rounds": len(run.steps),
        "drafts_per_round": run.drafted / len(run.steps) if run.steps else 0.0,
        "declined_rounds": run.declined_rounds,
        "accepted_by_position": [list(position) for position in run.accepted_by_position],
    }
    if split is None or not split.steps:
        return figures | dict.fromkeys(("draft_cost", "verify_cost", "limits", "bottleneck"))
    step, gains = split.steps / len(run.steps), limits(split, run, speedup)
    declines = run.declined_rounds > MANY_DECLINED * len(run.steps)
    return figures | {
        "draft_cost": split.drafting / drafts / step if drafts else None,
        "verify_cost": 1 + split.verifying / split.steps,
        "limits": gains,
        "bottleneck": "no drafts" if declines else max(gains, key=gains.__getitem__),
    }


SHOWN_POSITIONS = 4


def _positions(row: Row) -> str:
    rates = [accepted / tried for accepted, tried in (row["accepted_by_position"] or ())[:SHOWN_POSITIONS] if tried]
    return " ".join(f"{rate:.2f}" for rate in rates) or NOTHING


BY_POSITION = ResultColumn("by position", _positions)


def bottleneck(row: Row) -> str:
    """What limits the speed-up most, in words: the cause without which the run would be fastest."""
    if row["bottleneck"] == "no drafts":
        share = row["declined_rounds"] / row["rounds"]
        return f"that nothing is drafted in {share:.0%} of the rounds, which are then decode steps"
    costs = f"verifying {row['drafts_per_round']:.1f} drafts takes {row['verify_cost']:.2f} decode steps"
    costs += "" if row["draft_cost"] is None else f", a draft {row['draft_cost']:.2f}"
    rate = "" if row["acceptance_rate"] is None else f", {row['acceptance_rate']:.0%} of the drafts are accepted"
    cause = row["bottleneck"]
    return f"{CAUSES[cause]}; without it about {row['limits'][cause]:.1f}x ({costs}{rate})"
