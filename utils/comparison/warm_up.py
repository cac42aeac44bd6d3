"""What a pair needs before it serves: every strategy run once, and what its drafters cost measured."""

from contextlib import suppress
from dataclasses import replace

from utils.comparison.harness import Bench
from utils.comparison.strategies import drafter_label, kind_of
from utils.config.settings import Settings
from utils.config.value_types import Limits
from utils.decode.model_session import context_length
from utils.decode.steps import FinishReason
from utils.distributed import told
from utils.errors import UserError
from utils.metrics.costs import Costs
from utils.metrics.results import collect

MEASURED = 64  # tokens over which a drafter is timed
BRIEF = 4  # tokens of a run that warms up
PROMPT = [0, 0, 0, 0]


def measured(bench: Bench, settings: Settings) -> Settings:
    """The settings with the costs of all kinds of drafters that they name; what the table lacks is measured now.

    Raises UserError for a kind that is not there or cannot draft.
    """
    engine = bench.pair.engine
    known = settings.costs or Costs.of(engine.costs, {})
    steps = dict(known.steps)
    short = replace(settings, length=_at_most(MEASURED, bench), gamma=MEASURED)
    kinds = [(word, strategy.kinds) for strategy in bench.runnable(short) if strategy.kinds for word in strategy.words]
    for word, table in kinds:
        label = drafter_label(word, bench.pair)
        if label is not None and label not in steps:
            job = replace(bench.job(PROMPT, short), drafter=word)
            seconds = told(bench.probes.draft_seconds(job, kind_of(word, table)))
            steps[label] = seconds / engine.step_seconds if engine.step_seconds else 0.0
    return replace(settings, costs=Costs.of(known.windows, steps))


def briefly(settings: Settings) -> Settings:
    """For a run that only warms up."""
    return replace(settings, length=min(settings.length, BRIEF))


def warm_up(bench: Bench, settings: Settings) -> None:
    """Run every strategy that the models allow for a few tokens, so that no measured run pays for a first use."""
    settings = replace(settings, length=_at_most(BRIEF, bench), beams=2)
    job = bench.job(PROMPT, settings)
    for strategy in bench.runnable(settings):
        with suppress(UserError):  # it will be said when it is asked for
            if collect(strategy.steps(job)).finish is FinishReason.INTERRUPTED:
                raise KeyboardInterrupt


def _at_most(tokens: int, bench: Bench) -> int:
    return min(tokens, context_length(bench.pair.target) or Limits().context)
