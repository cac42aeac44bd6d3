"""What /verdict can recommend: a drafter kind with a draft length, and the settings for measuring it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from utils.comparison.harness import Harness
from utils.comparison.strategies import Strategy
from utils.comparison.warm_up import with_costs
from utils.config.settings import Settings
from utils.errors import UserError
from utils.pairs.pair import Pair
from utils.pairs.request import HEAD, LAYERS, LOADED, MODEL
from utils.text import first_of

NAMES = {
    MODEL: "the drafter model",
    HEAD: "the head",
    "lookup": "prompt lookup",
    "suffix": "suffix matching",
    "chain": "suffix matching chained with the drafter",
    "ngram": "n-gram assisted decoding",
}
FIXED_GAMMA_PENALTY = 0.05
WITHOUT_DRAFTER = ("lookup", "suffix")
# Most users want to know about the loaded drafter. A chain comes last, because its replay takes the longest.
ORDER = (LOADED, MODEL, HEAD, "ngram", "lookup", "suffix")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy with a draft length, where None is adaptive. `predicted` is its speed-up in the replay of the tuning
    prompts.
    """

    strategy: Strategy
    gamma: int | None
    predicted: float

    def label(self, pair: Pair) -> str:
        """The candidate in sentences."""
        return f"{kind_name(self.strategy, pair)} with /gamma {self.gamma_text}"

    def short_label(self, pair: Pair) -> str:
        """The candidate in tables and progress lines."""
        return f"{self.strategy.drafter_label(pair)}, gamma {self.gamma_text}"

    @property
    def gamma_text(self) -> str:
        return "auto" if self.gamma is None else str(self.gamma)

    def settings(self, settings: Settings, length: int) -> Settings:
        """The settings of its runs."""
        return replace(settings, gamma=self.gamma, length=length)

    @property
    def changes(self) -> Mapping[str, Any]:
        """The fields of Settings that make a session use it."""
        if not self.strategy.chooses_kind:
            return {"ngram": True, "speculative": False, "gamma": self.gamma}
        return {"speculative": True, "ngram": False, "drafter_kind": (self.strategy.word,), "gamma": self.gamma}

    def is_used_by(self, settings: Settings) -> bool:
        """Whether a session with these settings already uses it, possibly beside other strategies."""
        return all(getattr(settings, name) == value for name, value in self.changes.items() if value is not False)

    def commands(self, settings: Settings) -> tuple[str, ...]:
        """The commands that make a session with these settings use it."""
        if not self.strategy.chooses_kind:
            return "/ngram on", f"/gamma {self.gamma_text}"
        turned_on = () if settings.speculative else ("/speculative on",)
        return *turned_on, f"/drafter_kind {self.strategy.word}", f"/gamma {self.gamma_text}"

    def figures(self, pair: Pair) -> dict[str, Any]:
        """The candidate in the JSON record."""
        return {
            "drafter_kind": self.strategy.drafter_label(pair),
            "gamma": self.gamma,
            "predicted_speedup": self.predicted,
        }


def kind_name(strategy: Strategy, pair: Pair) -> str:
    """A drafter kind in words."""
    label = strategy.drafter_label(pair) or strategy.name
    if label.startswith(LAYERS):
        return f"the target's {first_of(int(label.removeprefix(LAYERS)), 'layer')}"
    loaded = f"the {label} drafter" if label == pair.drafter_kind else label  # a published format, such as EAGLE-3
    return NAMES.get(label, loaded)


def drafting_strategies(harness: Harness, settings: Settings) -> tuple[list[Strategy], Settings, dict[str, list[str]]]:
    """The strategies that can draft here, the settings with all their costs, and the reasons why others cannot draft.

    Unknown costs are measured.
    """
    loaded = () if harness.pair.drafter is None else (LOADED, "chain")
    known: list[str] = []
    problems: dict[str, list[str]] = {}
    for word in dict.fromkeys((*loaded, *settings.drafter_kind, *WITHOUT_DRAFTER)):
        if word == LOADED and not loaded:
            continue
        try:
            settings = with_costs(harness, replace(settings, drafter_kind=(word,)))
        except UserError as error:
            problems.setdefault(str(error), []).append(word)
        else:
            known.append(word)
    settings = replace(settings, drafter_kind=tuple(known))
    drafting = [strategy for strategy in harness.runnable(settings) if strategy.drafts]
    return sorted(drafting, key=_order), settings, problems


def _order(strategy: Strategy) -> int:
    return ORDER.index(strategy.word) if strategy.word in ORDER else len(ORDER) + (strategy.word == "chain")


def best_of_each(candidates: Sequence[Candidate], pair: Pair) -> list[Candidate]:
    """The best candidate of each drafter kind, the best kind first."""
    best: dict[str, Candidate] = {}
    for candidate in candidates:
        kind = str(candidate.strategy.drafter_label(pair))
        if kind not in best or _preference(candidate) > _preference(best[kind]):
            best[kind] = candidate
    return sorted(best.values(), key=_preference, reverse=True)


def _preference(candidate: Candidate) -> float:
    """The predicted speed-up. A fixed gamma is the best of sixteen on a few prompts, so it is penalized."""
    return candidate.predicted * (1.0 if candidate.gamma is None else 1 - FIXED_GAMMA_PENALTY)
