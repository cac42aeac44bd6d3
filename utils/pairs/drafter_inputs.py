"""The inputs from which a drafter is built for one run, and the result."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from ngram_assisted import NGramStorage, SuffixAutomaton
from sampling import AdaptiveGamma
from sampling.drafters.adaptive_gamma import ThroughputEstimate
from utils.decode.decoding import Decoding
from utils.decode.drafts import Drafter
from utils.decode.model_session import ModelSession
from utils.metrics.costs import Costs
from utils.pairs.pair import Pair


class OpenSession(Protocol):
    """Opens a session of the pair's "target" or "drafter"."""

    def __call__(self, model: str, *, rewinds: bool = True, features: tuple[int, ...] = ()) -> ModelSession: ...


@dataclass(frozen=True, slots=True)
class DrafterCaches:
    """What drafters keep between prompts, by drafter kind: layer cuts of the target and earlier texts."""

    cut_models: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, SuffixAutomaton] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrafterInputs:
    """Everything that a drafter is built from, for one run.

    `kind` is a name of the table with its number. `costs` are for adaptive gamma, or None if gamma is fixed. With
    `shares_noise`, drafts are drawn with the target's noise. `filler_top_k` is described in NGramDrafter. `max_text` is
    the maximum number of tokens of earlier texts. With `observed`, drafts carry evidence.
    """

    kind: str
    pair: Pair
    decoding: Decoding
    open_session: OpenSession
    storage: NGramStorage
    caches: DrafterCaches
    costs: Costs | None
    use_cache: bool
    shares_noise: bool
    filler_top_k: int
    max_text: int
    observed: bool

    def adaptive(
        self, kind: str | None, throughput: ThroughputEstimate | None = None, *, block: int = 1
    ) -> AdaptiveGamma | None:
        """Chooses the number of drafts for this drafter kind, or None if gamma is fixed. `block` is as in
        AdaptiveGamma.
        """
        if self.costs is None:
            return None
        max_new = self.decoding.max_new
        return AdaptiveGamma(self.costs, throughput=throughput, block=block, kind=kind or "", max_new=max_new)


class Replay(Enum):
    """How the drafts along a finished text can be obtained for every gamma at once."""

    BY_TOKEN = auto()  # a draft depends on the context alone: request one at each position, and chain them
    BY_ROUND = auto()  # request a full round at each position
    NEVER = auto()  # the number requested changes the drafts: run each gamma separately


@dataclass(frozen=True, slots=True)
class BuiltDrafter:
    """A drafter for one run, and the target's session, which keeps the hidden states that the drafter reads."""

    drafter: Drafter
    target: ModelSession
    replay: Replay = Replay.BY_ROUND
