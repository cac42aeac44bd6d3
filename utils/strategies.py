"""Strategy: one row of the comparison table, and what a row is given to run.

The table itself is in infer.py, which alone sees all decoders. Run order, toggles, colours and columns come from the rows, so a new
strategy is one row.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from utils.caching import ModelSession
from utils.decoding import Decoding
from utils.errors import UserError
from utils.events import Step
from utils.seeding import Noise
from utils.settings import Settings


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt for one strategy: its ids, the models (utils.models.loading.Pair), the settings of the moment, the n-gram storage.

    read: where many runs of one prompt share what its prefill computed: the sessions that have read it, filled as they are asked for.
    """

    prompt: list[int]
    pair: Any
    settings: Settings
    storage: Any
    read: dict[tuple[str, bool, tuple[int, ...]], ModelSession] | None = None

    @property
    def decoding(self) -> Decoding:
        """What to draw from, with which noise, and when to stop."""
        return Decoding(self.settings.processor, self.settings.length, self.pair.end_ids, Noise(self.settings.seed))

    def session(self, model: str, *, rewinds: bool = True, features: tuple[int, ...] = ()) -> ModelSession:
        """A session of its own over the pair's "target" or "drafter", which keeps the hidden states that `features` names.

        Raises UserError where its cache must be rewound and cannot be.
        """
        key = (model, rewinds, features)
        if self.read is not None and key in self.read:
            return self.read[key].fork()
        session = ModelSession(getattr(self.pair, model), use_cache=self.settings.cache, rewinds=rewinds, features=features)
        if self.read is None:
            return session
        with suppress(UserError):  # a drafter that cannot read the prompt declines by itself
            session.read(self.prompt)
        self.read[key] = session
        return session.fork()


@dataclass(frozen=True, slots=True)
class Strategy:
    """name: as in the JSON records. toggle: the Settings field that turns it on. steps: its decoder, models and all.

    drafter_kind: what drafts, as the records say it; given the pair, since it may depend on the loaded drafter. drafts: whether it
    drafts; draft_law: whether its drafts have a law of their own, so that p/q rules judge them. uses_target and needs_drafter: which
    models it runs. draws: whether it draws its tokens, one by one, from a law.
    """

    name: str
    title: str
    colour: str
    toggle: str
    steps: Callable[[Job], Iterator[Step]]
    drafter_kind: Callable[[Any], str | None] = lambda pair: None
    drafts: bool = False
    draft_law: bool = False
    uses_target: bool = True
    needs_drafter: bool = False
    draws: bool = True

    @property
    def is_baseline(self) -> bool:
        """Whether the others are compared with it."""
        return self.name == "target"

    @property
    def lossless(self) -> bool:
        """Whether its text follows exactly the target's law."""
        return self.uses_target and self.draws

    def is_on(self, settings: Settings) -> bool:
        """Whether the settings ask for this strategy."""
        return bool(getattr(settings, self.toggle))
