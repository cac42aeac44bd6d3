"""Prepares a pair: every strategy runs once, and the costs of its drafters are measured."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from statistics import median
from time import perf_counter

from sampling import RULES, autoregressive_steps, speculative_steps
from sampling.counterfactual import FinishedText, drafts_along
from utils.comparison.harness import Harness
from utils.comparison.strategies import Job
from utils.config.settings import Settings, as_json
from utils.config.value_types import Limits
from utils.decode.model_info import context_length, sample_ids, vocabulary_size
from utils.decode.steps import Step
from utils.engine import Engine
from utils.errors import UserError
from utils.metrics.costs import READ_TOKENS, Costs
from utils.metrics.results import RoundTiming, Stopwatch, TimedDrafter
from utils.models.feature_drafter import FeatureDrafter
from utils.pairs.drafter_kinds import NGRAM, drafter_kind, drafter_label

TIMED_TOKENS = 64  # tokens of a run that times a drafter
TIMED_DRAFTS, TIMED_ROUNDS = 3, 10  # drafts of a typical round
DRAFTS_IN_ROUND = 1  # in rounds that are verified
BLOCKS, IN_BLOCK = 12, 4  # of such rounds, and of decode steps in between
ENOUGH_ROUNDS = 0.8  # seconds after which no further block begins
SLOW_STEP = 0.05  # seconds of a decode step from which no real rounds are timed
FEWEST_ROUNDS, ENOUGH = 4, 0.3  # enough rounds, if they take this many seconds
SHORT_PROMPT = 32
READING_SECONDS = 0.4  # time limit for reading a longer prompt
WARM_UP_TOKENS = 4
PROMPT = [0, 0, 0, 0]  # ids that every vocabulary has
FEW_IDS = 4  # so few that a short text has matches


def with_costs(harness: Harness, settings: Settings) -> Settings:
    """The settings with the draft costs of all their drafter kinds. Raises UserError for a kind that cannot draft."""
    engine = harness.pair.engine
    known = settings.costs or _verify_costs(engine)
    longer = known.longer or Costs()
    draft, read, after = dict(known.draft), dict(known.read), dict(longer.draft)
    # A fixed gamma, because adaptive gamma needs the costs that are measured here.
    timed = replace(settings, length=_within_context(TIMED_TOKENS, harness), gamma=TIMED_TOKENS)
    chosen = [one for one in harness.runnable(timed) if one.drafts and one.kind is not NGRAM]  # which costs nothing
    for word in (word for strategy in chosen for word in strategy.kind.parts or (strategy.word,)):
        label = drafter_label(word, harness.pair)
        if label is not None and label not in draft:
            short, long, reading = (_in_steps(part, engine) for part in _draft_seconds(label, word, harness, timed))
            draft[label], after[label], read[label] = short, long / longer.step, READ_TOKENS * reading
    if known.longer is not None:
        longer = Costs.of(longer.verify, after, length=longer.length, step=longer.step)
        known = replace(known, longer=longer)
    costs = Costs.of(known.verify, draft, read, length=known.length, longer=known.longer)
    return replace(settings, costs=costs)


def _verify_costs(engine: Engine) -> Costs:
    """The costs of verify passes, measured by the engine."""
    if engine.longer is None:
        return Costs.of(engine.costs, {})
    step = _in_steps(engine.longer.step_seconds, engine)
    longer = Costs.of(engine.longer.costs, {}, length=engine.longer.length, step=step)
    return Costs.of(engine.costs, {}, length=engine.longer.short, longer=longer)


def _in_steps(seconds: float, engine: Engine) -> float:
    return seconds / engine.step_seconds if engine.step_seconds else 0.0


def _draft_seconds(label: str, word: str, harness: Harness, settings: Settings) -> Sequence[float]:
    """The measured times of a drafter kind, or those of an earlier measurement."""
    shown = as_json(settings)
    # The key includes everything else that affects the time.
    key = " ".join([label, *(str(shown[name]) for name in ("verify", "processor", "cache"))])
    if isinstance(drafter := harness.pair.drafter, FeatureDrafter):
        key += f" {drafter.conventions}"  # the number of drafts in a block is one of them
    engine = harness.pair.engine
    if key not in engine.draft_seconds:  # the engine stores them together with the times of verify passes
        engine.report(f"measuring the drafter {label}")
        job = replace(harness.job(PROMPT, settings), drafter=word)
        engine.draft_seconds[key] = list(draft_seconds(job, 0 if engine.longer is None else engine.longer.length))
        engine.store()
    return engine.draft_seconds[key]


def draft_seconds(job: Job, longer: int) -> tuple[float, float, float]:
    """Seconds of one draft of the job's drafter kind after a short and a longer text, and seconds to read one token of
    the prompt.

    `longer` is the length of the longer text, limited to what can be read at once. 0 means no longer text.
    """
    draft, read = _timed_drafts(job, SHORT_PROMPT)
    # The weights of a slow model are in no cache, and comparing drafts takes little time beside its decode steps.
    is_fast = job.pair.engine.step_seconds < SLOW_STEP
    more = max(0.0, _seconds_in_rounds(job) - draft) if draft and is_fast else 0.0
    length = min(longer, int(READING_SECONDS / read)) if read else longer
    if length < 2 * SHORT_PROMPT:
        return draft + more, draft + more, read
    after, reading = _timed_drafts(job, length)
    # A drafter with a short context drafts nothing after a long text.
    return (draft + more, (after or draft) + more, reading if after else read)


def _seconds_in_rounds(job: Job) -> float:
    """The median seconds that a draft adds to a real round beyond the measured verify pass. 0 if nothing is drafted.

    Drafter and target push each other's weights out of the processor's caches, and drafts have to be compared. Blocks
    of rounds and of decode steps take turns, since the machine may be faster or slower than when those were measured.
    """
    watch, engine = Stopwatch(), job.pair.engine
    bound = context_length(job.pair.target) or Limits().context
    prompt = sample_ids(max(1, min(SHORT_PROMPT, bound - TIMED_TOKENS)), vocabulary_size(job.pair.target))
    settings = replace(job.settings, gamma=DRAFTS_IN_ROUND, length=TIMED_TOKENS)
    job = replace(job, prompt=prompt, settings=settings, stopwatch=watch)
    decoding = replace(job.decoding, end_ids=frozenset())
    built = job.build_drafter()
    drafter, target = job.observed(built.drafter, built.target)
    rounds = speculative_steps(prompt, drafter, target, decoding, gamma=DRAFTS_IN_ROUND, rule=RULES[settings.verify])
    alone = autoregressive_steps(prompt, job.session("target", rewinds=False), decoding)
    added: list[float] = []
    start = perf_counter()
    with suppress(UserError, StopIteration):  # the context may be short
        for block in range(BLOCKS):
            step = median([_timed(alone)[0] for _ in range(IN_BLOCK)][1:])  # the first may take longer after a round
            for index in range(IN_BLOCK):
                seconds, made = _timed(rounds)
                drafts, verified = watch.read(seconds).drafts, len(made.drafted)
                # The first block reads the prompt.
                if block and index and drafts and step and verified <= len(engine.costs):
                    verifying = 1 + (engine.costs[verified - 1] if verified else 0.0)
                    added.append(engine.step_seconds * (seconds / step - verifying) / drafts)
            if len(added) >= FEWEST_ROUNDS and perf_counter() - start > ENOUGH_ROUNDS:
                break
    return median(added) if len(added) >= FEWEST_ROUNDS else 0.0


def _timed(steps: Iterator[Step]) -> tuple[float, Step]:
    start = perf_counter()
    step = next(steps)
    return perf_counter() - start, step


def _timed_drafts(job: Job, length: int) -> tuple[float, float]:
    """The median seconds of one draft after a text of this length, and the seconds to read one of its tokens.

    Both are 0 if nothing is drafted. The target is not timed, so one computed token stands for all.
    """
    bounds = [context_length(model) for model in (job.pair.target, job.pair.drafter) if model is not None]
    length = max(1, min([length, *(bound - 2 * TIMED_ROUNDS for bound in bounds if bound is not None)]))
    tokens = PROMPT[:1] * (length + TIMED_ROUNDS)
    # Drafters without distributions index the text, and one that repeats a single token takes them many times as long.
    if not drafter_kind(job.drafter).has_probs:
        tokens = Random(0).choices(range(min(FEW_IDS, vocabulary_size(job.pair.target))), k=len(tokens))
    job = replace(job, prompt=tokens[:length])
    built = job.build_drafter()
    context, watch = built.target.begin(job.prompt), Stopwatch()
    logits = built.target.feed(context[:1], keep=1)
    features, name = built.target.take_features(), built.target.name
    text = FinishedText(job.prompt, context, tokens[length:], logits, features, name, None)
    timings: list[RoundTiming] = []
    for _ in drafts_along(text, TimedDrafter(built.drafter, watch), TIMED_DRAFTS):
        timings.append(watch.read(0))
        drafted = [timing.drafting for timing in timings if timing.drafts]
        if len(drafted) >= FEWEST_ROUNDS and sum(drafted[1:]) > ENOUGH:
            break
    first = next((index for index, timing in enumerate(timings) if timing.drafts), None)
    if first is None:
        return 0.0, 0.0
    # The first round with drafts reads the text.
    draft = median([one.drafting / one.drafts for one in timings[first + 1 :] if one.drafts] or [0.0])
    reading = sum(timing.drafting for timing in timings[: first + 1]) - draft * timings[first].drafts
    return draft, max(0.0, reading) / length


def shortened(settings: Settings) -> Settings:
    """The settings for a run that only warms up."""
    return replace(settings, length=min(settings.length, WARM_UP_TOKENS))


def warm_up(harness: Harness, settings: Settings, stopped: Callable[[], bool] = lambda: False) -> None:
    """Run every strategy for a few tokens, so that no measured run is a first use. `stopped` may end it early."""
    settings = replace(settings, length=_within_context(WARM_UP_TOKENS, harness), beams=2)
    job = harness.job(PROMPT, settings)
    for strategy in harness.runnable(settings):
        if stopped():  # stop before the next prefill
            return
        with suppress(UserError):  # reported when the strategy is used
            for _ in strategy.steps(job):
                if stopped():
                    return


def _within_context(tokens: int, harness: Harness) -> int:
    return min(tokens, context_length(harness.pair.target) or Limits().context)
