"""The choice among measured engines: the fastest one, unless equal bits cost little. Pure functions over figures."""

from collections.abc import Mapping
from dataclasses import dataclass

from utils.engine.engine_figures import EngineFigures

ACCEPTANCE = 0.6  # of each draft: typical of small drafters and of n-grams in text that repeats itself
PROMPT_TOKENS, NEW_TOKENS = 256, 128  # a typical request
MAX_LOSS = 1.1  # equal bits are given up for more speed than this
NO_PROMISE = "rounding depends on the verify width"
NOTICEABLE = 1.05  # a smaller ratio of two decode steps is not reported

Table = Mapping[str, EngineFigures]


@dataclass(frozen=True, slots=True)
class Choice:
    """name: of the chosen engine, empty if there is none. reason: why it is not one with equal bits, if it is not."""

    name: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FasterEngine:
    """Another engine in which the target alone would be faster. factor: by how much, at least NOTICEABLE."""

    name: str
    factor: float


@dataclass(frozen=True, slots=True)
class Workload:
    """How many strategies that run on every prompt decode without drafts, and how many verify drafts."""

    alone: int = 1
    drafted: int = 2


TYPICAL = Workload()  # what is enabled by default


def expected_speed(figures: EngineFigures, workload: Workload = TYPICAL) -> float:
    """Return the expected tokens per second of whole runs, the geometric mean of the strategies of a workload.

    A run reads PROMPT_TOKENS tokens and generates n = NEW_TOKENS at r tokens per second:
    n / (PROMPT_TOKENS / prefill + n / r). The target alone has r = 1 / s with a decode step of s seconds. With drafts,
    each of which is accepted with probability a = ACCEPTANCE, a verify pass of width w yields
    E(w) = 1 + a + ... + a^(w - 1) tokens on average and takes v(w) decode steps, so r is the largest E(w) / (s v(w)),
    width 1 included. The time of drafting is left out: it hardly depends on the engine.
    """
    step = max(figures.step_seconds, 1e-9)
    best = max([1.0, *(_tokens(width) / cost for width, cost in figures.costs if cost)])
    reading = PROMPT_TOKENS / figures.prefill if figures.prefill else 0.0
    alone, drafted = (NEW_TOKENS / (reading + NEW_TOKENS * step / gain) for gain in (1.0, best))
    return float((alone**workload.alone * drafted**workload.drafted) ** (1 / (workload.alone + workload.drafted)))


def _tokens(width: int) -> float:
    """The expected number of tokens of a verify pass."""
    return float(sum(ACCEPTANCE**accepted for accepted in range(width)))


def choose(table: Table, workload: Workload = TYPICAL) -> Choice:
    """Return the fastest engine, or the fastest with equal bits if no other is more than MAX_LOSS times as fast.

    What an engine promises counts until its self-test fails: only the chosen engine need be tested.
    """
    rows = {name: figures for name, figures in table.items() if figures.is_candidate}
    if not rows:
        return Choice("", _problems(table))
    if len(rows) == 1:  # it need not be measured
        name = next(iter(rows))
        return Choice(name, "" if rows[name].promise else _problems(table) or NO_PROMISE)
    speeds = {name: expected_speed(figures, workload) for name, figures in rows.items()}
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
    """Why the engines that promise equal bits are not available. A reason that they share is given once."""
    problems = {name: figures.problem for name, figures in table.items() if figures.problem and figures.promise}
    if len(set(problems.values())) == 1:
        return next(iter(problems.values()))
    return "; ".join(f"{name}: {problem}" for name, problem in problems.items())


def faster_baseline(table: Table, kind: str) -> FasterEngine | None:
    """Return the engine with the fastest decode step if it is noticeably faster than that of the engine in use.

    Both were measured in turns; steps that were measured at different times are not compared.
    """
    own = table.get(kind)
    if own is None or not own.step_seconds:
        return None
    steps = {name: figures.step_seconds for name, figures in table.items() if figures.step_seconds}
    fastest = min(steps, key=lambda name: steps[name])
    factor = own.step_seconds / steps[fastest]
    return FasterEngine(fastest, factor) if factor >= NOTICEABLE else None
