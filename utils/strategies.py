"""Strategy: one row of the comparison table, and what a row is given to run.

The table itself is in infer.py, which alone sees all decoders. Run order, toggles, colours and columns come from the rows, so a new
strategy is one row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from utils.caching import ModelSession
from utils.events import Step
from utils.settings import Settings


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt for one strategy: its ids, the models (utils.models.loading.Pair), the settings of the moment, the n-gram storage."""

    prompt: list[int]
    pair: Any
    settings: Settings
    storage: Any

    def session(self, model: str, *, rewinds: bool = True) -> ModelSession:
        """A fresh session over the pair's "target" or "drafter". Raises UserError where its cache cannot be rewound and must be."""
        return ModelSession(getattr(self.pair, model), use_cache=self.settings.cache, rewinds=rewinds)


@dataclass(frozen=True, slots=True)
class Strategy:
    """name: as in the JSON records. toggle: the Settings field that turns it on. steps: its decoder, models and all.

    drafter_kind: what drafts, as the records say it; given the pair, since it may depend on the loaded drafter. uses_target and
    needs_drafter: which models it runs.
    """

    name: str
    title: str
    colour: str
    toggle: str
    steps: Callable[[Job], Iterator[Step]]
    drafter_kind: Callable[[Any], str | None] = lambda pair: None
    drafts: bool = False
    uses_target: bool = True
    needs_drafter: bool = False

    def is_on(self, settings: Settings) -> bool:
        """Whether the settings ask for this strategy."""
        return bool(getattr(settings, self.toggle))
