"""How the text of a run relates to texts on the screen: equal, or different from some token on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from utils.comparison.strategies import Strategy
from utils.metrics.results import Generation, first_difference

CONTEXT = 32  # characters before a difference that are shown with it

EarlierRun = tuple[Strategy, Generation]


@dataclass(frozen=True, slots=True)
class TextRelation:
    """How a run's text relates to that of `other`. `first` is True if that was the first text on the screen.

    `position` is the 0-based index of the first token that differs, or None. `ours` and `theirs` are the numbers of
    tokens.
    """

    other: EarlierRun
    first: bool
    position: int | None
    ours: int
    theirs: int

    def sentence(self) -> str:
        """The relation in words, to be shown after the run's name. It ends in a colon if a text follows."""
        name = "" if self.first else f" {self.other[0].name}"
        if self.position is None:
            return f"= same text{' as' if name else ''}{name}"
        if self.position == self.ours:
            return f"the same{' as' if name else ''}{name} up to token {self.ours}, where it ends"
        if self.position == self.theirs:
            return f"the same{' as' if name else ''}{name}, and longer from token {self.position + 1}:"
        return f"differs{' from' if name else ''}{name} from token {self.position + 1}:"


def relation(run: Generation, earlier: Sequence[EarlierRun]) -> TextRelation:
    """Compare a run with one that has the same tokens, or else with the target's, or else with the first.

    `earlier` has at least one run; their texts are on the screen.
    """
    ours = run.tokens
    # The target's text comes first, because the other texts should equal it.
    candidates = sorted(earlier, key=lambda entry: not entry[0].is_baseline)
    other = next((entry for entry in candidates if entry[1].tokens == ours), None)
    if other is None:
        other = candidates[0] if candidates[0][0].is_baseline else earlier[0]
    theirs = other[1].tokens
    return TextRelation(other, other is earlier[0], first_difference(ours, theirs), len(ours), len(theirs))


def start_of_difference(ours: str, theirs: str) -> int:
    """The index of the first character that differs."""
    start = first_difference(ours, theirs)
    return len(ours) if start is None else start


def start_of_context(text: str, difference: int) -> int:
    """The index from which a few words of the line before a difference are shown."""
    start = max(0, difference - CONTEXT, text.rfind("\n", 0, difference) + 1)
    # Start at a word, unless the word fills the whole context.
    if 0 < start < difference and not text[start - 1].isspace():
        blank = text.find(" ", start, difference)
        start = start if blank < 0 else blank + 1
    return start


def text_figures(compared: Iterable[tuple[int, bool | None]]) -> dict[str, Any]:
    """The number of prompts with the baseline's text in every repeat, and the numbers of the others.

    `compared` has the number of each prompt and whether its texts are equal, or None if they were not compared.
    """
    same: dict[int, bool] = {}
    for number, is_same in compared:
        if is_same is not None:
            same[number] = is_same and same.get(number, True)
    return {
        "compared_texts": len(same),
        "same_texts": sum(same.values()),
        "other_texts_at_prompts": [number for number, is_same in same.items() if not is_same],
    }
