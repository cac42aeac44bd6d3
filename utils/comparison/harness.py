"""Bench: the loaded models and strategies as those who run them need them, and what a session remembers from one line to the next.

The workbench runs prompts on it; commands that run models (utils.commands) are handed it. It shows nothing and decides nothing about
settings.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from utils.comparison.reports import Finding, Report
from utils.comparison.strategies import DrafterKind, Job, Kept, Strategy
from utils.config.settings import Settings
from utils.decode.noise import fix_seeds
from utils.decode.steps import FinishReason, Step
from utils.errors import UserError
from utils.metrics.divergence import Divergence, Parting, explain
from utils.metrics.results import Comparison, Generation, collect, compare
from utils.metrics.stopwatch import Lap
from utils.prompts.chat_template import prompt_ids
from utils.prompts.conversation import Conversations, Turn, Turns, own_since
from utils.text import decode

Asked = tuple[Strategy, Job]
Compared = tuple[Strategy, Generation, Comparison]


@dataclass(frozen=True, slots=True)
class Last:
    """What the last prompt came to: its text as it was sent, what was run, and how the runs compare.

    job: the target's, or where the target was off the first strategy's. jobs: each strategy's own, by its name.
    """

    text: str
    job: Job
    compared: tuple[Compared, ...]
    jobs: Mapping[str, Job]

    @classmethod
    def of(cls, text: str, asked: Sequence[Asked], results: Sequence[tuple[Strategy, Generation]]) -> "Last":
        """Compare what came of what was asked, in so far as it was the same."""
        jobs = {strategy.name: job for strategy, job in asked}
        job = next((job for strategy, job in asked if strategy.is_baseline), asked[0][1])
        target = next((run for strategy, run in results if strategy.is_baseline), None)
        compared = (
            (strategy, run, compare(run, target, alike=jobs[strategy.name].is_like(job))) for strategy, run in results
        )
        return cls(text, job, tuple(compared), jobs)

    @property
    def target(self) -> Generation | None:
        """The target's own run."""
        return next((run for strategy, run, _ in self.compared if strategy.is_baseline), None)


@dataclass(frozen=True, slots=True)
class StorageTools:
    """What can be done with n-gram storages.

    make: an empty one, for settings and a vocabulary. save: a storage to a file, with the name of the model. load: from a file, for a
    vocabulary and a limit; with the name of its kind and of the model.
    """

    make: Callable[[Settings, int], Any]
    save: Callable[[Any, Path, str], None]
    load: Callable[[Path, int, int], tuple[Any, str, str]]


@dataclass(frozen=True, slots=True)
class Shown:
    """What the screen showed last: records, as --json has them; a finished report and its findings, or else the last prompt's runs.

    causes: why texts differ, by the strategy's name.
    """

    records: list[dict[str, Any]]
    report: Report | None = None
    findings: Sequence[Finding] = ()
    causes: Mapping[str, Divergence] = field(default_factory=dict)


@dataclass(slots=True)
class Memory:
    """last: the last prompt's runs. shown: what the screen showed last. storage: the session's n-gram storage. kept: what drafters keep.

    rounding: how far windows of another width were seen to move the target's logits. conversations: what was said, where turns are kept.
    """

    last: Last | None = None
    shown: Shown | None = None
    rounding: float = 0.0
    storage: Any = None
    kept: Kept = field(default_factory=Kept)
    conversations: Conversations = field(default_factory=Conversations)


Foreseen = Iterator[tuple[Strategy, int | None, list[Step], list[Lap]]]


@dataclass(frozen=True, slots=True)
class Probes:
    """What can be learnt from drafters without a run.

    draft_seconds: how long one of a kind takes for a draft. foresee: the rounds of every gamma along a finished text, with
    laps that tell how many drafts are worked out for them.
    """

    draft_seconds: Callable[[Job, DrafterKind], float] = lambda job, kind: 0.0
    foresee: Callable[[Job, Sequence[Strategy], list[int]], Foreseen] = lambda job, strategies, tokens: iter(())


@dataclass(frozen=True, slots=True)
class Bench:
    """pair: utils.pairs.load_pair.Pair."""

    pair: Any
    strategies: Sequence[Strategy]
    storages: StorageTools
    vocabulary: int
    probes: Probes = field(default_factory=Probes)
    memory: Memory = field(default_factory=Memory)

    def last(self) -> Last:
        """The last prompt's runs. Raises UserError where there was none."""
        if self.memory.last is None:
            raise UserError("a prompt is needed: send one first.")
        return self.memory.last

    def variants(self, settings: Settings) -> list[Strategy]:
        """All strategies, one for each kind of drafter. Raises UserError for a kind that is not there."""
        return [
            variant for strategy in self.strategies for variant in strategy.variants(settings.drafter_kind, self.pair)
        ]

    def runnable(self, settings: Settings) -> list[Strategy]:
        """Those of them whose models are loaded."""
        return [
            strategy
            for strategy in self.variants(settings)
            if self.pair.drafter is not None or not strategy.needs_drafter
        ]

    def enabled(self, settings: Settings) -> list[Strategy]:
        """Those of them that the settings ask for. Raises UserError where none is left."""
        chosen = [strategy for strategy in self.runnable(settings) if strategy.is_on(settings)]
        if not chosen:
            raise UserError("No strategy is left to run; turn one on, for example with /target on.")
        return chosen

    @property
    def baseline(self) -> Strategy:
        """The target alone."""
        return next(strategy for strategy in self.strategies if strategy.is_baseline)

    def ids(self, text: str, settings: Settings, history: Turns = ()) -> list[int]:
        """The prompt ids of a text behind what was said before. Raises UserError where it gives none."""
        tokenizer, special = self.pair.tokenizer, settings.special
        return prompt_ids(tokenizer, text, chat=settings.chat, system=settings.system, special=special, history=history)

    def asked(self, text: str, settings: Settings, chosen: Sequence[Strategy]) -> list[Asked]:
        """A prompt for each strategy, behind its own conversation where turns are kept; all share the session's storage."""
        said, baseline = self.memory.conversations, self.baseline.name
        histories = [said.of(strategy.name, baseline) if settings.keeps_turns else () for strategy in chosen]
        ids = {history: self.ids(text, settings, history) for history in dict.fromkeys(histories)}
        job = Job([], self.pair, settings, self.memory.storage, kept=self.memory.kept)
        return [
            (strategy, replace(job, prompt=ids[history], history=history))
            for strategy, history in zip(chosen, histories, strict=True)
        ]

    def keep_turn(self) -> None:
        """The last prompt and its answers become part of the conversations."""
        last = self.last()
        for strategy, run, _ in last.compared:
            turn = Turn(last.text, decode(self.pair.tokenizer, run.tokens))
            self.memory.conversations.by_name[strategy.name] = (*last.jobs[strategy.name].history, turn)

    def compute(self, settings: Settings) -> None:
        """Have the engine compute as the settings say. Raises UserError where it cannot; all is then as it was."""
        self.pair.engine.use(settings.engine, settings.threads)
        self.memory.kept.models.clear()  # they hold layers of the engine that was
        self.memory.rounding = 0.0  # what was seen of another engine says nothing about this one

    def new_storage(self, settings: Settings) -> Any:
        """An empty n-gram storage."""
        return self.storages.make(settings, self.vocabulary)

    def job(self, prompt: list[int], settings: Settings, history: Turns = ()) -> Job:
        """A job of its own: no storage, text or session is shared with another; what was cut out of the target is cut once."""
        return Job(
            prompt,
            self.pair,
            settings,
            self.new_storage(settings),
            kept=Kept(models=self.memory.kept.models),
            history=history,
        )


def run_alone(
    bench: Bench, prompt: list[int], strategy: Strategy, settings: Settings, *, history: Turns = ()
) -> Generation:
    """A run on a storage of its own. Ctrl-C ends it all."""
    fix_seeds(settings.seed)
    run = collect(strategy.steps(bench.job(prompt, settings, history)))
    if run.finish is FinishReason.INTERRUPTED:
        raise KeyboardInterrupt
    return run


def unlike_target(last: Last) -> list[tuple[Strategy, Generation]]:
    """The runs whose text should be the target's own, and is not."""
    return [
        (strategy, run) for strategy, run, comparison in last.compared if strategy.lossless and comparison.same is False
    ]


def own_conversations(last: Last) -> list[tuple[Strategy, int]]:
    """The strategies that were asked something else than the target, and since which turn."""
    jobs = [(strategy, last.jobs[strategy.name]) for strategy, _, _ in last.compared if last.target is not None]
    return [(strategy, own_since(job.history, last.job.history)) for strategy, job in jobs if not job.is_like(last.job)]


def divergence_of(last: Last, strategy: Strategy, run: Generation, rounding: float) -> Divergence:
    """Why a run is not the target's: a forward over its text, or a few."""
    assert last.target is not None
    settings = last.job.settings
    parting = Parting(
        last.job.prompt,
        run.steps,
        last.target.tokens,
        opened=partial(last.job.session, "target"),
        decoding=last.job.decoding,
        window=settings.most_drafts + 1,
        own_noise=strategy.draft_law and settings.verify != "coupled",
    )
    return explain(parting, rounding)
