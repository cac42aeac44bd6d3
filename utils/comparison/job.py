"""Job: one prompt for one strategy, with everything that its decoder needs to run it."""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ngram_assisted import NGramStorage
from utils.config.settings import Settings
from utils.decode.decoding import Decoding
from utils.decode.drafts import Drafter
from utils.decode.model_session import ModelSession
from utils.decode.noise import Noise
from utils.decode.session import TargetSession
from utils.errors import UserError
from utils.logits_processor import PROCESSORS
from utils.metrics.costs import Costs
from utils.metrics.draft_trace import DraftTracer
from utils.metrics.stopwatch import Stopwatch, TimedDrafter, TimedSession
from utils.pairs.drafter_kinds import DrafterCaches, DrafterInputs
from utils.pairs.pair import Pair
from utils.pairs.request import LOADED
from utils.prompts.conversation import Turns


class SharedPrefills:
    """Sessions that have read one prompt, for many runs of it. Filled on first use."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[str, bool, tuple[int, ...]], ModelSession] = {}

    def open(self, key: tuple[str, bool, tuple[int, ...]], session: ModelSession, prompt: list[int]) -> ModelSession:
        """A copy of the session under this key. If there is none, `session` reads the prompt and is kept."""
        # The key holds `rewinds` and the features, too, since they decide what a cache must keep.
        if key not in self._sessions:
            with suppress(UserError):  # a drafter that cannot read the prompt declines by itself
                session.read(prompt)
            self._sessions[key] = session
        return self._sessions[key].fork()


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt for one strategy.

    `prompt` holds token ids, which begin with the conversation in `history`. `drafter` is a word of /drafter_kind.
    `caches` holds what drafters keep between prompts. `prefills` are shared by many runs of the same prompt.
    """

    prompt: list[int]
    pair: Pair
    settings: Settings
    storage: NGramStorage
    drafter: str = LOADED
    caches: DrafterCaches = field(default_factory=DrafterCaches)
    prefills: SharedPrefills | None = None
    history: Turns = ()
    stopwatch: Stopwatch | None = None
    tracer: DraftTracer | None = None

    @property
    def turn(self) -> int:
        """The number of this answer in its conversation, from 0."""
        return len(self.history)

    def is_same_request(self, other: "Job") -> bool:
        """Whether both jobs have the same prompt and the same noise, so that their texts can be compared."""
        # Noise is keyed by seed and turn. Jobs of one prompt share their settings, and so the seed.
        return (self.prompt, self.turn) == (other.prompt, other.turn)

    @property
    def decoding(self) -> Decoding:
        """The decoding parameters."""
        noise = Noise(self.settings.seed, self.turn)
        processor = self.settings.processor
        sampler = PROCESSORS[processor.name](*processor.arguments)
        return Decoding(sampler, self.settings.length, self.pair.end_ids, noise)

    def session(self, model: str, *, rewinds: bool = True, features: tuple[int, ...] = ()) -> ModelSession:
        """A session of the pair's "target" or "drafter" that keeps the hidden states of these layers.

        Raises UserError if its cache must be rewound but does not support it.
        """
        loaded: Any = getattr(self.pair, model)
        session = ModelSession(loaded, use_cache=self.settings.cache, rewinds=rewinds, features=features)
        return (
            session if self.prefills is None else self.prefills.open((model, rewinds, features), session, self.prompt)
        )

    def drafter_inputs(self, *, shares_noise: bool) -> DrafterInputs:
        """The inputs from which this job's drafter is built."""
        settings = self.settings
        return DrafterInputs(
            kind=self.drafter,
            pair=self.pair,
            decoding=self.decoding,
            open_session=self.session,
            storage=self.storage,
            caches=self.caches,
            costs=None if settings.gamma is not None else settings.costs or Costs(),
            use_cache=settings.cache,
            shares_noise=shares_noise,
            filler_top_k=settings.top_k_filler,
            max_text=settings.ngram_limit,
            observed=self.tracer is not None,
        )

    def observed(self, drafter: Drafter, target: TargetSession) -> tuple[Drafter, TargetSession]:
        """The drafter and the target's session under the observers."""
        # The stopwatch goes inside the tracer, so that tracing is not billed to the drafter.
        if self.stopwatch is not None:
            drafter, target = TimedDrafter(drafter, self.stopwatch), TimedSession(target, self.stopwatch)
        return drafter if self.tracer is None else self.tracer.around(drafter), target
