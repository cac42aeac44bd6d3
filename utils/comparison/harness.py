"""Harness: the loaded pair and the strategies, as the session and the commands that run models use them.

It plans and runs jobs. It shows nothing and decides nothing about settings.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from ngram_assisted import NGramStorage
from utils.comparison.arms import Arm, ComparedRun, LocalArm, Run, ServerArm, compare_run, empty_storage, ids_of
from utils.comparison.strategies import STRATEGIES, Job, Strategy
from utils.comparison.training import Training
from utils.config.settings import Settings
from utils.decode.model_info import check_memory, context_length
from utils.decode.model_session import ModelSession
from utils.errors import ContextOverflow, UserError
from utils.metrics.divergence import Divergence, DivergenceCase, explain
from utils.metrics.results import Comparison, Generation
from utils.pairs.drafter_kinds import DrafterCaches
from utils.pairs.pair import Pair, depends_on_width
from utils.prompts.conversation import Conversations, Turn, Turns, diverging_turn, with_reset_hint
from utils.servers.address import TARGET, ServerAddress, other_machine
from utils.servers.connection import Connection, ServerList
from utils.text import count_of

PlannedRun = tuple[Arm, Turns]  # an arm and the conversation that it continues; the arm of a strategy has its job


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
        return {arm.name: arm.job for arm, _ in self.planned if isinstance(arm, LocalArm) and arm.job is not None}

    @property
    def histories(self) -> Mapping[str, Turns]:
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
    def local(self) -> list[tuple[Strategy, Generation, Comparison]]:
        """The strategies, the rounds of their runs, and the comparisons with the target's run."""
        return [
            (arm.strategy, run.generation, comparison)
            for arm, run, comparison in self.compared
            if arm.strategy is not None and run.generation is not None
        ]

    @property
    def servers(self) -> list[ComparedRun]:
        return [entry for entry in self.compared if not entry.run.is_local]

    @property
    def target(self) -> Generation | None:
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
        own_noise=strategy.kind.has_probs and settings.verify != "coupled",
        coarse=depends_on_width(job.pair),
    )
    return explain(case, rounding)


@dataclass(slots=True)
class SessionState:
    """The memory of one session.

    `prompts` are those that were run, in order. `causes` explains by strategy why texts of the last prompt differ from
    the target's. `records` makes those of the last result. `advice` holds the settings that the last verdict
    recommends. `rounding` is the largest observed change of the target's logits by verify width. `training` is that of
    a drafter that learns.
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
    training: Training | None = None

    def settle_records(self) -> None:
        """Make the records of the last result now, before the models or the engine change that they describe."""
        made = self.records()
        self.records = lambda: made


NO_DRAFTER = "No drafter is loaded, so strategies that need one are skipped (/load or --drafter loads one)."
NO_PROMPT_YET = "a prompt is needed: send one first."
NO_MODEL = "this needs a loaded model, and none is loaded: /load PAIR loads one."
NOTHING_RUNS = "There is nothing to run a prompt with: /server add NAME URL adds a server, and /load PAIR loads models."


@dataclass(slots=True)
class Harness:
    """A pair, the table of strategies, and the state of the session.

    `loaded` is None in a session without local models. Only its drafter may change. `progress` receives sentences about
    the current work, and `note` those that stay on the screen, for example about skipped prompts.
    """

    loaded: Pair | None
    state: SessionState
    strategies: Sequence[Strategy] = field(default=STRATEGIES)
    progress: Callable[[str], None] = lambda text: None
    note: Callable[[str], None] = lambda text: None

    @classmethod
    def of(cls, pair: Pair | None, settings: Settings, strategies: Sequence[Strategy] = STRATEGIES) -> "Harness":
        return cls(pair, SessionState(empty_storage(settings, pair)), strategies)

    @property
    def has_pair(self) -> bool:
        return self.loaded is not None

    @property
    def pair(self) -> Pair:
        """The loaded models. Raises UserError if no models are loaded."""
        if self.loaded is None:
            raise UserError(NO_MODEL)
        return self.loaded

    def last(self) -> LastPrompt:
        """The last prompt, if local strategies ran it. Otherwise raises UserError."""
        if self.last_local is None:
            raise UserError(NO_PROMPT_YET if self.has_pair else NO_MODEL)
        return self.last_local

    @property
    def last_local(self) -> LastPrompt | None:
        """The last prompt, or None if no local strategy ran it."""
        last = self.state.last
        return last if last is not None and last.is_local else None

    def variants(self, settings: Settings, *, enabled: bool = False) -> list[Strategy]:
        """All or the enabled strategies, with a variant for each drafter kind. Raises UserError for a missing kind."""
        chosen = (strategy for strategy in self.strategies if not enabled or getattr(settings, strategy.toggle))
        return [variant for strategy in chosen for variant in strategy.variants(settings.drafter_kind, self.pair)]

    def runnable(self, settings: Settings, *, enabled: bool = False) -> list[Strategy]:
        """The variants whose models are loaded."""
        has_drafter = self.pair.drafter is not None
        variants = self.variants(settings, enabled=enabled)
        return [strategy for strategy in variants if has_drafter or not strategy.needs_drafter]

    def enabled(self, settings: Settings) -> list[Strategy]:
        """The runnable strategies that are enabled in the settings. Raises UserError if no strategy is enabled."""
        if not (enabled := self.runnable(settings, enabled=True)):
            raise UserError("No strategy is enabled; turn one on, for example with /target on.")
        return enabled

    def runs_locally(self, settings: Settings) -> bool:
        """Whether models are loaded and a strategy is enabled that runs them."""
        return self.has_pair and bool(self.runnable(settings, enabled=True))

    @property
    def baseline(self) -> Strategy:
        return next(strategy for strategy in self.strategies if strategy.is_baseline)

    def prompt_ids(self, text: str, settings: Settings, history: Turns = ()) -> list[int]:
        """The token ids of a prompt that follows earlier turns. Raises UserError for an empty prompt."""
        return ids_of(self.pair, text, settings, history)

    def arm(self, strategy: Strategy) -> LocalArm:
        """The arm of a strategy whose runs have storages and texts of their own."""
        return LocalArm(strategy, self.pair, self.state.caches.cut_models)

    def server_arms(self) -> list[ServerArm]:
        connections = self.state.servers.connections.values()
        return [ServerArm(connection, self.loaded, place) for place, connection in enumerate(connections)]

    def plan(self, text: str, settings: Settings) -> list[PlannedRun]:
        """The enabled strategies, with jobs that share the session's storage and caches, and then the servers.

        The reasons why strategies are skipped or draft nothing are noted. Raises UserError for a prompt that the
        target cannot take.
        """
        servers: list[PlannedRun] = [(arm, self._history(arm, settings)) for arm in self.server_arms()]
        if not self.has_pair and not servers:
            raise UserError(NOTHING_RUNS)
        if servers and not self.runs_locally(settings):
            return servers
        if self.pair.drafter is None and any(row.needs_drafter for row in self.variants(settings, enabled=True)):
            self.note(NO_DRAFTER)
        arms = self._prepared(text, settings, [self.arm(strategy) for strategy in self.enabled(settings)])
        self._check_prompts([(arm.strategy, arm.job) for arm in arms if arm.job is not None])
        return [*((arm, arm.job.history if arm.job else ()) for arm in arms), *servers]

    def _history(self, arm: Arm, settings: Settings) -> Turns:
        """The conversation that an arm continues, which is its own after the first turn."""
        conversations = self.state.conversations
        return conversations.history(arm.name, self.baseline.name) if settings.keeps_conversation else ()

    def _prepared(self, text: str, settings: Settings, arms: Sequence[LocalArm]) -> list[LocalArm]:
        histories = [self._history(arm, settings) for arm in arms]
        # Strategies mostly share a history: each different one is rendered and tokenized once.
        ids = {history: self.prompt_ids(text, settings, history) for history in dict.fromkeys(histories)}
        job = Job([], self.pair, settings, self.state.storage, caches=self.state.caches)
        return [
            replace(arm, job=replace(job, prompt=ids[history], history=history))
            for arm, history in zip(arms, histories, strict=True)
        ]

    def _check_prompts(self, planned: Sequence[tuple[Strategy, Job]]) -> None:
        """Refuse an unusable prompt once, not once per strategy. One that is too long for the drafter gets a note."""
        # Only `begin` is needed. Without a cache, opening a session probes nothing.
        session = ModelSession(self.pair.target, use_cache=False)
        for _, job in planned:
            try:
                session.begin(job.prompt)
            except ContextOverflow as error:
                raise with_reset_hint(error, job.history) from error
        tokens = max(len(job.prompt) + job.settings.length for _, job in planned)
        models = [model for model in (self.pair.target, self.pair.drafter) if isinstance(model, PreTrainedModel)]
        check_memory(models, tokens, remedy="use a shorter prompt or a smaller /length")
        longest = max((len(job.prompt) for strategy, job in planned if strategy.needs_drafter), default=0)
        bound = context_length(self.pair.drafter) if longest else None
        # The same bound as in ModelDrafter.begin: a draft needs one position.
        if bound is not None and longest >= bound:
            self.note(
                f"The prompt has {count_of(longest, 'token')} and the drafter a context length of {bound}: "
                "it will draft nothing."
            )

    def keep_turn(self) -> None:
        """Add the last prompt and its answers to the conversations."""
        if (last := self.state.last) is None:
            return
        for _, run, _ in last.compared:
            # Appended to the history of this run, which may be the baseline's instead of the strategy's own.
            turns = (*last.histories[run.name], Turn(last.text, run.text))
            self.state.conversations.by_name[run.name] = turns

    def start_engine(self, settings: Settings, *, anew: bool = False) -> None:
        """Use the engine and the threads of the settings.

        `anew` tests and measures everything again, even if nothing has changed. If this fails, it raises UserError and
        changes nothing.
        """
        engine = self.pair.engine
        try:
            (engine.test if anew else engine.use)(settings.engine, settings.threads)
        finally:  # an interrupted preparation has also replaced layers
            self.state.caches.cut_models.clear()  # they hold layers of the previous engine
            self.state.rounding = 0.0  # it was measured with the previous engine

    def new_storage(self, settings: Settings) -> NGramStorage:
        return empty_storage(settings, self.pair)

    def job(self, prompt: list[int], settings: Settings, history: Turns = ()) -> Job:
        """A job with an n-gram storage and texts of its own. It shares only the target's layer cuts with other jobs."""
        caches = DrafterCaches(cut_models=self.state.caches.cut_models)
        return Job(prompt, self.pair, settings, self.new_storage(settings), caches=caches, history=history)


def comparable_servers(harness: Harness) -> list[Connection]:
    """The servers with a baseline that shares their host, so that speeds can be compared."""
    servers = harness.state.servers
    known: dict[str | None, ServerAddress | None] = {address.name: address for address in servers.addresses}
    known |= {TARGET: None} if harness.has_pair else {}
    baselines = ((one, one.address.baseline) for one in servers)
    return [one for one, name in baselines if name in known and not other_machine(one.address, known[name])]
