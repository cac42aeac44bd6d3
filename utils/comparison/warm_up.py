"""What a pair needs before it is used: every strategy run once, and the costs of its drafters measured."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from statistics import median

from sampling import RULES, speculative_steps
from utils.comparison.harness import Harness
from utils.comparison.job import Job
from utils.config.settings import Settings, as_json
from utils.config.value_types import Limits
from utils.decode.model_info import context_length
from utils.decode.steps import FinishReason, Step
from utils.decode.tree_check import tree_support
from utils.distributed import broadcast
from utils.engine import Engine
from utils.engine.forward_timing import leaf_seconds
from utils.errors import UserError
from utils.metrics.costs import LEAF, Costs
from utils.metrics.results import collect
from utils.metrics.stopwatch import Stopwatch
from utils.models.feature_drafter import FeatureDrafter
from utils.pairs.drafter_kinds import drafter_kind, drafter_label

TIMED_TOKENS = 64  # length of a run that times a drafter
TIMED_DRAFTS, TIMED_ROUNDS = 3, 9  # drafts of a typical round
WARM_UP_TOKENS = 4
PROMPT = [0, 0, 0, 0]  # an id that every vocabulary has


def with_costs(harness: Harness, settings: Settings) -> Settings:
    """The settings with the draft costs of all their drafter kinds. Missing ones are measured now.

    Raises UserError for a kind that the pair does not have or that cannot draft.
    """
    engine = harness.pair.engine
    known = settings.costs or Costs.of(engine.costs, {})
    draft = dict(known.draft)
    # A fixed gamma, because adaptive gamma needs the costs that are measured here.
    timed = replace(settings, length=_within_context(TIMED_TOKENS, harness), gamma=TIMED_TOKENS, tree="off")
    chosen = [strategy for strategy in harness.runnable(timed) if strategy.chooses_kind]
    for word in (word for strategy in chosen for word in strategy.parts):
        label = drafter_label(word, harness.pair)
        if label is not None and label not in draft:
            draft[label] = _in_steps(_draft_seconds(label, word, harness, timed), engine)
    if settings.tree == "auto" and LEAF not in draft:
        draft[LEAF] = _in_steps(_leaf_seconds(harness, settings), engine)
    return replace(settings, costs=Costs.of(known.verify, draft))


def _in_steps(seconds: float, engine: Engine) -> float:
    return seconds / engine.step_seconds if engine.step_seconds else 0.0


def _leaf_seconds(harness: Harness, settings: Settings) -> float:
    """What a leaf costs more than a draft of the chain; 0 if the target cannot compute leaves."""
    pair = harness.pair
    if tree_support(pair.target, use_cache=settings.cache).obstacle:
        return 0.0
    return _stored_seconds(LEAF, harness, "measuring leaves of combs", lambda: leaf_seconds(pair.target))


def _draft_seconds(label: str, word: str, harness: Harness, settings: Settings) -> float:
    """The seconds of one draft."""
    shown = as_json(settings)
    # With everything else that the time depends on.
    key = " ".join([label, *(str(shown[name]) for name in ("verify", "processor", "cache"))])
    if isinstance(drafter := harness.pair.drafter, FeatureDrafter) and drafter.origin is not None:
        key += f" {drafter.conventions}"  # the number of drafts in a block is one of them
    job = replace(harness.job(PROMPT, settings), drafter=word)
    return _stored_seconds(key, harness, f"measuring the drafter {label}", lambda: draft_seconds(job))


def _stored_seconds(key: str, harness: Harness, what: str, measure: Callable[[], float]) -> float:
    """A measured time that the engine keeps together with the times of verify passes."""
    engine = harness.pair.engine
    if key not in engine.draft_seconds:
        engine.report(what)
        # All ranks must choose the same drafts, so all use rank zero's measurement.
        engine.draft_seconds[key] = broadcast(measure())
        engine.store()
    return engine.draft_seconds[key]


def draft_seconds(job: Job) -> float:
    """Seconds of one draft by the job's drafter kind: the median over a few rounds, or 0 if it drafts nothing."""
    rule, watch = RULES[job.settings.verify], Stopwatch()
    built = drafter_kind(job.drafter).build(job.drafter_inputs(shares_noise=rule.shares_noise))
    drafter, target = job.with_observers(watch).observers.wrap(built.drafter, built.target)
    # An end token must not cut the timed rounds short.
    endless = replace(job.decoding, end_ids=frozenset())
    rounds = speculative_steps(job.prompt, drafter, target, endless, gamma=TIMED_DRAFTS, rule=rule)
    timings = [watch.read(0) for _ in islice(rounds, TIMED_ROUNDS)]
    return median([timing.drafting / timing.drafts for timing in timings if timing.drafts] or [0.0])


def shortened(settings: Settings) -> Settings:
    """The settings for a run that only warms up."""
    return replace(settings, length=min(settings.length, WARM_UP_TOKENS))


def warm_up(harness: Harness, settings: Settings, stopped: Callable[[], bool] = lambda: False) -> None:
    """Run every strategy that the models allow for a few tokens, so that no measured run pays for a first use.

    stopped: whether to end early.
    """
    settings = replace(settings, length=_within_context(WARM_UP_TOKENS, harness), beams=2)
    job = harness.job(PROMPT, settings)
    for strategy in harness.runnable(settings):
        if stopped():  # not even the prefill of the next one
            return
        with suppress(UserError):  # reported when the strategy is used
            if collect(_until(stopped, strategy.steps(job))).finish is FinishReason.INTERRUPTED:
                raise KeyboardInterrupt


def _until(stopped: Callable[[], bool], steps: Iterator[Step]) -> Iterator[Step]:
    """The steps, until `stopped` returns True."""
    for step in steps:
        if stopped():
            return
        yield step


def _within_context(tokens: int, harness: Harness) -> int:
    return min(tokens, context_length(harness.pair.target) or Limits().context)
