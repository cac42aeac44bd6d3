"""/audit and /lossless: checks of the loaded models and strategies on the last prompt.

/audit finds out what is deterministic here, and which texts must be equal. Its modes follow the tests of
batch-invariant inference engines: `texts` repeats whole runs in changing order, and `logits` compares the logits before
random cuts of the text, by verify width, and with and without a cached prefix. /lossless tests whether first tokens
follow the target's distribution, with many one-round draws.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from utils.bounds import MAX_SEED, WholeRange
from utils.commands.shared.registry import Command, CommandContext, Outcome
from utils.commands.shared.result_tables import NOTHING, ResultColumn, ResultTable, Row, figure
from utils.comparison.harness import Harness
from utils.comparison.records import Countdown
from utils.comparison.strategies import Job, Strategy, is_greedy
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
    "strategies with drafts have the texts of target-only under greedy (with any rule), and with sampling under "
    "/verify coupled"
)
AUDIT_TABLE = ResultTable(
    figure("mode", "mode"),
    figure("trials", "trials"),
    figure("unique outputs", "unique_outputs"),
    figure("logit difference", "largest_logit_difference", "{:.2g}"),
    ResultColumn(
        "argmax flips",
        lambda row: f"{row['argmax_flips']} of {row['positions']}" if "argmax_flips" in row else NOTHING,
    ),
)
DRAWS, MAX_DRAWS = 200, 1_000_000
MIN_EXPECTED = 5.0  # with smaller expected counts the chi-square distribution is a poor approximation
SUSPICIOUS, IMPOSSIBLE = 1e-3, 1e-8  # p-values below these are called suspicious or wrong
NO_DIFFERENCE, ALL_MATCH, TOO_FEW = "no difference seen", "all match", "too few draws"
OTHER, RARE, WRONG = "differs, as expected", "suspicious", "wrong: please report"
MEANINGS = {  # sentences about the verdicts that need one
    RARE: "{strategy}: chance does this with probability {p_value:.1g}. Next: repeat it with more draws.",
    WRONG: "{strategy} does not follow the target's distribution. This is a bug: please report it.",
    OTHER: "{strategy} alone is not meant to follow the target's distribution.",
    ALL_MATCH: "The target allows only one token here.",
    TOO_FEW: "A test needs two tokens that are expected five times each. Next: more draws or a higher temperature.",
}
P_VALUE = "p-value: the probability that draws from the target's own distribution deviate at least this much."
DRAW_TABLE = ResultTable(
    figure("strategy", "strategy"),
    figure("draws", "draws", drop=2),
    figure("matches", "matches"),
    figure("cells", "cells", drop=1),
    figure("p-value", "p_value", "{:.2g}"),
    figure("verdict", "verdict"),
)
GREEDY = (
    "greedy decoding is deterministic, so there is no distribution to test. Type /processor multinomial 1 first, "
    "or /audit to check that texts are equal."
)


def _audit(argument: str, context: CommandContext) -> Outcome:
    trials = WholeRange(1, MAX_TRIALS).parse(argument or str(TRIALS))
    harness, settings = context.harness, context.settings
    harness.enabled(settings)  # raises UserError where nothing is enabled
    short = replace(settings, length=min(settings.length, ANSWER))
    last = harness.last_local
    text, history = (OWN_PROMPT, ()) if last is None else (last.text, last.job.history)
    prompt = harness.prompt_ids(OWN_PROMPT, settings) if last is None else last.job.prompt
    # A new job, so that the storage and the conversations of the session stay as they are.
    audit = _Audit(harness, harness.job(prompt, short, history), trials, Random(settings.seed))
    return [AUDIT_TABLE.report("audit", text, settings, audit.rows(), conclude=partial(_audited, harness.pair))]


@dataclass(slots=True)
class _Audit:
    harness: Harness
    job: Job
    trials: int
    random: Random

    @property
    def _width(self) -> int:
        """That of the widest verify pass: all drafts of a round and one token."""
        return self.job.settings.max_drafts + 1

    def rows(self) -> Iterator[Row]:
        settings, enabled = self.job.settings, self.harness.enabled(self.job.settings)
        names = ", ".join(strategy.name for strategy in enabled)
        runs = f"{self.trials} x up to {count_of(settings.length, 'token')}"
        self.harness.progress(f"texts: {runs} by {names}, shuffled ...")
        yield from self._text_rows(enabled)
        self.job = replace(self.job, prompt=self.job.prompt[:LONGEST_PROMPT])
        yield from self._logit_rows(self._trial_text())

    def _text_rows(self, enabled: Sequence[Strategy]) -> Iterator[Row]:
        """Run the strategies in a random order for each trial."""
        texts: dict[str, set[tuple[int, ...]]] = {strategy.name: set() for strategy in enabled}
        refused: dict[str, str] = {}
        countdown, done = Countdown(self.harness.progress), 0
        try:
            while done < self.trials:
                for strategy in self.random.sample(enabled, len(enabled)):
                    fix_seeds(self.job.settings.seed)
                    # With an n-gram storage and sessions of its own.
                    job = self.harness.job(self.job.prompt, self.job.settings, self.job.history)
                    try:
                        texts[strategy.name].add(tuple(tokens_of(strategy.steps(job))))
                    except UserError as error:
                        refused[strategy.name] = str(error)
                done += 1
                countdown.at(done / self.trials, f"texts: {done} of {self.trials} rounds")
        finally:  # Ctrl-C is raised again once the row is consumed
            for name, reason in refused.items():
                self.harness.note(f"{name} left out. {reason}")
            unique = {name: len(own) for name, own in texts.items() if own}
            if done and unique:
                yield {
                    "mode": "texts",
                    "trials": done,
                    "tokens": max(len(text) for own in texts.values() for text in own),
                    "unique_outputs": max(unique.values()),
                    "unique_by_strategy": unique,
                }

    def _trial_text(self) -> list[int]:
        """The prompt and the target's answer, with the prompt repeated until two verify passes fit."""
        session = self.job.session("target", rewinds=False)
        context = [*session.begin(self.job.prompt), *tokens_of(self.harness.baseline.steps(self.job))]
        # A short answer would leave no room for random cuts at the largest verify width.
        room, missing = session.room(context), max(0, 2 * self._width - len(context))
        return context + list(islice(cycle(self.job.prompt), missing if room is None else min(missing, room)))

    def _logit_rows(self, text: list[int]) -> Iterator[Row]:
        """One row for the logits before random cuts of the text, computed in several ways."""
        self.harness.progress(f"logits: {count_of(self.trials, 'position')} in {count_of(len(text), 'token')} ...")
        drift, unique, done, widest = LogitDrift(0.0, 0, 0), 0, 0, 0
        countdown, decoding = Countdown(self.harness.progress), self.job.decoding
        try:
            while done < self.trials:
                end = self.random.randint(min(self._width + 1, len(text)), len(text))
                count = max(1, min(self._width, end - 1))
                versions = list(self._versions(text[:end], count))
                drift += LogitDrift.of(versions)
                drawn = (decoding.noise.samples(decoding.probs(logits, "The target"), end) for logits in versions)
                unique = max(unique, len(set(map(tuple, drawn))))
                widest, done = max(widest, count), done + 1
                countdown.at(done / self.trials, f"logits: {done} of {self.trials} positions")
        except UserError as error:
            self.harness.note(f"logits: left out. {error}")
        finally:  # Ctrl-C is raised again once the row is consumed
            if done:
                self.harness.state.rounding = max(self.harness.state.rounding, drift.difference)
                yield {
                    "mode": "logits",
                    "trials": done,
                    "unique_outputs": unique,
                    "largest_logit_difference": drift.difference,
                    "argmax_flips": drift.flips,
                    "positions": drift.positions,
                    "widest_window": widest,
                }

    def _versions(self, context: list[int], count: int) -> Iterator[Tensor]:
        """Logits (count, V) of the last tokens: by decode steps, by verify passes of each width up to gamma + 1, by one
        prefill, without a cache, and with a cached prefix after other drafts were rewound.
        """
        base, known = self._session(), len(context) - count
        if known:
            base.feed(context[:known], keep=1)
        yield from (logits_by_width(base, context, count, width) for width in range(1, count + 1))
        for session in (self._session(), self._session(cache=False)):
            yield session.feed(context, keep=count)
        with suppress(UserError):  # the cache of a recurrent model cannot be rewound
            cached = self._session(cache=True)
            if known:
                # Any other tokens serve as drafts: a rewind must remove them completely.
                cached.feed([*context[:known], *reversed(context[known:])], keep=1)
                cached.rewind(known)
            yield cached.feed(context, keep=count)

    def _session(self, **settings: Any) -> ModelSession:
        """A session of the target that has begun the prompt. Raises UserError if the model's cache cannot rewind."""
        session = replace(self.job, settings=replace(self.job.settings, **settings)).session("target")
        session.begin(self.job.prompt)
        return session


def _audited(pair: Pair, rows: Sequence[Row]) -> list[str]:
    modes = {row["mode"]: row for row in rows}
    where = f"{pair.dtype}, {pair.device}" + (f", {pair.quantize}" if pair.quantize != "none" else "")
    lines = []
    if texts := modes.get("texts"):
        # If two equal runs differ, comparing different runs is meaningless, so no sentence follows.
        if texts["unique_outputs"] > 1:
            return [f"Not deterministic ({where}): equal runs gave different texts. No texts can be promised."]
        runs = f"{texts['trials']} runs of {count_of(texts['tokens'], 'token')} by each strategy gave equal texts."
        once = "There was one run of each strategy, and nothing to compare it with."
        lines.append(f"Deterministic ({where}): {runs}" if texts["trials"] > 1 else once)
    return [*lines, *([_promise(modes["logits"], pair)] if "logits" in modes else [])]


def _promise(row: Row, pair: Pair) -> str:
    difference, flips, positions = row["largest_logit_difference"], row["argmax_flips"], row["positions"]
    # Only equal bits guarantee equal texts; all other sentences state what to expect.
    where = f"{count_of(positions, 'position')} for verify widths up to {row['widest_window']}"
    if difference == 0:
        return f"Logits are bit-identical at {where}: {EQUAL_TEXTS}."
    moved = f"Logits move by up to {difference:.2g} at {where}"
    if flips == 0 and difference < SMALL_DRIFT:
        return f"{moved}, which flips no argmax. Expect that {EQUAL_TEXTS}, except where two tokens are closer."
    remedy = "" if pair.dtype == "float32" else " With float32 this is rare."
    if depends_on_width(pair):
        remedy = f" The cause: {pair.quantize} quantizes a pass by all of its rows."
    return (
        f"{moved} and flipped {flips} of {positions} argmaxes. Even under greedy and /verify coupled, texts can differ "
        f"where two tokens are that close. /texts recognizes such a rounding tie.{remedy}"
    )


class Fit(NamedTuple):
    """Pearson's chi-square test of counted draws against a distribution, with small cells merged.

    `matches` counts the draws of tokens with a probability above 0, and `support` these tokens. `p_value` is the
    probability that draws from the distribution itself deviate at least this much; None with fewer than two cells.
    """

    draws: int
    matches: int
    support: int
    cells: int
    p_value: float | None = None


def _lossless(argument: str, context: CommandContext) -> Outcome:
    draws = WholeRange(1, MAX_DRAWS).parse(argument or str(DRAWS))
    last, settings = context.harness.last(), context.settings
    strategies = [strategy for strategy in context.harness.enabled(settings) if strategy.samples]
    if not strategies:
        raise UserError("no enabled strategy draws tokens (beam search does not): turn one on, for example /target on.")
    if is_greedy(settings):
        raise UserError(GREEDY)
    # The first round must not be shortened by the end of the run.
    short = replace(settings, length=settings.max_drafts + 1)
    job = context.harness.job(last.job.prompt, short, last.job.history)
    rows = _draw_rows(context.harness, job, strategies, draws)
    return [DRAW_TABLE.report("lossless", last.text, settings, rows, conclude=conclusion)]


def _draw_rows(harness: Harness, job: Job, strategies: Sequence[Strategy], draws: int) -> Iterator[Row]:
    versions, countdown = _first_probs(job), Countdown(harness.progress)
    for index, strategy in enumerate(strategies):
        harness.progress(f"{strategy.name}: drawing {count_of(draws, 'round')} ...")
        own = replace(job, prefills={})  # a strategy keeps nothing of another one
        counts: Counter[int] = Counter()
        try:
            for draw in range(draws):
                done = (index + draw / draws) / len(strategies)
                countdown.at(done, f"{strategy.name}: {draw} of {draws} draws")
                counts[_first_token(strategy, own, draw)] += 1
        except UserError as error:
            harness.note(f"{strategy.name}: left out. {error}")
        finally:  # Ctrl-C is raised again once the row is consumed
            if counts:
                # A strategy may compute either version, so the one that matches the draws best counts.
                fits = (fit(counts, probs) for probs in versions)
                result = max(fits, key=lambda one: (one.matches, 1.0 if one.p_value is None else one.p_value))
                verdict = _verdict(strategy, result)
                yield {"strategy": strategy.name, **result._asdict(), "verdict": verdict}


def _first_probs(job: Job) -> list[Tensor]:
    """The target's distribution (V,) of the first new token, from a decode step and from a verify pass.

    Strategies compute one or the other. They differ by rounding only, but that can move a token across the edge of a
    nucleus.
    """
    job = replace(job, prefills={})
    session = job.session("target", rewinds=False)
    context = session.begin(job.prompt)
    room, most = session.room(context), job.settings.max_drafts
    # Which drafts follow does not matter: only the logits before them are read.
    drafts = context[-1:] * (most if room is None else min(most, room - 1))
    versions = [session.feed(context, keep=1)]
    with suppress(UserError):  # a recurrent model has no verify pass
        versions.append(job.session("target").feed(context + drafts, keep=len(drafts) + 1)[:1])
    return [job.decoding.probs(logits, session.name)[0] for logits in versions]


def _first_token(strategy: Strategy, job: Job, draw: int) -> int:
    seed = (job.settings.seed + draw) % (MAX_SEED + 1)
    # Every draw must start from the same state; otherwise draws would not be independent.
    job.storage.reset()
    job.caches.texts.clear()
    return next(strategy.steps(replace(job, settings=replace(job.settings, seed=seed)))).tokens[0]


def _verdict(strategy: Strategy, result: Fit) -> str:
    if result.p_value is None:
        return ALL_MATCH if result.support == 1 else TOO_FEW
    if result.p_value >= SUSPICIOUS:
        return NO_DIFFERENCE
    return OTHER if not strategy.lossless else RARE if result.p_value >= IMPOSSIBLE else WRONG


def conclusion(rows: Sequence[Row]) -> list[str]:
    lines = (MEANINGS[row["verdict"]].format(**row) for row in rows if row["verdict"] in MEANINGS)
    return [*dict.fromkeys(lines), *[P_VALUE] * any(row["p_value"] is not None for row in rows)]


def fit(counts: Mapping[int, int], probs: Tensor) -> Fit:
    """Test counts by token id against a distribution (V,). A draw of a token with probability 0 makes the p-value 0."""
    draws = sum(counts.values())
    possible = {token: value for token, value in enumerate(probs.tolist()) if value > 0}
    matches = sum(count for token, count in counts.items() if token in possible)
    cells = _merged([(counts.get(token, 0), draws * value) for token, value in possible.items()])
    result = Fit(draws, matches, len(possible), len(cells))
    # First: an impossible draw refutes the distribution, however few cells there are.
    if matches < draws:
        return result._replace(p_value=0.0)
    if len(cells) < 2:
        return result
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    return result._replace(p_value=chi_square_tail(statistic, len(cells) - 1))


def chi_square_tail(statistic: float, freedom: int) -> float:
    """The probability that a chi-square variable with `freedom` degrees exceeds `statistic`."""
    # Q(freedom / 2, statistic / 2), the regularised upper incomplete gamma function.
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def _merged(cells: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The cells (observed, expected), with those expected below 5 merged into one. If that is still too small, it also
    takes the smallest other cell.
    """
    rest, observed, expected = sorted(cells, key=lambda cell: cell[1], reverse=True), 0, 0.0
    while rest and (rest[-1][1] < MIN_EXPECTED or 0 < expected < MIN_EXPECTED):
        count, mean = rest.pop()
        observed, expected = observed + count, expected + mean
    return [*rest, (observed, expected)] if expected else rest


AUDIT = Command(
    "audit",
    "[N]",
    "what is deterministic here",
    _audit,
    group="checks",
    about=f"And which texts are guaranteed to be equal. N is the number of trials (default {TRIALS}).",
    example=("> /audit 10", "Deterministic here: float32, cpu"),
)
LOSSLESS = Command(
    "lossless",
    "[N]",
    "test samples against the distribution",
    _lossless,
    group="checks",
    about=f"Every strategy draws N first tokens of the last prompt (default {DRAWS}), as the target should.",
    example=("> /lossless 200", "speculative   p-value 0.41"),
)
