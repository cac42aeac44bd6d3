"""Strategy: one row of the comparison table, and what a row is given to run.

The table itself is in infer.py, which alone sees all decoders. Run order, toggles, colours and columns come from the rows, so a new
strategy is one row.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from utils.bounds import LOADED
from utils.config.settings import Settings
from utils.decode.decoding import Decoding
from utils.decode.model_session import ModelSession
from utils.decode.noise import Noise
from utils.decode.steps import Step
from utils.errors import UserError
from utils.logits_processor import GreedyProcessor
from utils.metrics.draft_trace import Notebook, NotedDrafter
from utils.metrics.stopwatch import Stopwatch, TimedDrafter, TimedSession
from utils.prompts.conversation import Turns


@dataclass(frozen=True, slots=True)
class Kept:
    """What drafters keep from one prompt to the next, by their kind. models: cut out of the target. texts: what was said."""

    models: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt for one strategy: its ids, the models (utils.pairs.load_pair.Pair), the settings of the moment, the n-gram storage.

    drafter: the kind of drafter, a word of /drafter_kind. kept: what drafters keep between prompts. read: where many runs of one prompt
    share what its prefill computed: the sessions that have read it, filled as they are asked for. stopwatch: what the run is timed by.
    notebook: what takes notes of its drafts. history: the conversation that the prompt ids begin with.
    """

    prompt: list[int]
    pair: Any
    settings: Settings
    storage: Any
    drafter: str = LOADED
    kept: Kept = field(default_factory=Kept)
    read: dict[tuple[str, bool, tuple[int, ...]], ModelSession] | None = None
    stopwatch: Stopwatch | None = None
    notebook: Notebook | None = None
    history: Turns = ()

    @property
    def turn(self) -> int:
        """Which answer of its conversation this is, from 0."""
        return len(self.history)

    def is_like(self, other: "Job") -> bool:
        """Whether both ask the same with the same noise, so that their texts can be compared."""
        return (self.prompt, self.turn) == (other.prompt, other.turn)

    @property
    def decoding(self) -> Decoding:
        """What to draw from, with which noise, and when to stop."""
        return Decoding(
            self.settings.processor, self.settings.length, self.pair.end_ids, Noise(self.settings.seed, self.turn)
        )

    def session(self, model: str, *, rewinds: bool = True, features: tuple[int, ...] = ()) -> ModelSession:
        """A session of its own over the pair's "target" or "drafter", which keeps the hidden states that `features` names.

        Raises UserError where its cache must be rewound and cannot be.
        """
        key = (model, rewinds, features)
        if self.read is not None and key in self.read:
            return self.read[key].fork()
        session = ModelSession(
            getattr(self.pair, model), use_cache=self.settings.cache, rewinds=rewinds, features=features
        )
        if self.read is None:
            return session
        with suppress(UserError):  # a drafter that cannot read the prompt declines by itself
            session.read(self.prompt)
        self.read[key] = session
        return session.fork()

    def watched(self, drafter: Any, target: Any) -> tuple[Any, Any]:
        """Both under the stopwatch, and the drafter under the notebook, where there are such."""
        if self.stopwatch is not None:
            drafter, target = TimedDrafter(drafter, self.stopwatch), TimedSession(target, self.stopwatch)
        return drafter if self.notebook is None else NotedDrafter(drafter, self.notebook), target


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """A row of the table of drafters. pattern: of its word in /drafter_kind. make: a drafter and the target's session, for a rule.

    own_law: whether its drafts have a law of their own. loads: whether it needs the drafter that was loaded with the pair. parts: the
    words of what it is made of.
    """

    pattern: str
    make: Callable[[Job, Any], tuple[Any, ModelSession]]
    own_law: bool
    loads: bool = False
    parts: tuple[str, ...] = ()


def drafter_label(word: str, pair: Any) -> str | None:
    """What a word of /drafter_kind comes to with this pair."""
    return pair.drafter_kind if word == LOADED else word


def kind_of(word: str, kinds: Sequence[DrafterKind]) -> DrafterKind:
    """The row of a word."""
    return next(kind for kind in kinds if re.fullmatch(kind.pattern, word))


@dataclass(frozen=True, slots=True)
class Strategy:
    """name: as in the JSON records. toggle: the Settings field that turns it on. steps: its decoder, models and all.

    drafter_kind: what drafts, as the records say it; given the pair, since it may depend on the loaded drafter. drafts: whether it
    drafts; draft_law: whether its drafts have a law of their own, so that p/q rules judge them. uses_target and needs_drafter: which
    models it runs. draws: whether it draws its tokens, one by one, from a law. kinds: the drafters that can draft
    for it; words: the one that does, or what that is made of. make: where it drafts, its drafter and the target's session, for a rule.
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
    kinds: "Sequence[DrafterKind]" = ()
    words: tuple[str, ...] = (LOADED,)
    make: Callable[[Job, Any], tuple[Any, ModelSession]] | None = None

    @property
    def is_baseline(self) -> bool:
        """Whether the others are compared with it."""
        return self.name == "target"

    @property
    def keeps_texts(self) -> bool:
        """Whether it drafts from a storage, or from texts, that may be kept between prompts."""
        return self.drafts and (not self.kinds or "suffix" in self.words)

    @property
    def lossless(self) -> bool:
        """Whether its text follows exactly the target's law."""
        return self.uses_target and self.draws

    def repeats_target(self, settings: Settings) -> bool:
        """Whether its text must be the target's very own: it depends on no draft, and rounds are what the target's text makes them."""
        greedy = isinstance(settings.processor, GreedyProcessor) or getattr(settings.processor, "temperature", 1) == 0
        return self.lossless and (settings.verify == "coupled" or not self.draft_law or greedy)

    def variants(self, words: Sequence[str], pair: Any) -> "list[Strategy]":
        """Itself, or where drafters of several kinds can draft for it one for each word of /drafter_kind.

        Raises UserError for a kind that this pair has not got.
        """
        if not self.kinds:
            return [self]
        by_label = {
            drafter_label(word, pair): word for word in reversed(words)
        }  # the loaded one may have been named twice
        return [self._with_drafter(word, pair, alone=len(by_label) == 1) for word in words if word in by_label.values()]

    def _with_drafter(self, word: str, pair: Any, *, alone: bool) -> "Strategy":
        kind, label = kind_of(word, self.kinds), drafter_label(word, pair)
        if pair.drafter is not None and word in ("model", "head") and word != pair.drafter_kind:
            raise UserError(
                f"The drafter that is loaded is {pair.drafter_kind}, not {word}: start with another --drafter."
            )
        return replace(
            self,
            name=self.name if alone else f"{self.name} {label}",
            title=self.title if word == LOADED and alone else f"{self.title}, {label}",
            steps=lambda job: self.steps(replace(job, drafter=word)),
            words=kind.parts or (word,),
            make=lambda job, rule: kind.make(replace(job, drafter=word), rule),
            drafter_kind=lambda pair: label,
            draft_law=kind.own_law,
            needs_drafter=kind.loads,
        )

    def is_on(self, settings: Settings) -> bool:
        """Whether the settings ask for this strategy."""
        return bool(getattr(settings, self.toggle))
