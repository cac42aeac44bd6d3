"""/lossless: tests whether first tokens follow the target's distribution, with many one-round draws of the last prompt.

Draw i is the first round of a run with seed + i. The prefill is computed once and shared by all draws.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from utils.bounds import MAX_SEED, WholeRange
from utils.commands.shared.columns import NOTHING, ResultColumn, ResultTable, figure, figures_of
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.harness import Harness
from utils.comparison.job import Job, SharedPrefills
from utils.comparison.reports import Countdown, Finding, Note, Progress, Report, ReportEvent
from utils.comparison.strategies import Strategy, is_greedy
from utils.config.settings import Settings
from utils.errors import UserError
from utils.text import count_of

DRAWS, MAX_DRAWS = 200, 1_000_000
MIN_EXPECTED = 5.0  # with smaller expected counts the chi-square distribution is a poor approximation
SUSPICIOUS, IMPOSSIBLE = 1e-3, 1e-8  # p-values below these are called suspicious or wrong
NO_DIFFERENCE, ALL_MATCH, TOO_FEW = "no difference seen", "all match", "too few draws"
OTHER, RARE, WRONG = "differs, as expected", "suspicious", "wrong: please report"
TABLE = ResultTable(
    figure("strategy", "strategy"),
    figure("draws", "draws", drop=2),
    figure("cells", "cells", drop=1),
    ResultColumn(
        "chi-square",
        lambda row: NOTHING if row["statistic"] is None else f"{row['statistic']:.1f} ({row['freedom']} df)",
    ),
    figure("p-value", "p_value", "{:.2g}"),
    ResultColumn("matches", lambda row: f"{row['matches']}/{row['draws']}" if row["statistic"] is None else NOTHING),
    figure("verdict", "verdict"),
)
GREEDY = (
    "greedy decoding is deterministic, so there is no distribution to test. Type /processor multinomial 1 first, "
    "or /audit to check that texts are equal."
)


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of Pearson's chi-square test of counted draws against a distribution. Small cells are merged.

    `draws` is their number, and `matches` counts those with a probability above 0. `support` is the number of tokens
    with such a probability. `cells` counts the cells after merging. `statistic`, `freedom` and `p_value` are None with
    fewer than two cells. `p_value` is the probability that draws from the distribution itself deviate at least this
    much.
    """

    draws: int
    matches: int
    support: int
    cells: int
    statistic: float | None
    freedom: int | None
    p_value: float | None


def _lossless(argument: str, context: CommandContext) -> Outcome:
    draws = WholeRange(1, MAX_DRAWS).parse(argument or str(DRAWS))
    last, settings = context.harness.last(), context.settings
    strategies = [strategy for strategy in context.harness.enabled(settings) if strategy.samples]
    if not strategies:
        raise UserError("no enabled strategy draws tokens (beam search does not): turn one on, for example /target on.")
    if is_greedy(settings):
        raise UserError(GREEDY)
    events = _events(context.harness, last.job, settings, strategies, draws=draws)
    report = Report("lossless", last.text, settings, TABLE.headings, events, _conclusion, optional=TABLE.optional)
    return [RunReport(report)]


def _events(
    harness: Harness, last: Job, settings: Settings, strategies: Sequence[Strategy], *, draws: int
) -> Iterator[ReportEvent]:
    versions = _first_probs(harness, last.prompt, settings)
    # The first round must not be shortened by the end of the run.
    short = replace(settings, length=settings.max_drafts + 1)
    countdown = Countdown()
    for index, strategy in enumerate(strategies):
        yield Progress(f"{strategy.name}: drawing {count_of(draws, 'round')} ...")
        job = replace(harness.job(last.prompt, short, last.history), prefills=SharedPrefills())
        counts: Counter[int] = Counter()
        try:
            for draw in range(draws):
                done = (index + draw / draws) / len(strategies)
                yield from countdown.at(done, f"{strategy.name}: {draw} of {draws} draws")
                counts[_first_token(strategy, job, draw)] += 1
        except UserError as error:
            yield Note(f"{strategy.name}: left out. {error}")
        except KeyboardInterrupt:
            # The events are a generator, so this finding is consumed before Ctrl-C is raised again.
            if counts:
                yield _finding(strategy, _best_fit(counts, versions))
            raise
        else:
            yield _finding(strategy, _best_fit(counts, versions))


def _first_probs(harness: Harness, prompt: list[int], settings: Settings) -> list[Tensor]:
    """The target's distribution (V,) of the first new token, from a decode step and from a verify pass.

    Strategies compute one or the other. They differ by rounding only, but that can move a token across the edge of a
    nucleus.
    """
    job = replace(harness.job(prompt, settings), prefills=SharedPrefills())
    session = job.session("target", rewinds=False)
    context = session.begin(prompt)
    room = session.room(context)
    # Which drafts follow does not matter: only the logits before them are read.
    drafts = context[-1:] * (settings.max_drafts if room is None else min(settings.max_drafts, room - 1))
    versions = [session.feed(context, keep=1)]
    with suppress(UserError):  # a recurrent model has no verify pass
        versions.append(job.session("target").feed(context + drafts, keep=len(drafts) + 1)[:1])
    return [job.decoding.probs(logits, session.name)[0] for logits in versions]


def _best_fit(counts: Counter[int], versions: Sequence[Tensor]) -> Fit:
    """The fit to the version of the distribution that matches the draws best: a strategy may compute either."""
    fits = (fit(counts, probs) for probs in versions)
    return max(fits, key=lambda result: (result.matches, 1.0 if result.p_value is None else result.p_value))


def _first_token(strategy: Strategy, job: Job, draw: int) -> int:
    seed = (job.settings.seed + draw) % (MAX_SEED + 1)
    # Every draw must start from the same state; otherwise draws would not be independent.
    job.storage.reset()
    job.caches.texts.clear()
    rounds = strategy.steps(replace(job, settings=replace(job.settings, seed=seed)))
    return next(rounds).tokens[0]


def _finding(strategy: Strategy, result: Fit) -> Finding:
    return TABLE.finding({"strategy": strategy.name, **asdict(result), "verdict": _verdict(strategy, result)})


def _verdict(strategy: Strategy, result: Fit) -> str:
    if result.p_value is None:
        return ALL_MATCH if result.support == 1 else TOO_FEW
    if result.p_value >= SUSPICIOUS:
        return NO_DIFFERENCE
    if not strategy.lossless:
        return OTHER
    if result.p_value >= IMPOSSIBLE:
        return RARE
    return WRONG


def _conclusion(findings: Sequence[Finding]) -> list[str]:
    return conclusion(figures_of(findings))


def conclusion(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences on the verdicts and columns that occur, and the next step."""
    lines = [sentence for row in rows if (sentence := _alarm(row))]
    if any(row["verdict"] == OTHER for row in rows):
        lines.append("The drafter alone is not meant to follow the target's distribution.")
    if any(row["support"] == 1 for row in rows):
        lines.append("Matches: draws of the only token that the target allows here.")
    elif any(row["verdict"] == TOO_FEW for row in rows):
        lines.append(
            "A test needs two tokens that are expected five times each. Matches: draws with a probability above 0."
        )
        lines.append(
            f"Next: more draws, such as /lossless {5 * max(row['draws'] for row in rows)}, or a higher temperature."
        )
    if any(row["p_value"] is not None for row in rows):
        lines.append(
            "p-value: the probability that draws from the target's own distribution deviate at least this much. "
            "Cells: tokens with an expected count of five or more, and all others as one. "
            "Strategies that draw with the target's noise repeat its draws exactly."
        )
    return lines


def _alarm(row: dict[str, Any]) -> str:
    """A sentence about a strategy whose draws do not match the target's distribution. It is empty otherwise."""
    if row["verdict"] == RARE:
        return f"{row['strategy']}: chance does this once in {1 / row['p_value']:.0f}. Next: repeat it with more draws."
    if row["verdict"] == WRONG:
        return f"{row['strategy']} does not follow the target's distribution. This is a bug: please report it."
    return ""


def fit(counts: Mapping[int, int], probs: Tensor) -> Fit:
    """Test counts by token id against a distribution (V,). A draw of a token with probability 0 makes the p-value 0."""
    draws = sum(counts.values())
    probabilities = probs.tolist()
    matches = sum(count for token, count in counts.items() if probabilities[token] > 0)
    support = sum(value > 0 for value in probabilities)
    cells = _merged([(counts.get(token, 0), draws * value) for token, value in enumerate(probabilities) if value > 0])
    # First: an impossible draw refutes the distribution, however few cells there are.
    if matches < draws:
        return Fit(draws, matches, support, len(cells), None, None, 0.0)
    if len(cells) < 2:
        return Fit(draws, matches, support, len(cells), None, None, None)
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    freedom = len(cells) - 1
    return Fit(draws, matches, support, len(cells), statistic, freedom, chi_square_tail(statistic, freedom))


def chi_square_tail(statistic: float, freedom: int) -> float:
    """The probability that a chi-square variable with `freedom` degrees exceeds `statistic`."""
    # Q(freedom / 2, statistic / 2), the regularised upper incomplete gamma function.
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def _merged(cells: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The cells (observed, expected), with those expected below 5 merged into one. If that is still too small, it also
    takes the smallest other cell.
    """
    large = sorted((cell for cell in cells if cell[1] >= MIN_EXPECTED), key=lambda cell: cell[1], reverse=True)
    small = [cell for cell in cells if cell[1] < MIN_EXPECTED]
    if small:
        rest = (sum(observed for observed, _ in small), sum(expected for _, expected in small))
        if rest[1] < MIN_EXPECTED and large:
            observed, expected = large.pop()
            rest = (rest[0] + observed, rest[1] + expected)
        large.append(rest)
    return large


LOSSLESS = Command(
    "lossless",
    "[N]",
    "test samples against the distribution",
    _lossless,
    group="checks",
    page=Page(
        f"Draw N first tokens (default {DRAWS}) of the last prompt with every strategy, and test them against the "
        "distribution of the target.",
        ("> /lossless 200", "speculative   p-value 0.41"),
        see_also=("audit", "verify"),
    ),
)
