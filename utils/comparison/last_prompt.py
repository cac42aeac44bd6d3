"""The runs of the last prompt, how they compare with the target's own run, and queries for commands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from utils.comparison.job import Job
from utils.comparison.strategies import Strategy
from utils.metrics.divergence import Divergence, DivergenceCase, explain
from utils.metrics.results import Comparison, Generation, compare
from utils.pairs.pair import depends_on_width
from utils.prompts.conversation import diverging_turn


class PlannedRun(NamedTuple):
    """A strategy and its job."""

    strategy: Strategy
    job: Job


class ComparedRun(NamedTuple):
    """A finished run and its comparison with the target's."""

    strategy: Strategy
    run: Generation
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class LastPrompt:
    """The finished runs of one prompt.

    `text` is the prompt as it was sent. `jobs` are keyed by the strategy's name. `job` is the target's, or the first
    strategy's if the target did not run.
    """

    text: str
    job: Job
    compared: tuple[ComparedRun, ...]
    jobs: Mapping[str, Job]

    @classmethod
    def of(
        cls, text: str, planned: Sequence[PlannedRun], results: Sequence[tuple[Strategy, Generation]]
    ) -> "LastPrompt":
        """Compare the results with the target's wherever both had the same request."""
        jobs = {strategy.name: job for strategy, job in planned}
        job = next((job for strategy, job in planned if strategy.is_baseline), planned[0].job)
        target = next((run for strategy, run in results if strategy.is_baseline), None)
        compared = (
            ComparedRun(strategy, run, compare(run, target, same_request=jobs[strategy.name].is_same_request(job)))
            for strategy, run in results
        )
        return cls(text, job, tuple(compared), jobs)

    @property
    def target(self) -> Generation | None:
        """The target's own run."""
        return next((run for strategy, run, _ in self.compared if strategy.is_baseline), None)


def unlike_target(last: LastPrompt) -> list[tuple[Strategy, Generation]]:
    """The runs whose text should equal the target's, but does not."""
    # `same` is None if the two were not compared.
    return [(strategy, run) for strategy, run, result in last.compared if strategy.lossless and result.same is False]


def own_conversations(last: LastPrompt) -> list[tuple[Strategy, int]]:
    """The strategies whose request differed from the target's, and the first turn that differed."""
    jobs = [(strategy, last.jobs[strategy.name]) for strategy, _, _ in last.compared if last.target is not None]
    return [
        (strategy, diverging_turn(job.history, last.job.history))
        for strategy, job in jobs
        if not job.is_same_request(last.job)
    ]


def divergence_of(last: LastPrompt, strategy: Strategy, run: Generation, rounding: float) -> Divergence:
    """Why a run's text differs from the target's. This takes a few forward passes."""
    assert last.target is not None
    settings = last.job.settings
    case = DivergenceCase(
        last.job.prompt,
        run.steps,
        last.target.tokens,
        new_session=partial(last.job.session, "target"),
        decoding=last.job.decoding,
        width=settings.max_drafts + 1,  # the drafts and one more row
        own_noise=strategy.draft_has_probs and settings.verify != "coupled",
        coarse=depends_on_width(last.job.pair),
    )
    return explain(case, rounding)
