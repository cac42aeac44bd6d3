"""/explain and the first part of /texts: the definitions and values of figures, and the last texts side by side."""

import re
from collections.abc import Sequence

from utils.commands.outcomes import Outcome, ShowRows, ShowTexts
from utils.commands.registry import Command, CommandContext, Page
from utils.comparison.glossary import FIGURES
from utils.comparison.last_prompt import ComparedRun, LastPrompt
from utils.comparison.reports import Column
from utils.comparison.server_columns import server_columns
from utils.errors import UserError, check_choice
from utils.metrics.results import first_difference
from utils.text import count_of, decode

FIGURE_NAMES = tuple(figure.name for figure in FIGURES)


def _explain(argument: str, context: CommandContext) -> Outcome:
    if not argument:
        return [ShowRows([(figure.name, figure.meaning) for figure in FIGURES])]
    figure = FIGURES[FIGURE_NAMES.index(_figure_name(argument.lower()))]
    last = context.harness.state.last
    values = [(compared.strategy.name, figure.fraction(*compared)) for compared in last.compared] if last else []
    return [ShowRows([(figure.name, figure.meaning), *((name, value) for name, value in values if value)])]


def _figure_name(word: str) -> str:
    """The figure with this name, or the first one whose name contains the word. Raises UserError if there is none."""
    matches = (name for name in FIGURE_NAMES if word in re.findall(r"[\w/]+", name))
    # check_choice raises here, since the word is not a name; it adds the nearest one to the message.
    return word if word in FIGURE_NAMES else next(matches, "") or check_choice(word, FIGURE_NAMES, "figure")


def _columns(argument: str, context: CommandContext) -> Outcome:
    servers = context.harness.state.last_servers
    on_servers = [] if servers is None else server_columns(servers.compared)
    if on_servers and context.harness.state.last is None:
        return [ShowTexts(on_servers)]
    last = context.harness.last()
    if not last.compared and not on_servers:
        raise UserError("no strategy answered the last prompt: send it again.")
    groups: dict[tuple[int, ...], list[ComparedRun]] = {}
    for compared in sorted(last.compared, key=lambda compared: not compared.strategy.is_baseline):  # the target first
        groups.setdefault(tuple(compared.run.tokens), []).append(compared)
    return [ShowTexts([*(_column(last, group) for group in groups.values()), *on_servers])]


def _column(last: LastPrompt, group: Sequence[ComparedRun]) -> Column:
    """The column of strategies that generated the same tokens."""
    _, run, comparison = group[0]
    names = [strategy.name for strategy, *_ in group]
    tokenizer, target = last.job.pair.tokenizer, last.target
    text = decode(tokenizer, run.tokens)
    about = f"{count_of(len(run.tokens), 'token')}, {run.finish}"
    if comparison.first_difference is None:
        return Column(names, about, text)
    assert target is not None
    # In characters: a token may begin with characters that both texts share.
    shared = first_difference(text, decode(tokenizer, target.tokens))
    about += f", differs from token {comparison.first_difference + 1}"
    return Column(names, about, text[:shared], "" if shared is None else text[shared:])


EXPLAIN = Command(
    "explain",
    "[FIGURE]",
    "what a figure means, and its fraction",
    _explain,
    group="results",
    rank=2,
    page=Page(
        "The definitions of all figures on the screen, or the definition of one and its value in the last runs.",
        ("> /explain acceptance", "acceptance    accepted drafts / drafts, ...", "speculative   22/35 = 0.629"),
        see_also=("texts", "why"),
    ),
    words=FIGURE_NAMES,
    meanings={figure.name: figure.meaning for figure in FIGURES},
)
COLUMNS = Command(
    "columns",
    "",
    "the last texts side by side",
    _columns,
    page=Page("The last texts side by side.", ("> /columns",)),
    instead="texts",
)
