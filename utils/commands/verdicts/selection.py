"""What /verdict can recommend, and how it finds a candidate: it replays the target's answers to the tuning prompts with
every drafter and gamma, then runs a few.

The replay is that of /whatif, with measured costs. Its best candidates run in turns on the same prompts, because costs
are not everything. The figures of the verdict contain nothing of this.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import mean
from typing import Any

from utils.commands.experiments.predicted_speed import TargetTiming, costs_of_run, drafting_cost
from utils.commands.experiments.repeated_runs import rotated
from utils.commands.verdicts.measurement import SELECTION_SECONDS, VerdictClock, run_length
from utils.comparison.arms import complete
from utils.comparison.gamma_replay import ReplayProgress, replay_events
from utils.comparison.harness import Harness
from utils.comparison.job import Job
from utils.comparison.reports import Countdown, Progress
from utils.comparison.strategies import Strategy
from utils.comparison.warm_up import with_costs
from utils.config.settings import Settings
from utils.errors import UserError
from utils.metrics.results import Generation
from utils.pairs.pair import Pair
from utils.pairs.request import HEAD, LAYERS, LOADED, MODEL
from utils.prompts.prompt_files import Prompt
from utils.text import first_of

PROBE_TOKENS = 8
TUNING_TOKENS = 48
REPLAY_SHARE = 0.6  # share of the selection time after which no further prompt is replayed
TRIED = 3  # maximum number of candidates that are run
WORTH_TRYING = 0.8  # minimum prediction, relative to the best one
DraftChoice = tuple[Strategy, int | None]  # a strategy with a draft length, where None is adaptive
NAMES = {
    MODEL: "the drafter model",
    HEAD: "the head",
    "lookup": "prompt lookup",
    "suffix": "suffix matching",
    "chain": "suffix matching chained with the drafter",
    "ngram": "n-gram assisted decoding",
}
FIXED_GAMMA_PENALTY = 0.05
WITHOUT_DRAFTER = ("lookup", "suffix")
# Most users want to know about the loaded drafter. A chain comes last, because its replay takes the longest.
ORDER = (LOADED, MODEL, HEAD, "ngram", "lookup", "suffix")


@dataclass(frozen=True, slots=True)
class VerdictCandidate:
    """A strategy with a draft length, where None is adaptive. `predicted` is its speed-up in the replay of the tuning
    prompts.
    """

    strategy: Strategy
    gamma: int | None
    predicted: float

    def label(self, pair: Pair) -> str:
        """The candidate in sentences."""
        return f"{kind_name(self.strategy, pair)} with /gamma {self.gamma_text}"

    def short_label(self, pair: Pair) -> str:
        """The candidate in tables and progress lines."""
        return f"{self.strategy.drafter_label(pair)}, gamma {self.gamma_text}"

    @property
    def gamma_text(self) -> str:
        return "auto" if self.gamma is None else str(self.gamma)

    def settings(self, settings: Settings, length: int) -> Settings:
        """The settings of its runs."""
        return replace(settings, gamma=self.gamma, length=length)

    @property
    def changes(self) -> Mapping[str, Any]:
        """The fields of Settings that make a session use it."""
        if not self.strategy.chooses_kind:
            return {"ngram": True, "speculative": False, "gamma": self.gamma}
        return {"speculative": True, "ngram": False, "drafter_kind": (self.strategy.word,), "gamma": self.gamma}

    def is_used_by(self, settings: Settings) -> bool:
        """Whether a session with these settings already uses it, possibly beside other strategies."""
        return all(getattr(settings, name) == value for name, value in self.changes.items() if value is not False)

    def commands(self, settings: Settings) -> tuple[str, ...]:
        """The commands that make a session with these settings use it."""
        if not self.strategy.chooses_kind:
            return "/ngram on", f"/gamma {self.gamma_text}"
        turned_on = () if settings.speculative else ("/speculative on",)
        return *turned_on, f"/drafter_kind {self.strategy.word}", f"/gamma {self.gamma_text}"

    def figures(self, pair: Pair) -> dict[str, Any]:
        """The candidate in the JSON record."""
        return {
            "drafter_kind": self.strategy.drafter_label(pair),
            "gamma": self.gamma,
            "predicted_speedup": self.predicted,
        }


def kind_name(strategy: Strategy, pair: Pair) -> str:
    """A drafter kind in words."""
    label = strategy.drafter_label(pair) or strategy.name
    if label.startswith(LAYERS):
        return f"the target's {first_of(int(label.removeprefix(LAYERS)), 'layer')}"
    loaded = f"the {label} drafter" if label == pair.drafter_kind else label  # a published format, such as EAGLE-3
    return NAMES.get(label, loaded)


def drafting_strategies(harness: Harness, settings: Settings) -> tuple[list[Strategy], Settings, dict[str, list[str]]]:
    """The strategies that can draft here, the settings with all their costs, and the reasons why others cannot draft.

    Unknown costs are measured.
    """
    loaded = () if harness.pair.drafter is None else (LOADED, "chain")
    known: list[str] = []
    problems: dict[str, list[str]] = {}
    for word in dict.fromkeys((*loaded, *settings.drafter_kind, *WITHOUT_DRAFTER)):
        if word == LOADED and not loaded:
            continue
        try:
            settings = with_costs(harness, replace(settings, drafter_kind=(word,)))
        except UserError as error:
            problems.setdefault(str(error), []).append(word)
        else:
            known.append(word)
    settings = replace(settings, drafter_kind=tuple(known))
    drafting = [strategy for strategy in harness.runnable(settings) if strategy.drafts]
    return sorted(drafting, key=_order), settings, problems


def _order(strategy: Strategy) -> int:
    return ORDER.index(strategy.word) if strategy.word in ORDER else len(ORDER) + (strategy.word == "chain")


def best_of_each(candidates: Sequence[VerdictCandidate], pair: Pair) -> list[VerdictCandidate]:
    """The best candidate of each drafter kind, the best kind first."""
    best: dict[str, VerdictCandidate] = {}
    for candidate in candidates:
        kind = str(candidate.strategy.drafter_label(pair))
        if kind not in best or _preference(candidate) > _preference(best[kind]):
            best[kind] = candidate
    return sorted(best.values(), key=_preference, reverse=True)


def _preference(candidate: VerdictCandidate) -> float:
    """The predicted speed-up. A fixed gamma is the best of sixteen on a few prompts, so it is penalized."""
    return candidate.predicted * (1.0 if candidate.gamma is None else 1 - FIXED_GAMMA_PENALTY)


@dataclass(slots=True)
class Selection:
    """What is known about the candidates.

    `settings` include the costs of all drafters. `length` is the number of new tokens of a run, `step` the seconds of a
    decode step, and `began` the end of the warm-up. `predicted` has the speed-up by strategy and gamma for each
    replayed prompt. `speeds` has tokens per second in the order of `tried`, for each trial round.
    """

    harness: Harness
    settings: Settings
    prompts: Sequence[Prompt]
    clock: VerdictClock
    length: int = 0
    step: float = 0.0
    began: float = 0.0
    strategies: list[Strategy] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)
    predicted: list[dict[DraftChoice, float]] = field(default_factory=list)
    tried: list[VerdictCandidate] = field(default_factory=list)
    speeds: list[list[float]] = field(default_factory=list)

    def run(self) -> Iterator[Progress]:
        """Warm up, replay, and run the best candidates. Raises UserError if nothing can draft here."""
        yield Progress("warming up the target and every drafter ...")
        self._warm_up()
        self.began = self.clock.seconds
        yield from self._replay_all()
        best = best_of_each(self.candidates(), self.harness.pair)
        self.tried = [one for one in best[:TRIED] if one.predicted > WORTH_TRYING * best[0].predicted]
        yield from self._try_all()

    def candidates(self) -> list[VerdictCandidate]:
        """All replayed candidates with the geometric mean of their speed-ups, except gamma 0, which drafts nothing."""
        # Prompts that not all candidates have replayed are skipped: all must be judged on the same ones.
        whole = [scores for scores in self.predicted if set(scores) >= set(self.predicted[0])]
        return [
            VerdictCandidate(strategy, gamma, exp(mean(log(scores[strategy, gamma]) for scores in whole)))
            for strategy, gamma in (self.predicted[0] if whole else ())
            if gamma != 0
        ]

    def chosen(self) -> VerdictCandidate:
        """The candidate with the fastest run, or with the best replay if there was no time for runs."""
        best = best_of_each(self.tried, self.harness.pair)[0]
        if self.speeds:
            means = [mean(map(log, speeds)) for speeds in zip(*self.speeds, strict=True)]
            best = self.tried[means.index(max(means))]
        return best

    def best_fixed_gamma(self, strategy: Strategy) -> int:
        """The best gamma that is a number, for programs without adaptive gamma."""
        fixed = [one for one in self.candidates() if one.strategy is strategy and one.gamma is not None]
        best = max(fixed, key=lambda candidate: candidate.predicted, default=None)
        return best.gamma if best is not None and best.gamma is not None else 1

    @property
    def _seconds(self) -> float:
        """Seconds since the end of the warm-up."""
        return self.clock.seconds - self.began

    def cannot_draft(self) -> list[str]:
        """A sentence for each reason why some drafters cannot run."""
        return [f"Cannot draft here: {', '.join(names)}. {reason}" for reason, names in self.problems.items()]

    def not_replayed(self) -> list[str]:
        """The drafter kinds that were not replayed for lack of time."""
        replayed = {strategy.name for strategy, _ in self.predicted[0]} if self.predicted else set()
        return [kind_name(one, self.harness.pair) for one in self.strategies if one.name not in replayed]

    def _warm_up(self) -> None:
        """Run everything once, which also shows what cannot run, and choose the length of the runs."""
        self.strategies, self.settings, self.problems = drafting_strategies(self.harness, self.settings)
        text, probe = self.prompts[0].text, min(self.settings.length, PROBE_TOKENS)
        for strategy in list(self.strategies):
            try:
                self._run(text, strategy, probe)
            except UserError as error:
                self.strategies.remove(strategy)
                self.problems.setdefault(str(error), []).append(kind_name(strategy, self.harness.pair))
        if not self.strategies:
            raise UserError(f"nothing can draft here. {' '.join(self.problems)}")
        self._run(text, self.harness.baseline, probe)
        timed = self._run(text, self.harness.baseline, probe)
        self.step = TargetTiming.of(timed).step if len(timed.steps) > 1 else timed.seconds
        self.length = run_length(self.step, self.settings.length)

    def _run(self, text: str, strategy: Strategy, length: int, gamma: int | None = None) -> Generation:
        run = complete(self.harness.arm(strategy).run(text, replace(self.settings, gamma=gamma, length=length)))
        assert run.generation is not None
        return run.generation

    def _replay_all(self) -> Iterator[Progress]:
        for place, prompt in enumerate(self.prompts, start=1):
            if self.predicted and self._seconds > REPLAY_SHARE * SELECTION_SECONDS:
                break
            where = f"choosing a drafter: replaying tuning prompt {place} of {len(self.prompts)}"
            yield Progress(f"{where} ...")
            length = min(self.length, TUNING_TOKENS)
            run = self._run(prompt.text, self.harness.baseline, length)
            if len(run.steps) > 1:
                ids = self.harness.prompt_ids(prompt.text, self.settings)
                job = self.harness.job(ids, replace(self.settings, length=length))
                scores = yield from self._replay(job, run, where)
                self.predicted.append(scores)
        if not self.predicted:
            remedy = "raise /length" if self.length < 2 else "use prompts with longer answers"
            raise UserError(f"the answers have fewer than two tokens: {remedy}.")

    def _replay(self, job: Job, run: Generation, where: str) -> Generator[Progress, None, dict[DraftChoice, float]]:
        """The predicted speed-up of every gamma of each strategy on one answer, while there is time."""
        timing = TargetTiming.of(run)
        costs = costs_of_run(self.settings.costs, len(job.prompt), len(run.tokens))
        countdown, alone = Countdown(), timing.alone(len(run.tokens))
        scores: dict[DraftChoice, float] = {}
        kind: dict[DraftChoice, float] = {}  # results of the strategy that is being replayed
        for event in replay_events(job, self.strategies, run.tokens):
            if isinstance(event, ReplayProgress):
                done = (self.strategies.index(event.strategy) + event.fraction) / len(self.strategies)
                yield from countdown.at(done, f"{where}, {done:.0%} done")
            else:
                strategy, gamma, steps, timings = event
                drafting = drafting_cost(timings, costs, strategy.drafter_label(job.pair), len(job.prompt))
                kind[strategy, gamma] = alone / timing.predict(steps, costs, drafting)
                if gamma is None:  # adaptive gamma comes last
                    scores |= kind
                    kind = {}
            # At least one strategy is replayed.
            if scores and self._seconds > SELECTION_SECONDS:
                break
        return scores

    def _try_all(self) -> Iterator[Progress]:
        """Run the best candidates in turns, while there is time."""
        if len(self.tried) < 2:
            return
        for turn, prompt in enumerate(self.prompts):
            if self._seconds > SELECTION_SECONDS:
                return
            names = ", ".join(kind_name(candidate.strategy, self.harness.pair) for candidate in self.tried)
            yield Progress(f"choosing a drafter: running {names} on tuning prompt {turn + 1} ...")
            speeds: dict[int, float] = {}
            for index in rotated(range(len(self.tried)), turn):
                one = self.tried[index]
                run = self._run(prompt.text, one.strategy, min(self.length, TUNING_TOKENS), one.gamma)
                speeds[index] = run.tokens_per_second or 1e-9
            self.speeds.append([speeds[index] for index in sorted(speeds)])
