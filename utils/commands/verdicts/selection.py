"""Finds a candidate: replays the target's answers to the tuning prompts with every drafter and gamma, then runs a few.

The replay is that of /whatif, with measured costs. Its best candidates run in turns on the same prompts, because costs
are not everything. The figures of the verdict contain nothing of this.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import mean

from utils.commands.experiments.predicted_speed import TargetTiming, costs_of_run, drafting_cost
from utils.commands.experiments.repeated_runs import rotated
from utils.commands.verdicts.candidates import Candidate, best_of_each, drafting_strategies, kind_name
from utils.commands.verdicts.plan import ReadyPrompt
from utils.commands.verdicts.timing import SELECTION_SECONDS, Stopwatch, run_length
from utils.comparison.gamma_replay import ReplayProgress, replay_events
from utils.comparison.harness import Harness
from utils.comparison.job import Job
from utils.comparison.reports import Countdown, Progress
from utils.comparison.strategies import Strategy
from utils.config.settings import Settings
from utils.errors import UserError
from utils.metrics.results import Generation

PROBE_TOKENS = 8
TUNING_TOKENS = 48
REPLAY_SHARE = 0.6  # share of the selection time after which no further prompt is replayed
TRIED = 3  # maximum number of candidates that are run
WORTH_TRYING = 0.8  # minimum prediction, relative to the best one
Arm = tuple[Strategy, int | None]
Progressing = Generator[Progress, None, None]


@dataclass(slots=True)
class Selection:
    """What is known about the candidates.

    `settings` include the costs of all drafters. `length` is the number of new tokens of a run, `step` the seconds of a
    decode step, and `began` the end of the warm-up. `predicted` has the speed-up by strategy and gamma for each
    replayed prompt. `speeds` has tokens per second in the order of `tried`, for each trial round.
    """

    harness: Harness
    settings: Settings
    prompts: Sequence[ReadyPrompt]
    clock: Stopwatch
    length: int = 0
    step: float = 0.0
    began: float = 0.0
    strategies: list[Strategy] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)
    predicted: list[dict[Arm, float]] = field(default_factory=list)
    tried: list[Candidate] = field(default_factory=list)
    speeds: list[list[float]] = field(default_factory=list)

    def run(self) -> Progressing:
        """Warm up, replay, and run the best candidates. Raises UserError if nothing can draft here."""
        yield Progress("warming up the target and every drafter ...")
        self._warm_up()
        self.began = self.clock.seconds
        yield from self._replay_all()
        best = best_of_each(self.candidates(), self.harness.pair)
        self.tried = [one for one in best[:TRIED] if one.predicted > WORTH_TRYING * best[0].predicted]
        yield from self._try_all()

    def candidates(self) -> list[Candidate]:
        """All replayed candidates with the geometric mean of their speed-ups, except gamma 0, which drafts nothing."""
        # Prompts that not all candidates have replayed are skipped: all must be judged on the same ones.
        whole = [scores for scores in self.predicted if set(scores) >= set(self.predicted[0])]
        return [
            Candidate(strategy, gamma, exp(mean(log(scores[strategy, gamma]) for scores in whole)))
            for strategy, gamma in (self.predicted[0] if whole else ())
            if gamma != 0
        ]

    def chosen(self) -> Candidate:
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
        ids, probe = self.prompts[0].ids, min(self.settings.length, PROBE_TOKENS)
        for strategy in list(self.strategies):
            try:
                self._run(ids, strategy, probe)
            except UserError as error:
                self.strategies.remove(strategy)
                self.problems.setdefault(str(error), []).append(kind_name(strategy, self.harness.pair))
        if not self.strategies:
            raise UserError(f"nothing can draft here. {' '.join(self.problems)}")
        self._run(ids, self.harness.baseline, probe)
        timed = self._run(ids, self.harness.baseline, probe)
        self.step = TargetTiming.of(timed).step if len(timed.steps) > 1 else timed.seconds
        self.length = run_length(self.step, self.settings.length)

    def _run(self, ids: list[int], strategy: Strategy, length: int, gamma: int | None = None) -> Generation:
        return self.harness.run_alone(ids, strategy, Candidate(strategy, gamma, 1.0).settings(self.settings, length))

    def _replay_all(self) -> Progressing:
        for place, prompt in enumerate(self.prompts, start=1):
            if self.predicted and self._seconds > REPLAY_SHARE * SELECTION_SECONDS:
                break
            where = f"choosing a drafter: replaying tuning prompt {place} of {len(self.prompts)}"
            yield Progress(f"{where} ...")
            length = min(self.length, TUNING_TOKENS)
            run = self._run(prompt.ids, self.harness.baseline, length)
            if len(run.steps) > 1:
                job = self.harness.job(prompt.ids, replace(self.settings, length=length))
                scores = yield from self._replay(job, run, where)
                self.predicted.append(scores)
        if not self.predicted:
            remedy = "raise /length" if self.length < 2 else "use prompts with longer answers"
            raise UserError(f"the answers have fewer than two tokens: {remedy}.")

    def _replay(self, job: Job, run: Generation, where: str) -> Generator[Progress, None, dict[Arm, float]]:
        """The predicted speed-up of every gamma of each strategy on one answer, while there is time."""
        timing = TargetTiming.of(run)
        costs = costs_of_run(self.settings.costs, len(job.prompt), len(run.tokens))
        countdown, alone = Countdown(), timing.alone(len(run.tokens))
        scores: dict[Arm, float] = {}
        kind: dict[Arm, float] = {}  # results of the strategy that is being replayed
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

    def _try_all(self) -> Progressing:
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
                run = self._run(prompt.ids, one.strategy, min(self.length, TUNING_TOKENS), one.gamma)
                speeds[index] = run.tokens_per_second or 1e-9
            self.speeds.append([speeds[index] for index in sorted(speeds)])
