"""What was measured of each engine, and the choice among them: the fastest one, unless equal bits cost little.

Everything here is a pure function of figures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from utils.engine.layer_engine import NO_PROMISE

COMPARED_WIDTHS = (2, 5, 9)  # verify widths at which engines are compared
PREFILL_TOKENS = 128
ACCEPTANCE = 0.6  # of each draft: typical of small drafters and of n-grams in text that repeats itself
PROMPT_TOKENS, NEW_TOKENS = 256, 128  # a typical request
MAX_LOSS = 1.1  # equal bits are given up for more speed than this
NOTICEABLE = 1.05  # a smaller ratio of two decode steps is not reported


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One row of measurements. Figures that were not measured are 0 or empty.

    problem: why the engine cannot be chosen. raised: whether that was an error, whose reason may be gone at the next
    start. promise: see PlainEngine. verified: whether the self-test has passed. threads: the fastest number.
    step_seconds: of a decode step. costs: (verify width, time of a verify pass in decode steps). prefill: tokens per
    second of a prompt of PREFILL_TOKENS. nbytes: that the weights of all models need. estimated: whether the times were
    computed from those of a few layers. measured_on: a day.
    """

    problem: str = ""
    raised: bool = False
    promise: str = ""
    verified: bool = False
    threads: int = 0
    step_seconds: float = 0.0
    costs: tuple[tuple[int, float], ...] = ()
    prefill: float = 0.0
    nbytes: int = 0
    estimated: bool = False
    measured_on: str = ""

    @property
    def is_candidate(self) -> bool:
        """Whether it can be chosen."""
        return not self.problem

    def cost(self, width: int) -> float | None:
        """The time of a verify pass of this width in decode steps. None if it was not measured."""
        return dict(self.costs).get(width)


Table = Mapping[str, EngineFigures]


@dataclass(frozen=True, slots=True)
class Choice:
    """name: of the chosen engine, empty if there is none. reason: why its bits are not known to be equal."""

    name: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FasterEngine:
    """Another engine in which the target alone would be faster. factor: by how much, at least NOTICEABLE."""

    name: str
    factor: float

    @property
    def sentence(self) -> str:
        """What a speed-up over target-only leaves out, so that a slow baseline makes no strategy look better."""
        return (
            f"Estimate: target-only would be {self.factor:.2f}x as fast in the {self.name} engine, so a speed-up over "
            "that is smaller by this factor."
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """How many strategies that run on every prompt decode without drafts, and how many verify drafts."""

    alone: int = 1
    drafted: int = 2


TYPICAL = Workload()  # what is enabled by default


def lower_quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile: other load on the machine makes passes longer, and one lucky pass says little."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def expected_speed(figures: EngineFigures, workload: Workload = TYPICAL) -> float:
    """Return the expected tokens per second of whole runs, the geometric mean of the strategies of a workload.

    A run reads PROMPT_TOKENS tokens and generates n = NEW_TOKENS at r tokens per second:
    n / (PROMPT_TOKENS / prefill + n / r). The target alone has r = 1 / s with a decode step of s seconds. With drafts,
    each of which is accepted with probability a = ACCEPTANCE, a verify pass of width w yields
    E(w) = 1 + a + ... + a^(w - 1) tokens on average and takes v(w) decode steps, so r is the largest E(w) / (s v(w)),
    width 1 included. The time of drafting is left out: it hardly depends on the engine.
    """
    step = max(figures.step_seconds, 1e-9)
    yields = {width: sum(ACCEPTANCE**accepted for accepted in range(width)) for width, _ in figures.costs}
    best = max([1.0, *(yields[width] / cost for width, cost in figures.costs)])
    reading = PROMPT_TOKENS / figures.prefill if figures.prefill else 0.0
    alone, drafted = (NEW_TOKENS / (reading + NEW_TOKENS * step / gain) for gain in (1.0, best))
    return float((alone**workload.alone * drafted**workload.drafted) ** (1 / (workload.alone + workload.drafted)))


def choose(table: Table, workload: Workload = TYPICAL) -> Choice:
    """Return the fastest engine, or the fastest with equal bits if no other is more than MAX_LOSS times as fast.

    What an engine promises counts until its self-test fails: only the chosen engine need be tested.
    """
    speeds = {name: expected_speed(row, workload) for name, row in table.items() if row.is_candidate}
    if not speeds:
        return Choice("", _problems(table))
    fastest = max(speeds, key=lambda name: speeds[name])
    promised = [name for name in speeds if table[name].promise]
    if not promised:
        return Choice(fastest, _problems(table) or NO_PROMISE)
    exact = max(promised, key=lambda name: speeds[name])
    gain = speeds[fastest] / speeds[exact]
    if gain <= MAX_LOSS:
        return Choice(exact)
    return Choice(fastest, f"{fastest} is {gain - 1:.0%} faster than {exact}, which gives equal bits")


def _problems(table: Table) -> str:
    """Why the engines that promise equal bits are not available."""
    return joined_problems({name: row.problem for name, row in table.items() if row.problem and row.promise})


def joined_problems(problems: Mapping[str, str]) -> str:
    """The problems of engines as one clause. One that they share is given once."""
    if len({*problems.values()}) == 1:
        return next(iter(problems.values()))
    return "; ".join(f"{name}: {problem}" for name, problem in problems.items())


def faster_baseline(table: Table, kind: str) -> FasterEngine | None:
    """Return the engine with the fastest decode step if it is noticeably faster than that of the engine in use.

    Both were measured in turns; steps that were measured at different times are not compared.
    """
    steps = {name: figures.step_seconds for name, figures in table.items() if figures.step_seconds}
    if kind not in steps:
        return None
    fastest = min(steps, key=lambda name: steps[name])
    factor = steps[kind] / steps[fastest]
    return FasterEngine(fastest, factor) if factor >= NOTICEABLE else None
