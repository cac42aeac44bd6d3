"""How /verdict finds a candidate among the local drafters, or among the servers. No figure of the verdict comes from
here: the best of several would look better than it is on the prompts on which it was chosen.

The target's answers to the tuning prompts are replayed with every drafter and gamma, as by /whatif with measured costs.
The best candidates then run in turns on the same prompts, because costs are not everything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Any

from utils.commands.experiments.races import (
    ONLY_FIRST_TURNS,
    ArmRace,
    RaceItem,
    check_prompt,
    race_row,
    requested,
    rotated,
    server_arms,
)
from utils.commands.experiments.speed_model import TargetTiming, draft_figures, gamma_text, predictions
from utils.commands.verdicts.measurement import (
    SELECTION_SECONDS,
    Figures,
    Measurement,
    PromptPlan,
    helps,
    run_length,
    run_seconds,
    started_clock,
)
from utils.comparison.arms import PREFIX, Arm, complete
from utils.comparison.harness import Harness, comparable_servers
from utils.comparison.speed_claims import SLOWER, server_notes
from utils.comparison.strategies import STRATEGIES, Job, Strategy, is_greedy
from utils.comparison.warm_up import shortened, with_costs
from utils.config.settings import Settings, setting_fields
from utils.errors import UserError
from utils.metrics.results import Clock, Generation
from utils.pairs.drafter_kinds import DRAFTER_KINDS
from utils.pairs.pair import Pair
from utils.pairs.request import CHAIN, HEAD, LAYERS, LOADED, MODEL, MTP
from utils.prompts.prompt_files import ALL_TASKS, Prompt
from utils.servers.processes.flags import Speculation, settings_elsewhere
from utils.text import first_of

PROBE_TOKENS, SERVER_PROBE_TOKENS, TUNING_TOKENS = 8, 16, 48
REPLAY_SHARE = 0.6  # share of the selection time after which no further prompt is replayed
TRIED = 3  # maximum number of candidates that are run
WORTH_TRYING = 0.8  # minimum prediction, relative to the best one
FIXED_GAMMA_PENALTY = 0.05
NAMES = {
    MODEL: "the drafter model",
    HEAD: "the head",
    "ngram": "n-gram assisted decoding",
    "lookup": "prompt lookup",
    "suffix": "suffix matching",
    CHAIN: "suffix matching chained with the drafter",
}
WITHOUT_DRAFTER = tuple(kind.name for kind in DRAFTER_KINDS if not (kind.uses_loaded or kind.cuts_target))
NO_CANDIDATE = (
    "no server can be compared: /server add NAME URL baseline=NAME says which other server on the same host, or on an "
    "equal machine (same=NAME), is without speculation."
)
DraftChoice = tuple[Strategy, int | None]  # a strategy with a draft length, where None is adaptive


def kind_name(strategy: Strategy, pair: Pair) -> str:
    label = strategy.drafter_label(pair) or strategy.name
    if label.startswith(LAYERS):
        return f"the target's {first_of(int(label.removeprefix(LAYERS)), 'layer')}"
    loaded = f"the {label} drafter" if label == pair.drafter_kind else label  # a published format, such as EAGLE-3
    return NAMES.get(label, loaded)


@dataclass(frozen=True, slots=True)
class VerdictCandidate:
    """A strategy with a draft length, where None is adaptive, and its predicted speed-up on the tuning prompts."""

    strategy: Strategy
    gamma: int | None
    predicted: float

    @property
    def preference(self) -> float:
        """The predicted speed-up. A fixed gamma is the best of sixteen on a few prompts, so it is penalized."""
        return self.predicted * (1.0 if self.gamma is None else 1 - FIXED_GAMMA_PENALTY)

    @property
    def changes(self) -> Mapping[str, Any]:
        """The fields of Settings that make a session use it."""
        kind = {"drafter_kind": (self.strategy.word,)} if self.strategy.chooses_kind else {}
        return {**only_drafting(self.strategy.toggle), **kind, "gamma": self.gamma}

    def commands(self, settings: Settings) -> list[str]:
        """The commands that make a session with these settings use it, possibly beside other strategies."""
        changed = replace(settings, **self.changes)
        needed = [name for name, value in self.changes.items() if value is not False]
        rows = {name: setting_fields()[name] for name in needed if getattr(settings, name) != getattr(changed, name)}
        return [f"/{name} {row.show(changed)}" for name, row in rows.items()]


def only_drafting(chosen: str) -> dict[str, bool]:
    """The fields of Settings that turn on the drafting strategy with this toggle, and the others off."""
    return {one.toggle: one.toggle == chosen for one in STRATEGIES if one.drafts}


def best_of_each(candidates: Sequence[VerdictCandidate], pair: Pair) -> list[VerdictCandidate]:
    """The best candidate of each drafter kind, the best kind first."""
    best: dict[str | None, VerdictCandidate] = {}
    for candidate in sorted(candidates, key=lambda one: one.preference, reverse=True):
        best.setdefault(candidate.strategy.drafter_label(pair), candidate)
    return list(best.values())


def race_of(harness: Harness, prompts: Mapping[int, Prompt], settings: Settings, arms: Sequence[Arm]) -> ArmRace:
    """A race over prompts with their numbers. The last arm is the candidate."""
    own = {number: requested(settings, one) for number, one in prompts.items()}
    return ArmRace(harness, [RaceItem(number, one, one.task, own[number], arms) for number, one in prompts.items()])


def best_of(races: Mapping[str, ArmRace], clock: Clock, until: float) -> str:
    """Run several candidates on the tuning prompts, in turns, and return the name of the best one, which is the first
    one if none has an answer. `races` has their races by name. No round of runs begins after `until`.
    """
    names = list(races)
    prompts = len(races[names[0]].items) if len(names) > 1 else 0
    for turn in range(prompts):
        if clock() > until:
            break
        for name in rotated(names, turn):
            race = races[name]
            race.harness.progress(f"choosing a candidate: {name} on tuning prompt {turn + 1} of {prompts} ...")
            race.is_silent = True  # a candidate without an answer is not preferred
            race.run(race.items[turn], turn)
    return max(names, key=lambda name: merit(races[name]))


def merit(race: ArmRace) -> float:
    """The speed-up of a candidate on the tuning prompts, its speed without a baseline, or 0 without an answer."""
    own = [one for one in race.results if one.arm is race.items[0].arms[-1]]
    known = [value for one in own if (value := one.speedup if one.item.arms[1:] else one.speed)]
    return geometric_mean(known) if known else 0.0


@dataclass(slots=True)
class DrafterSelection:
    """What is known about the local candidates.

    `settings` include the costs of all drafters. `began` is the end of the warm-up. `predicted` has the speed-up by
    strategy and gamma for each replayed prompt. `problems` has the drafters that cannot run by the reason.
    """

    harness: Harness
    settings: Settings
    clock: Clock = field(init=False)
    began: float = field(init=False)
    chosen: VerdictCandidate = field(init=False)
    prompts: Sequence[Prompt] = ()
    length: int = 0
    strategies: list[Strategy] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    predicted: list[dict[DraftChoice, float]] = field(default_factory=list)

    def choose(self, plan: PromptPlan) -> Measurement:
        """Warm up, replay, and run the best candidates. Raises UserError if nothing can draft here."""
        self.clock = started_clock()
        # A conversation would need the texts of its earlier turns, so every prompt is a first turn.
        self.settings = replace(self.settings, turns=False)
        self.prompts = list(self._usable(plan.tuning).values())
        self.skipped.clear()  # the notes on the measured prompts suffice
        measured = self._usable(plan.measured)
        if not measured or not self.prompts:
            raise UserError(f"none of the prompts can be used. {' '.join(self.skipped[:1])}")
        if not self.settings.uses_chat and any(prompt.later for prompt in plan.measured):
            self.skipped.append(ONLY_FIRST_TURNS)
        self.harness.progress("warming up the target and every drafter ...")
        step = self._warm_up()
        self.began = self.clock()
        self._replay_all()
        best, prompts = best_of_each(self.candidates, self.harness.pair), dict(enumerate(self.prompts, start=1))
        tried = {self._name(one): one for one in best[:TRIED] if one.predicted > WORTH_TRYING * best[0].predicted}
        races = {}
        for name, one in tried.items():
            trial = replace(self.settings, length=self.length, gamma=one.gamma)
            races[name] = race_of(self.harness, prompts, trial, [self.harness.arm(one.strategy)])
        chosen = self.chosen = tried[best_of(races, self.clock, self.began + SELECTION_SECONDS)]
        length = run_length(step, self.settings.length, run_seconds(len(measured)))
        both = (self.harness.arm(self.harness.baseline), replace(self.harness.arm(chosen.strategy), timed=True))
        race = race_of(self.harness, measured, replace(self.settings, gamma=chosen.gamma, length=length), both)
        return Measurement(race, self._short_label(chosen), plan.divided, self.clock)

    def _usable(self, prompts: Sequence[Prompt]) -> dict[int, Prompt]:
        usable: dict[int, Prompt] = {}
        for number, prompt in enumerate(prompts, start=1):
            try:
                check_prompt(self.harness, prompt, self.settings)
                usable[number] = prompt
            except UserError as error:
                self.skipped.append(f"Prompt {number} was skipped: {error}")
        return usable

    @property
    def candidates(self) -> list[VerdictCandidate]:
        """All replayed candidates with the geometric mean of their speed-ups, except gamma 0, which drafts nothing."""
        # Prompts that not all candidates have replayed are skipped: all must be judged on the same ones.
        whole = [scores for scores in self.predicted if set(scores) >= set(self.predicted[0])]
        return [
            VerdictCandidate(strategy, gamma, geometric_mean(scores[strategy, gamma] for scores in whole))
            for strategy, gamma in (self.predicted[0] if whole else ())
            if gamma != 0
        ]

    def _name(self, candidate: VerdictCandidate) -> str:
        return kind_name(candidate.strategy, self.harness.pair)

    def _short_label(self, candidate: VerdictCandidate) -> str:
        """The candidate in tables and progress lines."""
        return f"{candidate.strategy.drafter_label(self.harness.pair)}, gamma {gamma_text(candidate.gamma)}"

    def _warm_up(self) -> float:
        """Run everything once, to see what can run, and choose the length of runs. Returns the seconds of a step."""
        self._find_strategies()
        prompt, probe = self.prompts[0], min(self.settings.length, PROBE_TOKENS)
        for strategy in list(self.strategies):
            try:
                self._run(prompt, strategy, probe)
            except UserError as error:
                self.strategies.remove(strategy)
                self.problems.setdefault(str(error), []).append(kind_name(strategy, self.harness.pair))
        if not self.strategies:
            raise UserError(f"nothing can draft here. {' '.join(self.problems)}")
        self._run(prompt, self.harness.baseline, probe)
        timed = self._run(prompt, self.harness.baseline, probe)
        step = TargetTiming.of(timed).step if len(timed.steps) > 1 else timed.seconds
        self.length = min(TUNING_TOKENS, run_length(step, self.settings.length))
        return step

    def _find_strategies(self) -> None:
        """The strategies that can draft here, and the settings with all their costs. Unknown costs are measured."""
        loaded = (LOADED, CHAIN) if self.harness.pair.drafter is not None else ()
        words: list[str] = []
        kinds = (word for word in self.settings.drafter_kind if loaded or word not in (LOADED, CHAIN))
        for word in dict.fromkeys((*loaded, *kinds, *WITHOUT_DRAFTER)):
            try:
                self.settings = with_costs(self.harness, replace(self.settings, drafter_kind=(word,)))
                words.append(word)
            except UserError as error:
                self.problems.setdefault(str(error), []).append(word)
        self.settings = replace(self.settings, drafter_kind=tuple(words))
        drafting = [strategy for strategy in self.harness.runnable(self.settings) if strategy.drafts]
        self.strategies = sorted(drafting, key=lambda one: one.word == CHAIN)  # its replay takes the longest

    def _run(self, prompt: Prompt, strategy: Strategy, length: int) -> Generation:
        settings = replace(requested(self.settings, prompt), gamma=None, length=length)
        run = complete(self.harness.arm(strategy).run(prompt.text, settings))
        assert run.generation is not None
        return run.generation

    def _replay_all(self) -> None:
        for place, prompt in enumerate(self.prompts, start=1):
            if self.predicted and self.clock() > self.began + REPLAY_SHARE * SELECTION_SECONDS:
                break
            where = f"choosing a drafter: tuning prompt {place} of {len(self.prompts)}, replaying"
            self.harness.progress(f"{where} ...")
            run = self._run(prompt, self.harness.baseline, self.length)
            if len(run.steps) > 1:
                settings = requested(self.settings, prompt)
                ids = self.harness.prompt_ids(prompt.text, settings)
                job = self.harness.job(ids, replace(settings, length=self.length))
                self.predicted.append(self._replay(job, run, where))
        if not self.predicted:
            remedy = "raise /length" if self.length < 2 else "use prompts with longer answers"
            raise UserError(f"the answers have fewer than two tokens: {remedy}.")

    def _replay(self, job: Job, run: Generation, where: str) -> dict[DraftChoice, float]:
        """The predicted speed-up of every gamma of each strategy on one answer, while there is time."""
        scores: dict[DraftChoice, float] = {}
        for one in predictions(job, self.strategies, run, lambda text: self.harness.progress(f"{where} {text}")):
            scores[one.strategy, one.gamma] = one.speedup
            # At least one strategy is replayed. Adaptive gamma comes last.
            if self.clock() > self.began + SELECTION_SECONDS and any(gamma is None for _, gamma in scores):
                break
        return {choice: speedup for choice, speedup in scores.items() if (choice[0], None) in scores}

    def figures(self, measurement: Measurement, row: Figures, settings: Settings) -> Figures:
        chosen, pair = self.chosen, self.harness.pair
        turns = [turn for one in measurement.pairs for turn in zip(one.ours, one.theirs, strict=False)]
        runs = [(ours.generation, theirs.generation) for ours, theirs in turns if ours.generation and theirs.generation]
        replayed = {strategy.name for strategy, _ in self.predicted[0]}
        fixed = [one for one in self.candidates if one.strategy is chosen.strategy and one.gamma is not None]
        best_fixed = max(fixed, key=lambda one: one.predicted)
        cannot = [f"Cannot draft here: {', '.join(names)}. {reason}" for reason, names in self.problems.items()]
        found = {
            "name": self._short_label(chosen),
            "candidate": f"{self._name(chosen)} with /gamma {gamma_text(chosen.gamma)}",
            "drafter_kind": chosen.strategy.drafter_label(pair),
            "gamma": chosen.gamma,
            "predicted_speedup": chosen.predicted,
            **draft_figures(runs, row["speedup"]),
            "extra_memory": (pair.drafter_memory or 0) if chosen.strategy.kind.uses_loaded else 0,
            "commands": chosen.commands(settings),
            "best_fixed_gamma": best_fixed.gamma,
            "considered": {self._name(one): one.predicted for one in best_of_each(self.candidates, pair)},
            "not_tried": [kind_name(one, pair) for one in self.strategies if one.name not in replayed],
            "skipped": [*self.skipped, *measurement.race.notes, *cannot],
        }
        advised = helps(row)
        off = only_drafting("") if row["verdict"] == SLOWER else None
        self.harness.state.advice = chosen.changes if advised else off
        gamma = best_fixed.gamma if chosen.gamma is None else chosen.gamma
        label, uses_loaded = chosen.strategy.drafter_label(pair), chosen.strategy.kind.uses_loaded
        way = speculation(pair, self.settings, gamma or 1, kind=label, uses_loaded=uses_loaded)
        return found | {"elsewhere": settings_elsewhere(way) if advised else []}


def speculation(
    pair: Pair, settings: Settings, drafts: int, *, kind: str | None, uses_loaded: bool = True
) -> Speculation:
    """A way of drafting for the loaded target in the words of other programs. `kind` is as in records."""
    has_model = uses_loaded and pair.request.drafter != MTP
    return Speculation(
        str(kind),
        drafts,
        str(pair.request.drafter) if has_model else "",
        rule="" if is_greedy(settings) else settings.verify,
        quantize=pair.quantize,
        drafter_quantize=str(pair.drafter_quantize or "none") if has_model else "none",
        translates=has_model and pair.drafter_tokenizer is not None,
    )


@dataclass(slots=True)
class ServerSelection:
    """The servers that have a baseline. `races` has those of each candidate beside its baseline on the tuning prompts,
    by its name; a single candidate is not run.
    """

    harness: Harness
    settings: Settings
    races: dict[str, ArmRace] = field(default_factory=dict)

    def choose(self, plan: PromptPlan) -> Measurement:
        """Warm up, and run every candidate on the tuning prompts. Raises UserError if no server can be compared."""
        clock = started_clock()
        self.harness.progress("warming up the servers ...")
        pairs = {pair[-1].name: pair for pair in self._pairs()}
        settings = self._with_length(plan, [arm for pair in pairs.values() for arm in pair])
        prompts, measured = (dict(enumerate(own, start=1)) for own in (plan.tuning, plan.measured))
        self.races = {name: race_of(self.harness, prompts, settings, pair) for name, pair in pairs.items()}
        best = best_of(self.races, clock, clock() + SELECTION_SECONDS)
        return Measurement(race_of(self.harness, measured, settings, pairs[best]), best, plan.divided, clock)

    def _pairs(self) -> list[Sequence[Arm]]:
        """Baseline and candidate for each server that can be compared."""
        connections, servers = self.harness.state.servers.connections, comparable_servers(self.harness)
        if not servers:
            raise UserError(NO_CANDIDATE)
        known = ((connections.get(server.address.baseline or ""), server) for server in servers)
        return [server_arms(self.harness, [one for one in pair if one is not None]) for pair in known]

    def _with_length(self, plan: PromptPlan, arms: Sequence[Arm]) -> Settings:
        """Warm every server up, and choose the length of the answers by the slowest of them."""
        text, settings = plan.tuning[0].text, self.settings
        probe = replace(settings, length=min(SERVER_PROBE_TOKENS, settings.length))
        steps: list[float] = []
        problems: list[str] = []
        for arm in {arm.name: arm for arm in arms}.values():
            try:
                complete(arm.run(text, shortened(settings)))  # the first answer may be slow
                run = complete(arm.run(text, probe))
                speed = run.decode_tokens_per_second or max(1, run.new_tokens or 1) / run.seconds
                steps.append(1 / speed)
            except UserError as error:
                problems.append(str(error))
        if not steps:
            raise UserError(" ".join(problems))
        return replace(settings, length=run_length(max(steps), settings.length, run_seconds(len(plan.measured))))

    def figures(self, measurement: Measurement, row: Figures, settings: Settings) -> Figures:
        names = dict.fromkeys(("name", "candidate"), measurement.candidate.name)
        considered = {name: speedup for name, race in self.races.items() if (speedup := merit(race))}
        notes = server_notes(row["strategy"], row)
        if (base := race_row(ALL_TASKS, measurement.baseline_results)).get("other_tokens"):
            notes += server_notes(base["strategy"], base)
        started = self.harness.state.servers.speculation_of(measurement.candidate.name.removeprefix(PREFIX))
        lines = settings_elsewhere(started) if started is not None and helps(row) else []
        return {**names, "considered": considered, "skipped": [*measurement.race.notes, *notes], "elsewhere": lines}
