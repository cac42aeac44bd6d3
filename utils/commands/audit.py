"""/audit: what is deterministic here, and what equality of texts can be promised for these models, this format and this device.

The modes follow the tests of batch-invariant inference engines (single, mixed, prefix). Whole runs are repeated and reordered; logits of
one text are computed in windows of every width, over a cached and over a recomputed prefix, alone and in batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from torch import Tensor

from utils.bench import Bench
from utils.caching import ModelSession
from utils.commands.registry import Command, Outcome, Situation
from utils.errors import UserError
from utils.kinds import Whole
from utils.reports import Finding, Progress, Report
from utils.results import tokens_of
from utils.rounding import Spread, by_width
from utils.seeding import fix_seeds
from utils.settings import Settings
from utils.strategies import Job, Strategy

TRIALS, MOST_TRIALS = 10, 10_000
ANSWER = 8  # tokens of each run, and of the answer whose logits are compared
LONGEST_PROMPT = 512  # tokens of the prompt that logits are computed over
EVERY_WIDTH = 9  # up to here every window is tried, beyond it doubled ones and the widest
LARGEST_BATCH = 8
FAINT = 0.01  # a difference in logits below this seldom decides anything
OWN_PROMPT = "Repeat this list three times: apples, pears, plums, figs."
HEADINGS = ("mode", "trials", "unique outputs", "largest difference in logits", "argmax flips")


@dataclass(frozen=True, slots=True)
class _Audit:
    """What every mode works on. context: the prompt and the target's answer, as the target's decoder reads them."""

    job: Job
    trials: int
    prompt: list[int]
    context: list[int]
    source: Random

    @property
    def window(self) -> int:
        return self.job.settings.gamma + 1

    def cuts(self) -> Iterator[tuple[list[int], int]]:
        """For each trial the text up to some point, and how many of its last positions are looked at."""
        for _ in range(self.trials):
            end = self.source.randint(min(self.window + 1, len(self.context)), len(self.context))
            yield self.context[:end], max(1, min(self.window, end - 1))

    def begun(self, *, windows: bool = True, cache: bool = True, rows: int = 1) -> ModelSession:
        """A session over the target. Raises UserError where windows behind a cache are wanted and the model cannot have them."""
        session = replace(self.job, settings=replace(self.job.settings, cache=cache)).session("target", rewinds=windows)
        session.begin(self.prompt, rows)
        return session

    def choices(self, logits: Tensor, end: int) -> tuple[int, ...]:
        """What would be drawn from these logits (k, V) under the current processor and seed."""
        decoding = self.job.decoding
        return tuple(decoding.noise.samples(decoding.law(logits, "The target"), end))


def _audit(argument: str, situation: Situation) -> Outcome:
    trials: int = Whole(1, MOST_TRIALS).parse(argument or str(TRIALS), TRIALS, situation.limits)
    bench, settings = situation.bench, situation.settings
    last = bench.memory.last
    text, prompt = (last.text, last.job.prompt) if last else (OWN_PROMPT, bench.ids(OWN_PROMPT, settings))
    findings = _findings(bench, settings, prompt, trials)
    return Outcome(report=Report("audit", text, HEADINGS, findings, partial(_conclusion, bench.pair)))


def _findings(bench: Bench, settings: Settings, prompt: list[int], trials: int) -> Iterator[Progress | Finding]:
    settings = replace(settings, length=min(settings.length, ANSWER))
    strategies, source = bench.enabled(settings), Random(settings.seed)
    runs = f"{trials} runs of {', '.join(strategy.name for strategy in strategies)}"
    yield Progress(f"repeat: {runs}, all alike ...")
    yield _runs("repeat", bench, prompt, settings, [strategies] * trials)
    yield Progress(f"order: {runs}, shuffled ...")
    yield _runs("order", bench, prompt, settings, [source.sample(strategies, len(strategies)) for _ in range(trials)])
    shortened = prompt[:LONGEST_PROMPT]
    job = bench.job(shortened, settings)
    target = next(strategy for strategy in bench.strategies if strategy.name == "target")
    context = [*job.session("target", rewinds=False).begin(shortened), *tokens_of(target.steps(job))]
    audit = _Audit(job, trials, shortened, context, source)
    for mode, versions in (("width", _widths), ("prefix", _prefixes), ("batch", _batches)):
        yield Progress(f"{mode}: {trials} places in {len(context)} tokens ...")
        try:
            finding, spread = _logits(mode, audit, versions(audit))
        except UserError as error:
            yield Progress(f"{mode}: left out. {error}")
            continue
        if mode != "batch":  # nothing here verifies in batches
            bench.memory.rounding = max(bench.memory.rounding, spread.difference)
        yield finding


def _runs(mode: str, bench: Bench, prompt: list[int], settings: Settings, orders: Sequence[Sequence[Strategy]]) -> Finding:
    """Whole runs, each with a storage and sessions of its own."""
    texts: dict[str, set[tuple[int, ...]]] = {}
    for order in orders:
        for strategy in order:
            fix_seeds(settings.seed)
            texts.setdefault(strategy.name, set()).add(tuple(tokens_of(strategy.steps(bench.job(prompt, settings)))))
    unique = {name: len(seen) for name, seen in texts.items()}
    most = max(unique.values(), default=0)
    figures = {"mode": mode, "trials": len(orders), "unique_outputs": most, "unique_by_strategy": unique}
    return Finding((mode, str(len(orders)), str(most), "-", "-"), figures)


def _logits(mode: str, audit: _Audit, trials: Iterator[tuple[list[Tensor], int]]) -> tuple[Finding, Spread]:
    """Each trial: the logits of the same positions, computed in several ways, and where they end."""
    spread, unique, count = Spread(0.0, 0, 0), 0, 0
    for versions, end in trials:
        spread += Spread.of(versions)
        unique = max(unique, len({audit.choices(version, end) for version in versions}))
        count += 1
    cells = (mode, str(count), str(unique), f"{spread.difference:.2g}", f"{spread.flips} of {spread.positions}")
    spread_figures = {"largest_logit_difference": spread.difference, "argmax_flips": spread.flips, "positions": spread.positions}
    return Finding(cells, {"mode": mode, "trials": count, "unique_outputs": unique, **spread_figures}), spread


def _widths(audit: _Audit) -> Iterator[tuple[list[Tensor], int]]:
    """One token at a time, in windows of 2 to gamma + 1, and in one prefill."""
    widest = audit.window
    doubled = [2**power + 1 for power in range(4, 6)]
    widths = sorted({*range(1, min(widest, EVERY_WIDTH) + 1), *(width for width in doubled if width < widest), widest})
    for context, count in audit.cuts():
        base = audit.begun()
        if len(context) > count:
            base.feed(context[:-count], keep=1)
        versions = [by_width(base, context, count, width) for width in widths if width <= count]
        yield [*versions, audit.begun().feed(context, keep=count)], len(context)


def _prefixes(audit: _Audit) -> Iterator[tuple[list[Tensor], int]]:
    """Over a cached prefix that other drafts were rewound from, and recomputed without a cache."""
    for context, count in audit.cuts():
        known = len(context) - count
        cached = audit.begun()
        if known:
            cached.feed([*context[:known], *reversed(context[-count:])], keep=1)
            cached.rewind(known)
        yield [cached.feed(context, keep=count), audit.begun(windows=False, cache=False).feed(context, keep=count)], len(context)


def _batches(audit: _Audit) -> Iterator[tuple[list[Tensor], int]]:
    """Alone, and in a batch of 2 to 8 with other texts of the same length."""
    for trial, (context, count) in enumerate(audit.cuts()):
        others = [_shuffled(context, audit.source) for _ in range(1 + trial % (LARGEST_BATCH - 1))]
        yield [_first_of([context], audit, count), _first_of([context, *others], audit, count)], len(context)


def _shuffled(context: list[int], source: Random) -> list[int]:
    return [context[0], *source.sample(context[1:], len(context) - 1)]


def _first_of(rows: list[list[int]], audit: _Audit, keep: int) -> Tensor:
    """Logits (keep, V) of the first of several rows."""
    return audit.begun(windows=False, rows=len(rows)).feed_rows(rows, keep)[0]


def _conclusion(pair: Any, findings: Sequence[Finding]) -> list[str]:
    """What equality can be promised here."""
    figures = {finding.figures["mode"]: finding.figures for finding in findings}
    where = f"{pair.dtype}, {pair.device}" + (f", {pair.quantize}" if pair.quantize != "none" else "")
    unsteady = [mode for mode in ("repeat", "order") if mode in figures and figures[mode]["unique_outputs"] > 1]
    if unsteady:
        return [f"Not deterministic ({where}): the same run gave different texts ({', '.join(unsteady)}), so no equality can be promised."]
    lines = [f"Deterministic ({where}): the same prompt and seed gave the same text every time."] if "repeat" in figures else []
    windows = [figures[mode] for mode in ("width", "prefix") if mode in figures]
    if windows:
        lines.append(_promise(windows))
    return lines


def _promise(windows: Sequence[dict[str, Any]]) -> str:
    difference = max(mode["largest_logit_difference"] for mode in windows)
    flips, positions = (sum(mode[name] for mode in windows) for name in ("argmax_flips", "positions"))
    if difference == 0:
        return "Logits are bit-identical in every window: under greedy and /verify coupled all strategies say the same text."
    moved = f"Windows of another width move logits by up to {difference:.2g}"
    if flips == 0 and difference < FAINT:
        return (
            f"{moved}, which flipped none of {positions} argmaxes: under greedy and /verify coupled all strategies say the same text, "
            "but for tokens nearer to each other than that. /divergence tells such a rounding tie from anything else."
        )
    return (
        f"{moved} and flipped {flips} of {positions} argmaxes: even under greedy and /verify coupled texts can part wherever two tokens "
        "are as near as that. /divergence names such a rounding tie; float32 makes it rare."
    )


AUDIT = Command("audit", "[N]", f"what is deterministic here: N trials of five kinds (N: {TRIALS})", _audit)
