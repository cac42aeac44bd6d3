"""/audit: checks what is deterministic here, and which texts must be equal for these models on this device.

The modes follow the tests of batch-invariant inference engines. `repeat` and `order` repeat and reorder whole runs.
`width` and `prefix` cut the text at random positions and compare the logits before the cut: by verify width, and with
and without a cached prefix.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from random import Random

from torch import Tensor

from utils.bounds import WholeRange
from utils.commands.shared.columns import NOTHING, ResultColumn, ResultTable, Row, figure, figures_of
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.harness import Harness
from utils.comparison.job import Job
from utils.comparison.reports import Countdown, Finding, Note, Progress, Report, ReportEvent
from utils.comparison.strategies import Strategy
from utils.config.setting_table import setting_fields
from utils.decode.logit_drift import LogitDrift, logits_by_width
from utils.decode.model_session import ModelSession
from utils.decode.noise import fix_seeds
from utils.errors import UserError
from utils.metrics.results import tokens_of
from utils.pairs.pair import Pair, depends_on_width
from utils.text import count_of

TRIALS, MAX_TRIALS = 10, 10_000
ANSWER = 8  # maximum number of new tokens of each run
LONGEST_PROMPT = 512  # tokens of the prompt for which logits are computed
SMALL_DRIFT = 0.01  # a difference of logits below this seldom changes a token
OWN_PROMPT = "Repeat this list three times: apples, pears, plums, figs."
EQUAL_TEXTS = (
    "the speculative, n-gram assisted and target-only texts are the same under greedy (with any rule), "
    "and with sampling under /verify coupled"
)
TABLE = ResultTable(
    figure("mode", "mode"),
    figure("trials", "trials"),
    figure("unique outputs", "unique_outputs"),
    figure("logit difference", "largest_logit_difference", "{:.2g}"),
    ResultColumn(
        "argmax flips",
        lambda row: f"{row['argmax_flips']} of {row['positions']}" if "argmax_flips" in row else NOTHING,
    ),
)


def _audit(argument: str, context: CommandContext) -> Outcome:
    trials = WholeRange(1, MAX_TRIALS).parse(argument or str(TRIALS))
    harness, settings = context.harness, context.settings
    harness.enabled(settings)  # raises UserError where nothing is enabled
    short = replace(settings, length=min(settings.length, ANSWER))
    if last := harness.last_local:
        # A new job, so that the storage and the conversations of the session stay as they are.
        text, job = last.text, harness.job(last.job.prompt, short, last.job.history)
    else:
        text, job = OWN_PROMPT, harness.job(harness.prompt_ids(OWN_PROMPT, settings), short)
    events, conclude = _events(harness, job, trials), partial(_conclusion, harness.pair)
    return [RunReport(Report("audit", text, settings, TABLE.headings, events, conclude))]


def _events(harness: Harness, job: Job, trials: int) -> Iterator[ReportEvent]:
    settings, random = job.settings, Random(job.settings.seed)
    enabled, texts = harness.enabled(settings), _Texts(harness, job)
    prompt = f"the last prompt ({count_of(len(job.prompt), 'token')})" if harness.last_local else f'"{OWN_PROMPT}"'
    yield Progress(f"auditing {prompt} under {setting_fields()['processor'].show(settings)}, seed {settings.seed}")
    runs = (
        f"{trials} x up to {count_of(settings.length, 'token')} by {', '.join(strategy.name for strategy in enabled)}"
    )
    yield Progress(f"repeat: {runs}, always in this order ...")
    yield from texts.collect("repeat", [enabled] * trials)
    yield Progress(f"order: {runs}, shuffled ...")
    yield from texts.collect("order", [random.sample(enabled, len(enabled)) for _ in range(trials)])
    trial_text = TrialText.of(harness, replace(job, prompt=job.prompt[:LONGEST_PROMPT]), trials, random)
    for mode in MODES:
        yield from _logit_events(mode, harness, trial_text)


@dataclass(frozen=True, slots=True)
class _Texts:
    """The different texts of each strategy, by its name."""

    harness: Harness
    job: Job
    seen: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)

    def collect(self, mode: str, orders: Sequence[Sequence[Strategy]]) -> Iterator[ReportEvent]:
        """Run the strategies in each of these orders. A finding also covers the texts of earlier modes."""
        refused: dict[str, str] = {}
        countdown, done = Countdown(), 0
        try:
            for order in orders:
                for strategy in order:
                    try:
                        self.seen.setdefault(strategy.name, set()).add(self._run(strategy))
                    except UserError as error:
                        refused[strategy.name] = str(error)
                done += 1
                yield from countdown.at(done / len(orders), f"{mode}: {done} of {len(orders)} rounds")
        finally:  # Ctrl-C is raised again once the events are consumed
            yield from (Note(f"{mode}: {name} left out. {reason}") for name, reason in refused.items())
            if done and any(self.seen.values()):
                yield self._finding(mode, done)

    def _run(self, strategy: Strategy) -> tuple[int, ...]:
        """The tokens of one run, with an n-gram storage and sessions of its own."""
        fix_seeds(self.job.settings.seed)
        return tuple(tokens_of(strategy.steps(self.harness.job(self.job.prompt, self.job.settings, self.job.history))))

    def _finding(self, mode: str, done: int) -> Finding:
        unique = {name: len(texts) for name, texts in self.seen.items() if texts}
        return TABLE.finding(
            {
                "mode": mode,
                "trials": done,
                "tokens": max(len(text) for texts in self.seen.values() for text in texts),
                "unique_outputs": max(unique.values()),
                "unique_by_strategy": unique,
            }
        )


@dataclass(frozen=True, slots=True)
class TrialText:
    """The text of the trials. `job` has the prompt, `context` the decoder's tokens, and `random` picks the cuts."""

    job: Job
    trials: int
    random: Random
    context: list[int]

    @classmethod
    def of(cls, harness: Harness, job: Job, trials: int, random: Random) -> "TrialText":
        """The prompt and the target's answer, with the prompt repeated until two verify passes fit."""
        session = job.session("target", rewinds=False)
        context = [*session.begin(job.prompt), *tokens_of(harness.baseline.steps(job))]
        # A short answer would leave no room for random cuts at the largest verify width.
        room, missing = session.room(context), max(0, 2 * (job.settings.max_drafts + 1) - len(context))
        context += islice(cycle(job.prompt), missing if room is None else min(missing, room))
        return cls(job, trials, random, context)

    @property
    def width(self) -> int:
        """The maximum verify width: all drafts of a round and one token."""
        return self.job.settings.max_drafts + 1

    def cuts(self) -> Iterator[tuple[list[int], int]]:
        """The text up to a cut, and the number of positions to compare before it, for each trial."""
        for _ in range(self.trials):
            end = self.random.randint(min(self.width + 1, len(self.context)), len(self.context))
            yield self.context[:end], max(1, min(self.width, end - 1))

    def session(self, *, cache: bool | None = None) -> ModelSession:
        """A session of the target that has begun the prompt. Raises UserError if the model's cache cannot rewind."""
        settings = self.job.settings if cache is None else replace(self.job.settings, cache=cache)
        session = replace(self.job, settings=settings).session("target")
        session.begin(self.job.prompt)
        return session

    def choices(self, logits: Tensor, end: int) -> tuple[int, ...]:
        """The tokens drawn from logits (k, V) under the current processor and seed."""
        decoding = self.job.decoding
        return tuple(decoding.noise.samples(decoding.probs(logits, "The target"), end))


def by_width(text: TrialText, context: list[int], count: int) -> list[Tensor]:
    """Logits by decode steps, by verify passes of each width up to gamma + 1, and by one prefill."""
    base = text.session()
    if len(context) > count:
        base.feed(context[:-count], keep=1)
    versions = [logits_by_width(base, context, count, width) for width in range(1, count + 1)]
    return [*versions, text.session().feed(context, keep=count)]


def by_prefix(text: TrialText, context: list[int], count: int) -> list[Tensor]:
    """Logits with a cached prefix, after other drafts were rewound, and without a cache."""
    known = len(context) - count
    cached = text.session(cache=True)
    if known:
        # Any other tokens serve as drafts: a rewind must remove them completely.
        cached.feed([*context[:known], *reversed(context[-count:])], keep=1)
        cached.rewind(known)
    return [session.feed(context, keep=count) for session in (cached, text.session(cache=False))]


# Ways to compute the logits (k, V) of the last positions of a text: one tensor for each way.
MODES: dict[str, Callable[[TrialText, list[int], int], list[Tensor]]] = {"width": by_width, "prefix": by_prefix}


def _logit_events(mode: str, harness: Harness, text: TrialText) -> Iterator[ReportEvent]:
    """One finding for the trials of a mode. Ctrl-C keeps the finished trials."""
    yield Progress(f"{mode}: {count_of(text.trials, 'position')} in {count_of(len(text.context), 'token')} ...")
    drift, unique, done, width = LogitDrift(0.0, 0, 0), 0, 0, 0
    countdown = Countdown()
    try:
        for context, count in text.cuts():
            versions = MODES[mode](text, context, count)
            drift += LogitDrift.of(versions)
            unique = max(unique, len({text.choices(version, len(context)) for version in versions}))
            width = max(width, count)
            done += 1
            yield from countdown.at(done / text.trials, f"{mode}: {done} of {text.trials} positions")
    except UserError as error:
        yield Note(f"{mode}: left out. {error}")
    finally:  # Ctrl-C is raised again once the finding is consumed
        if done:
            harness.state.rounding = max(harness.state.rounding, drift.difference)
            yield TABLE.finding(
                {
                    "mode": mode,
                    "trials": done,
                    "unique_outputs": unique,
                    "largest_logit_difference": drift.difference,
                    "argmax_flips": drift.flips,
                    "positions": drift.positions,
                    **({"widest_window": width} if mode == "width" else {}),
                }
            )


def _conclusion(pair: Pair, findings: Sequence[Finding]) -> list[str]:
    """Which texts are guaranteed to be equal."""
    rows = {row["mode"]: row for row in figures_of(findings)}
    where = f"{pair.dtype}, {pair.device}" + (f", {pair.quantize}" if pair.quantize != "none" else "")
    repeats = [rows[mode] for mode in ("repeat", "order") if mode in rows]
    # If two equal runs differ, comparing different runs is meaningless, so no sentence follows.
    if unsteady := ", ".join(row["mode"] for row in repeats if row["unique_outputs"] > 1):
        return [f"Not deterministic ({where}): equal runs gave different texts ({unsteady}). No texts can be promised."]
    lines = []
    runs = sum(row["trials"] for row in repeats)
    if runs > 1:
        tokens = repeats[0]["tokens"]
        lines.append(
            f"Deterministic ({where}): {runs} runs of {count_of(tokens, 'token')} by each strategy gave equal texts."
        )
    elif runs:
        lines.append("There was one run of each strategy, and nothing to compare it with.")
    if "width" in rows:
        compared = [rows[mode] for mode in ("width", "prefix") if mode in rows]
        lines.append(_promise(compared, rows["width"]["widest_window"], pair))
    return lines


def _promise(rows: Sequence[Row], widest: int, pair: Pair) -> str:
    difference = max(row["largest_logit_difference"] for row in rows)
    flips, positions = (sum(row[name] for row in rows) for name in ("argmax_flips", "positions"))
    # Only equal bits guarantee equal texts; all other sentences state what to expect.
    if difference == 0:
        where = count_of(positions, "position")
        return f"Logits are bit-identical at {where} for verify widths up to {widest}: {EQUAL_TEXTS}."
    ways = f"Verify widths of 1 to {widest} tokens" if widest > 1 else "Decode steps and a prefill"
    moved = f"{ways} move logits by up to {difference:.2g}"
    if flips == 0 and difference < SMALL_DRIFT:
        return (
            f"{moved}, which flipped none of {positions} argmaxes. Expect that {EQUAL_TEXTS}, "
            "except where two tokens are closer than that. /texts distinguishes such a rounding tie from a bug."
        )
    if depends_on_width(pair):
        return (
            f"{moved} and flipped {flips} of {positions} argmaxes, because {pair.quantize} quantizes "
            "a pass by all of its rows. Even under greedy and /verify coupled, texts can differ. "
            "With another quantization this is rare."
        )
    remedy = "" if pair.dtype == "float32" else " With float32 this is rare."
    return (
        f"{moved} and flipped {flips} of {positions} argmaxes. Even under greedy and /verify coupled, texts can differ "
        f"where two tokens are that close. /texts recognizes such a rounding tie.{remedy}"
    )


AUDIT = Command(
    "audit",
    "[N]",
    "what is deterministic here",
    _audit,
    group="checks",
    page=Page(
        f"Check with N trials of four kinds (default {TRIALS}) what is deterministic here, and which texts are "
        "guaranteed to be equal.",
        ("> /audit 10", "Deterministic here: float32, cpu"),
        see_also=("lossless", "engine", "texts"),
    ),
)
