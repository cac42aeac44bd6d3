"""What a session remembers from one line to the next: the runs of the last prompt, results, storages, servers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ngram_assisted import NGramStorage
from utils.comparison.arms import Arm, ComparedRun, LocalArm
from utils.comparison.job import Job
from utils.comparison.runs import Run, compare_run
from utils.comparison.strategies import Strategy
from utils.config.settings import Settings
from utils.metrics.divergence import Divergence, DivergenceCase, explain
from utils.metrics.results import Comparison, Generation
from utils.pairs.drafter_kinds import DrafterCaches
from utils.pairs.pair import depends_on_width
from utils.prompts.conversation import Conversations, Turns, diverging_turn
from utils.servers.connection import ServerList


class PlannedRun(NamedTuple):
    """An arm and the conversation that it continues. The arm of a strategy has its job."""

    arm: Arm
    history: Turns


class LocalResult(NamedTuple):
    """A strategy, the rounds of its run, and the comparison with the target's run."""

    strategy: Strategy
    run: Generation
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class LastPrompt:
    """The finished runs of one prompt, by local strategies and by servers.

    `text` is the prompt as it was sent. `planned` are the arms that should run, `jobs` those of strategies by name.
    """

    text: str
    settings: Settings
    planned: tuple[PlannedRun, ...]
    compared: tuple[ComparedRun, ...]

    @classmethod
    def of(cls, text: str, settings: Settings, planned: Sequence[PlannedRun], runs: Sequence[Run]) -> "LastPrompt":
        """Compare each run with its baseline's. Texts are compared only if both had the same request."""
        last = cls(text, settings, tuple(planned), ())
        arms, jobs = {arm.name: arm for arm, _ in planned}, last.jobs
        same = {name: job.is_same_request(last.job) for name, job in jobs.items()}
        compared = (
            ComparedRun(arms[run.name], run, compare_run(run, runs, settings, same_request=same.get(run.name, True)))
            for run in runs
        )
        return cls(text, settings, last.planned, tuple(compared))

    @property
    def jobs(self) -> Mapping[str, Job]:
        """The jobs of local strategies by name."""
        return {arm.name: arm.job for arm, _ in self.planned if isinstance(arm, LocalArm) and arm.job is not None}

    @property
    def histories(self) -> Mapping[str, Turns]:
        """The conversation before the prompt, by name of the arm."""
        return {arm.name: history for arm, history in self.planned}

    @property
    def is_local(self) -> bool:
        """Whether a local strategy should run."""
        return bool(self.jobs)

    @property
    def job(self) -> Job:
        """The target's job, or the first strategy's if the target did not run. There must be a local strategy."""
        jobs = self.jobs
        baseline = next((arm.name for arm, _ in self.planned if arm.strategy and arm.strategy.is_baseline), "")
        return jobs.get(baseline) or next(iter(jobs.values()))

    @property
    def local(self) -> list[LocalResult]:
        """The runs of strategies."""
        return [
            LocalResult(arm.strategy, run.generation, comparison)
            for arm, run, comparison in self.compared
            if arm.strategy is not None and run.generation is not None
        ]

    @property
    def strategies(self) -> list[ComparedRun]:
        """The compared runs of strategies."""
        return [entry for entry in self.compared if entry.run.is_local]

    @property
    def servers(self) -> list[ComparedRun]:
        """The compared answers of servers."""
        return [entry for entry in self.compared if not entry.run.is_local]

    @property
    def target(self) -> Generation | None:
        """The target's own run."""
        return next((run for strategy, run, _ in self.local if strategy.is_baseline), None)


def unlike_target(last: LastPrompt) -> list[tuple[Strategy, Generation]]:
    """The runs whose text should equal the target's, but does not."""
    # `same` is None if the two were not compared.
    return [(strategy, run) for strategy, run, result in last.local if strategy.lossless and result.same is False]


def own_conversations(last: LastPrompt) -> list[tuple[Strategy, int]]:
    """The strategies whose request differed from the target's, and the first turn that differed."""
    if last.target is None:
        return []
    target, jobs = last.job, last.jobs
    return [
        (strategy, diverging_turn(jobs[strategy.name].history, target.history))
        for strategy, _, _ in last.local
        if not jobs[strategy.name].is_same_request(target)
    ]


def divergence_of(last: LastPrompt, strategy: Strategy, run: Generation, rounding: float) -> Divergence:
    """Why a run's text differs from the target's. This takes a few forward passes."""
    assert last.target is not None
    job = last.job
    settings = job.settings
    case = DivergenceCase(
        job.prompt,
        run.steps,
        last.target.tokens,
        new_session=partial(job.session, "target"),
        decoding=job.decoding,
        width=settings.max_drafts + 1,  # the drafts and one more row
        own_noise=strategy.draft_has_probs and settings.verify != "coupled",
        coarse=depends_on_width(job.pair),
    )
    return explain(case, rounding)


@dataclass(slots=True)
class SessionState:
    """The memory of one session.

    `prompts` are those that were run, in order. `last` has the runs of the last prompt, and `causes` explains by
    strategy why texts differ from the target's. `records` makes those of the last result. `advice` holds the
    settings that the last verdict recommends. `servers` receive every prompt. `rounding` is the largest observed change
    of the target's logits by verify width.
    """

    storage: NGramStorage
    prompts: list[str] = field(default_factory=list)
    advice: Mapping[str, Any] | None = None
    last: LastPrompt | None = None
    records: Callable[[], list[dict[str, Any]]] = list
    causes: Mapping[str, Divergence] = field(default_factory=dict)
    rounding: float = 0.0
    caches: DrafterCaches = field(default_factory=DrafterCaches)
    conversations: Conversations = field(default_factory=Conversations)
    servers: ServerList = field(default_factory=ServerList)

    def settle_records(self) -> None:
        """Make the records of the last result now, before the models or the engine change that they describe."""
        made = self.records()
        self.records = lambda: made
