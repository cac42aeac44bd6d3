"""/explain: the definitions of figures, and their values in the last runs."""

import re

from utils.commands.shared.outcomes import Outcome, ShowRows
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.glossary import FIGURES
from utils.errors import check_choice

FIGURE_NAMES = tuple(figure.name for figure in FIGURES)


def _explain(argument: str, context: CommandContext) -> Outcome:
    if not argument:
        return [ShowRows([(figure.name, figure.meaning) for figure in FIGURES])]
    figure = FIGURES[FIGURE_NAMES.index(_figure_name(argument.lower()))]
    last = context.harness.state.last
    values = [(entry.run.name, figure.fraction(entry)) for entry in last.compared] if last else []
    return [ShowRows([(figure.name, figure.meaning), *((name, value) for name, value in values if value)])]


def _figure_name(word: str) -> str:
    """The figure with this name, or the first one whose name contains the word. Raises UserError for unknown names."""
    matches = (name for name in FIGURE_NAMES if word in re.findall(r"[\w/]+", name))
    # check_choice always raises here. It adds the nearest name to the message.
    return word if word in FIGURE_NAMES else next(matches, "") or check_choice(word, FIGURE_NAMES, "figure")


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
