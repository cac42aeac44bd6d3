"""/audit: what is deterministic here, and what equality of texts can be promised for these models, this format and this device.

The modes follow the tests of batch-invariant inference engines (single, mixed, prefix). Whole runs are repeated and reordered; logits of
one text are computed in windows of every width, over a cached and over a recomputed prefix, alone and in batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from random import Random
from typing import Any

from torch import Tensor

from utils.commands.registry import Command, Outcome, Situation
from utils.comparison.harness import Bench
from utils.comparison.reports import Finding, Progress, Report
from utils.comparison.strategies import Job, Strategy
from utils.config.settings import setting_fields, shown
from utils.config.value_types import Whole
from utils.decode.logit_drift import Spread, by_width
from utils.decode.model_session import ModelSession
from utils.decode.noise import fix_seeds
from utils.errors import UserError
from utils.metrics.results import tokens_of

TRIALS, MOST_TRIALS = 10, 10_000
ANSWER = 8  # tokens of each run
LONGEST_PROMPT = 512  # tokens of the prompt that logits are computed over
LARGEST_BATCH = 8
FAINT = 0.01  # a difference in logits below this seldom decides anything
OWN_PROMPT = "Repeat this list three times: apples, pears, plums, figs."
HEADINGS = ("mode", "trials", "unique outputs", "largest difference in logits", "argmax flips")


def _audit(argument: str, situation: Situation) -> Outcome:
    trials: int = Whole(1, MOST_TRIALS).parse(argument or str(TRIALS), TRIALS, situation.limits)
    bench, settings = situation.bench, situation.settings
    bench.enabled(settings)  # at least one
    last = bench.memory.last
    short = replace(settings, length=min(settings.length, ANSWER))
    text, prompt, history = (
        (last.text, last.job.prompt, last.job.history) if last else (OWN_PROMPT, bench.ids(OWN_PROMPT, settings), ())
    )
    findings = _findings(bench, bench.job(prompt, short, history), trials)
    return Outcome(report=Report("audit", text, settings, HEADINGS, findings, partial(_conclusion, bench.pair)))


def _findings(bench: Bench, job: Job, trials: int) -> Iterator[Progress | Finding]:
    settings, source = job.settings, Random(job.settings.seed)
    strategies = bench.enabled(settings)
    about = f"the last prompt ({len(job.prompt)} tokens)" if bench.memory.last else f'"{OWN_PROMPT}"'
    yield Progress(f"auditing {about} under {shown(settings, setting_fields()['processor'])}, seed {settings.seed}")
    runs = f"{trials} x up to {settings.length} tokens by {', '.join(strategy.name for strategy in strategies)}"
    texts: dict[str, set[tuple[int, ...]]] = {}
    yield Progress(f"repeat: {runs}, all alike ...")
    yield from _runs("repeat", texts, job, bench, orders=[strategies] * trials)
    yield Progress(f"order: {runs}, shuffled ...")
    shuffled = [source.sample(strategies, len(strategies)) for _ in range(trials)]
    yield from _runs("order", texts, job, bench, orders=shuffled)
    cut = replace(job, prompt=job.prompt[:LONGEST_PROMPT])
    audit = _Audit(cut, trials, source, _context(bench, cut))
    for mode, versions in (("width", _widths), ("prefix", _prefixes), ("batch", _batches)):
        yield Progress(f"{mode}: {trials} places in {len(audit.context)} tokens ...")
        yield from _logits(mode, bench, audit, versions(audit))


def _runs(
    mode: str, texts: dict[str, set[tuple[int, ...]]], job: Job, bench: Bench, *, orders: Sequence[Sequence[Strategy]]
) -> Iterator[Progress | Finding]:
    """Whole runs, each with a storage and sessions of its own; their texts join those of earlier modes."""
    refused: dict[str, str] = {}
    done = 0
    try:
        for order in orders:
            for strategy in order:
                fix_seeds(job.settings.seed)
                try:
                    own = bench.job(job.prompt, job.settings, job.history)
                    texts.setdefault(strategy.name, set()).add(tuple(tokens_of(strategy.steps(own))))
                except UserError as error:
                    refused[strategy.name] = str(error)
            done += 1
    finally:  # Ctrl-C goes on once this has been taken
        yield from (Progress(f"{mode}: {name} left out. {reason}") for name, reason in refused.items())
        unique = {name: len(seen) for name, seen in texts.items() if seen}
        if unique and done:
            most, longest = max(unique.values()), max(len(text) for seen in texts.values() for text in seen)
            figures = {
                "mode": mode,
                "trials": done,
                "tokens": longest,
                "unique_outputs": most,
                "unique_by_strategy": unique,
            }
            yield Finding((mode, str(done), str(most), "-", "-"), figures)


def _context(bench: Bench, job: Job) -> list[int]:
    """The prompt and the target's answer as the target's decoder reads them, and the prompt again until the widest window fits."""
    session = job.session("target", rewinds=False)
    context = [*session.begin(job.prompt), *tokens_of(bench.baseline.steps(job))]
    room, wanted = session.room(context), 2 * (job.settings.most_drafts + 1)
    missing = max(0, wanted - len(context))
    return [*context, *islice(cycle(job.prompt), missing if room is None else min(missing, room))]


@dataclass(frozen=True, slots=True)
class _Audit:
    """What the modes that look at logits work on; `job` has the prompt that an encoder reads, `context` what the decoder does."""

    job: Job
    trials: int
    source: Random
    context: list[int]

    @property
    def window(self) -> int:
        return self.job.settings.most_drafts + 1

    def cuts(self) -> Iterator[tuple[list[int], int]]:
        """For each trial the text up to some point, and how many of its last positions are looked at."""
        for _ in range(self.trials):
            end = self.source.randint(min(self.window + 1, len(self.context)), len(self.context))
            yield self.context[:end], max(1, min(self.window, end - 1))

    def begun(
        self, *, windows: bool = True, cache: bool | None = None, others: Sequence[list[int]] = ()
    ) -> ModelSession:
        """A session over the target. Raises UserError where windows behind a cache are wanted and the model cannot have them."""
        settings = self.job.settings if cache is None else replace(self.job.settings, cache=cache)
        session = replace(self.job, settings=settings).session("target", rewinds=windows)
        session.begin(self.job.prompt, others)
        return session

    def choices(self, logits: Tensor, end: int) -> tuple[int, ...]:
        """What would be drawn from these logits (k, V) under the current processor and seed."""
        decoding = self.job.decoding
        return tuple(decoding.noise.samples(decoding.law(logits, "The target"), end))


@dataclass(frozen=True, slots=True)
class _Trial:
    """Logits (k, V) of the same positions computed in several ways; the widest window of them, and where the text ended."""

    versions: list[Tensor]
    end: int
    window: int = 0


def _logits(mode: str, bench: Bench, audit: _Audit, trials: Iterator[_Trial]) -> Iterator[Progress | Finding]:
    spread, unique, done, window = Spread(0.0, 0, 0), 0, 0, 0
    try:
        for trial in trials:
            spread += Spread.of(trial.versions)
            unique = max(unique, len({audit.choices(version, trial.end) for version in trial.versions}))
            window = max(window, trial.window)
            done += 1
    except UserError as error:
        yield Progress(f"{mode}: left out. {error}")
    finally:  # Ctrl-C goes on once this has been taken
        if done:
            if mode != "batch":  # nothing here verifies in batches
                bench.memory.rounding = max(bench.memory.rounding, spread.difference)
            figures = {
                "mode": mode,
                "trials": done,
                "unique_outputs": unique,
                "largest_logit_difference": spread.difference,
            }
            figures |= {"argmax_flips": spread.flips, "positions": spread.positions} | (
                {"widest_window": window} if window else {}
            )
            cells = (mode, str(done), str(unique), f"{spread.difference:.2g}", f"{spread.flips} of {spread.positions}")
            yield Finding(cells, figures)


def _widths(audit: _Audit) -> Iterator[_Trial]:
    """One token at a time, in windows of 2 to gamma + 1, and in one prefill."""
    for context, count in audit.cuts():
        base = audit.begun()
        if len(context) > count:
            base.feed(context[:-count], keep=1)
        versions = [by_width(base, context, count, width) for width in range(1, count + 1)]
        yield _Trial([*versions, audit.begun().feed(context, keep=count)], len(context), window=count)


def _prefixes(audit: _Audit) -> Iterator[_Trial]:
    """Over a cached prefix that other drafts were rewound from, and recomputed without a cache."""
    for context, count in audit.cuts():
        known = len(context) - count
        cached = audit.begun(cache=True)
        if known:
            cached.feed([*context[:known], *reversed(context[-count:])], keep=1)
            cached.rewind(known)
        yield _Trial(
            [cached.feed(context, keep=count), audit.begun(cache=False).feed(context, keep=count)], len(context)
        )


def _batches(audit: _Audit) -> Iterator[_Trial]:
    """Alone, and in a batch of 2 to 8 with other texts and prompts of the same length."""
    for number, (context, count) in enumerate(audit.cuts()):
        size = 1 + number % (LARGEST_BATCH - 1)
        others = [_shuffled(context, audit.source) for _ in range(size)]
        prompts = [_shuffled(audit.job.prompt, audit.source) for _ in range(size)]
        alone = audit.begun(windows=False).feed(context, keep=count)
        batched = audit.begun(windows=False, others=prompts).feed_rows([context, *others], count)[0]
        yield _Trial([alone, batched], len(context))


def _shuffled(tokens: list[int], source: Random) -> list[int]:
    return [*tokens[:1], *source.sample(tokens[1:], len(tokens) - 1)]


def _conclusion(pair: Any, findings: Sequence[Finding]) -> list[str]:
    """What equality can be promised here."""
    figures = {finding.figures["mode"]: finding.figures for finding in findings}
    where = f"{pair.dtype}, {pair.device}" + (f", {pair.quantize}" if pair.quantize != "none" else "")
    repeats = [figures[mode] for mode in ("repeat", "order") if mode in figures]
    unsteady = ", ".join(mode["mode"] for mode in repeats if mode["unique_outputs"] > 1)
    if unsteady:
        return [
            f"Not deterministic ({where}): the same run gave different texts ({unsteady}), so no equality can be promised."
        ]
    lines = []
    runs = sum(mode["trials"] for mode in repeats)
    if runs > 1:
        lines.append(
            f"Deterministic ({where}): {runs} runs of {repeats[0]['tokens']} tokens by each strategy, and nothing differed."
        )
    elif runs:
        lines.append("One run of each strategy: there was nothing to compare it with.")
    windows = [figures[mode] for mode in ("width", "prefix") if mode in figures]
    if "width" in figures:
        lines.append(_promise(windows, figures["width"]["widest_window"], pair.dtype))
    return lines


def _promise(windows: Sequence[dict[str, Any]], widest: int, dtype: str) -> str:
    difference = max(mode["largest_logit_difference"] for mode in windows)
    flips, positions = (sum(mode[name] for mode in windows) for name in ("argmax_flips", "positions"))
    alike = "the speculative, n-gram assisted and target-only texts are the same under greedy (any rule), and sampled under /verify coupled"
    if difference == 0:
        return f"At {positions} positions logits are bit-identical in every window of up to {widest} tokens: {alike}."
    ways = f"Windows of 1 to {widest} tokens" if widest > 1 else "Single steps and a prefill"
    moved = f"{ways} move logits by up to {difference:.2g}"
    if flips == 0 and difference < FAINT:
        return (
            f"{moved}, which flipped none of {positions} argmaxes: expect that {alike}, but for tokens nearer to each other than that. "
            "/divergence tells such a rounding tie from anything else."
        )
    remedy = "" if dtype == "float32" else " float32 makes it rare."
    return (
        f"{moved} and flipped {flips} of {positions} argmaxes: also under greedy, and under /verify coupled, texts can part wherever two "
        f"tokens are as near as that. /divergence names such a rounding tie.{remedy}"
    )


AUDIT = Command("audit", "[N]", f"what is deterministic here: N trials of five kinds (N: {TRIALS})", _audit)
