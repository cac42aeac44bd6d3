"""/explain and /columns: what the figures are and came to, and the last texts beside each other."""

import re

from utils.commands.registry import Command, Outcome, Situation
from utils.comparison.glossary import FIGURES
from utils.comparison.harness import Compared, Last
from utils.comparison.reports import Column
from utils.errors import UserError, one_of
from utils.metrics.results import first_difference
from utils.text import decode

NAMES = tuple(figure.name for figure in FIGURES)


def _explain(argument: str, situation: Situation) -> Outcome:
    if not argument:
        return Outcome(rows=tuple((figure.name, figure.meaning, "") for figure in FIGURES))
    figure = FIGURES[NAMES.index(_name(argument.lower()))]
    last = situation.bench.memory.last
    told = (
        [(strategy.name, figure.fraction(strategy, run, comparison)) for strategy, run, comparison in last.compared]
        if last
        else []
    )
    rows = tuple((name, fraction, "") for name, fraction in told if fraction)
    return Outcome(rows=((figure.name, figure.meaning, ""), *rows))


def _name(word: str) -> str:
    """A figure's name, from itself or from a word of it. Raises UserError where there is none."""
    parts = (name for name in NAMES if word in re.findall(r"[\w/]+", name))
    return word if word in NAMES else next(parts, "") or one_of(word, NAMES, "figure")


def _columns(argument: str, situation: Situation) -> Outcome:
    last = situation.bench.last()
    if not last.compared:
        raise UserError("the last prompt was not answered by any strategy: send it again.")
    groups: dict[tuple[int, ...], list[Compared]] = {}
    for compared in sorted(last.compared, key=lambda compared: not compared[0].is_baseline):  # the target first
        groups.setdefault(tuple(compared[1].tokens), []).append(compared)
    return Outcome(columns=tuple(_column(last, group) for group in groups.values()))


def _column(last: Last, group: list[Compared]) -> Column:
    """Of strategies that said the same."""
    _, run, comparison = group[0]
    tokenizer, target = last.job.pair.tokenizer, last.target
    text = decode(tokenizer, run.tokens)
    about = f"{len(run.tokens)} tokens, {run.finish}"
    if comparison.first_difference is None:
        return Column([row[0].name for row in group], about, text)
    assert target is not None
    shared = first_difference(text, decode(tokenizer, target.tokens))
    about += f", another from token {comparison.first_difference + 1}"
    return Column([row[0].name for row in group], about, text[:shared], "" if shared is None else text[shared:])


EXPLAIN = Command(
    "explain",
    "[NAME]",
    "what the figures mean, and the fraction that one came to in the last runs",
    _explain,
    words=NAMES,
)
COLUMNS = Command("columns", "", "the last texts beside each other, each marked where it leaves the target's", _columns)
