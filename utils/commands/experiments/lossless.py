"""/lossless: do first tokens follow the target's law? Many one-round draws per strategy on the last prompt, and a chi-square test.

Draw i is the first round of a run under seed + i; what the models make of the prompt is computed once and shared by all of them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

from torch import Tensor

from utils.bounds import MAX_SEED
from utils.commands.registry import Command, Outcome, Situation
from utils.comparison.harness import Bench
from utils.comparison.reports import Finding, Progress, Report
from utils.comparison.strategies import Job, Strategy
from utils.config.settings import Settings
from utils.config.value_types import Whole
from utils.errors import UserError
from utils.metrics.chi_square import Fit, fit

DRAWS, MOST_DRAWS = 200, 1_000_000
NOTED = 100  # from so many draws on a word is said at each quarter
DOUBTFUL, IMPOSSIBLE = 1e-3, 1e-8  # p-values below these are said to be suspicious, and to be wrong
HEADINGS = ("strategy", "draws", "cells", "chi-square", "p-value", "matches", "verdict")


def _lossless(argument: str, situation: Situation) -> Outcome:
    draws: int = Whole(1, MOST_DRAWS).parse(argument or str(DRAWS), DRAWS, situation.limits)
    last, settings = situation.bench.last(), situation.settings
    strategies = [strategy for strategy in situation.bench.enabled(settings) if strategy.draws]
    if not strategies:
        raise UserError(
            "no strategy that draws is on; beam search draws nothing. Turn one on, for example with /target on."
        )
    findings = _findings(situation.bench, last.job, settings, strategies, draws=draws)
    return Outcome(report=Report("lossless", last.text, settings, HEADINGS, findings, _conclusion))


def _findings(
    bench: Bench, last: Job, settings: Settings, strategies: Sequence[Strategy], *, draws: int
) -> Iterator[Progress | Finding]:
    laws = _first_laws(bench, last.prompt, settings)
    short = replace(settings, length=settings.most_drafts + 1)
    for strategy in strategies:
        yield Progress(f"{strategy.name}: drawing {draws} rounds ...")
        job = replace(bench.job(last.prompt, short, last.history), read={})
        seen: Counter[int] = Counter()
        try:
            for draw in range(draws):
                if draw and draws >= NOTED and draw % (draws // 4) == 0:
                    yield Progress(f"{strategy.name}: {draw} of {draws} ...")
                seen[_first_token(strategy, job, draw)] += 1
        except UserError as error:
            yield Progress(f"{strategy.name}: left out. {error}")
        except KeyboardInterrupt:
            if seen:
                yield _finding(strategy, _best_fit(seen, laws))
            raise
        else:
            yield _finding(strategy, _best_fit(seen, laws))


def _first_laws(bench: Bench, prompt: list[int], settings: Settings) -> list[Tensor]:
    """The target's law (V,) of the first new token, computed alone and at the head of a window: strategies do either.

    The two differ by rounding only, which can put a token at the edge of a nucleus in or out.
    """
    job = replace(bench.job(prompt, settings), read={})
    session = job.session("target", rewinds=False)
    context = session.begin(prompt)
    room = session.room(context)
    window = context[-1:] * (settings.most_drafts if room is None else min(settings.most_drafts, room - 1))
    versions = [session.feed(context, keep=1)]
    with suppress(UserError):  # a recurrent model has no windows
        versions.append(job.session("target").feed(context + window, keep=len(window) + 1)[:1])
    return [job.decoding.law(logits, session.name)[0] for logits in versions]


def _best_fit(seen: Counter[int], laws: Sequence[Tensor]) -> Fit:
    """Against the version of the law that suits the draws best: which one a strategy computed is no fault of it."""
    return max(
        (fit(seen, law) for law in laws), key=lambda one: (one.matches, 1.0 if one.p_value is None else one.p_value)
    )


def _first_token(strategy: Strategy, job: Job, draw: int) -> int:
    seed = (job.settings.seed + draw) % (MAX_SEED + 1)
    job.storage.reset()
    job.kept.texts.clear()
    rounds = strategy.steps(replace(job, settings=replace(job.settings, seed=seed)))
    return next(rounds).tokens[0]


def _finding(strategy: Strategy, result: Fit) -> Finding:
    statistic = "-" if result.statistic is None else f"{result.statistic:.1f} ({result.freedom} df)"
    p_value = "-" if result.p_value is None else f"{result.p_value:.2g}"
    matches = f"{result.matches}/{result.draws}" if result.statistic is None else "-"
    cells = (strategy.name, str(result.draws), str(result.cells), statistic, p_value, matches)
    verdict = _verdict(strategy, result)
    return Finding((*cells, verdict), {"strategy": strategy.name, **asdict(result), "verdict": verdict})


def _verdict(strategy: Strategy, result: Fit) -> str:
    if result.p_value is None:
        return "all match" if result.support == 1 else "too few draws for a test"
    if result.p_value >= DOUBTFUL:
        return "no difference seen"
    if not strategy.lossless:
        return "another law, as it should be: not the target's"
    if result.p_value >= IMPOSSIBLE:
        return f"suspicious: chance does this once in {1 / result.p_value:.0f}; try more draws"
    return "NOT the target's law: please report"


def _conclusion(findings: Sequence[Finding]) -> list[str]:
    """What the rows mean together."""
    lines = []
    if any(finding.figures["support"] == 1 for finding in findings):
        lines.append("matches: draws that are the one token that the target says here.")
    elif any(finding.figures["cells"] < 2 for finding in findings):
        lines.append(
            "Too few draws: a test needs two tokens that are expected five times each. matches: draws that the law allows at all."
        )
    if any(finding.figures["p_value"] is not None for finding in findings):
        lines.append(
            "p-value: how often as many draws from the target's own law look at least this far from it. cells: tokens expected five times "
            "or more, and all others as one. Strategies that draw with the target's noise repeat its very draws."
        )
    return lines


LOSSLESS = Command(
    "lossless",
    "[N]",
    f"N first tokens per strategy against the target's law, on the last prompt (N: {DRAWS})",
    _lossless,
)
