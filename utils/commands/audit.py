"""/audit: checks what is deterministic here, and which texts must be equal for these models on this device.

The modes follow the tests of batch-invariant inference engines (single, mixed, prefix). This module repeats and
reorders whole runs; utils.commands.experiments.logit_trials compares logits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from utils.bounds import WholeRange
from utils.commands.experiments.logit_trials import MODES, TrialText, logit_events
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.countdown import Countdown
from utils.comparison.harness import Harness
from utils.comparison.job import Job
from utils.comparison.reports import Finding, Note, Progress, Report, ReportEvent
from utils.comparison.strategies import Strategy
from utils.config.setting_table import setting_fields
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
HEADINGS = ("mode", "trials", "unique outputs", "logit difference", "argmax flips")
EQUAL_TEXTS = (
    "the speculative, n-gram assisted and target-only texts are the same under greedy (with any rule), "
    "and with sampling under /verify coupled"
)
Row = dict[str, Any]  # the figures of a finding


def _audit(argument: str, context: CommandContext) -> Outcome:
    trials = WholeRange(1, MAX_TRIALS).parse(argument or str(TRIALS))
    harness, settings = context.harness, context.settings
    harness.enabled(settings)  # raises UserError where nothing is enabled
    short = replace(settings, length=min(settings.length, ANSWER))
    if last := harness.state.last:
        # A new job, so that the storage and the conversations of the session stay as they are.
        text, job = last.text, harness.job(last.job.prompt, short, last.job.history)
    else:
        text, job = OWN_PROMPT, harness.job(harness.prompt_ids(OWN_PROMPT, settings), short)
    events, conclude = _events(harness, job, trials), partial(_conclusion, harness.pair)
    return [RunReport(Report("audit", text, settings, HEADINGS, events, conclude))]


def _events(harness: Harness, job: Job, trials: int) -> Iterator[ReportEvent]:
    settings, random = job.settings, Random(job.settings.seed)
    enabled, texts = harness.enabled(settings), _Texts(harness, job)
    prompt = f"the last prompt ({count_of(len(job.prompt), 'token')})" if harness.state.last else f'"{OWN_PROMPT}"'
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
        yield from logit_events(mode, harness, trial_text)


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
        figures = {
            "mode": mode,
            "trials": done,
            "tokens": max(len(text) for texts in self.seen.values() for text in texts),
            "unique_outputs": max(unique.values()),
            "unique_by_strategy": unique,
        }
        return Finding((mode, str(done), str(figures["unique_outputs"]), "-", "-"), figures)


def _conclusion(pair: Pair, findings: Sequence[Finding]) -> list[str]:
    """Which texts are guaranteed to be equal."""
    rows: dict[str, Row] = {finding.figures["mode"]: finding.figures for finding in findings}
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
        f"Check with N trials of five kinds (default {TRIALS}) what is deterministic here, and which texts are "
        "guaranteed to be equal.",
        ("> /audit 10", "Deterministic here: float32, cpu"),
        see_also=("lossless", "engine", "texts"),
    ),
)
