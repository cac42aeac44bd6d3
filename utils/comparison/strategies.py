"""The table of strategies. Run order, toggles, colours, columns and comparison follow from its rows.

A new strategy is one row: a name, the setting that turns it on, and a function from a Job to Steps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ngram_assisted import NGramStorage
from sampling import RULES, BeamWidth, autoregressive_steps, beam_search_steps, speculative_steps
from utils.config.settings import Settings
from utils.decode.decoding import Decoding
from utils.decode.drafts import Drafter
from utils.decode.grammar import Grammar, grammar_of
from utils.decode.model_session import ModelSession
from utils.decode.noise import Noise
from utils.decode.session import TargetSession
from utils.decode.steps import Step
from utils.errors import UserError
from utils.logits_processor import PROCESSORS
from utils.metrics.costs import Costs
from utils.metrics.results import DraftTracer, Stopwatch, TimedDrafter, TimedSession
from utils.pairs.drafter_kinds import (
    NGRAM,
    NO_DRAFTS,
    BuiltDrafter,
    DrafterCaches,
    DrafterInputs,
    DrafterKind,
    drafter_alone,
    drafter_kind,
    drafter_label,
)
from utils.pairs.pair import Pair
from utils.pairs.request import CHAIN, LOADED
from utils.prompts.conversation import Turns
from utils.prompts.request_fields import grammar_text
from utils.servers.address import TARGET

# Sessions that have read one prompt, for many runs of it, by model, `rewinds` and features, which decide what a cache
# must keep. Filled on first use.
SharedPrefills = dict[tuple[str, bool, tuple[int, ...]], ModelSession]


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt for one strategy.

    `prompt` begins with the conversation in `history`. `drafter` is a word of /drafter_kind. `prefills` are shared by
    many runs of the same prompt. A `tracer` needs a `stopwatch`.
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
        noise = Noise(self.settings.seed, self.turn)
        processor = self.settings.processor
        sampler = PROCESSORS[processor.name](*processor.arguments)
        return Decoding(sampler, self.settings.length, self.pair.end_ids, noise, self.grammar())

    def grammar(self) -> Grammar | None:
        """The grammar of the response format, if any. Raises UserError if it cannot be followed here."""
        text = grammar_text(self.settings.request) if self.settings.uses_chat else ""
        return grammar_of(text, self.pair.tokenizer, self.pair.end_ids) if text else None

    def session(self, model: str, *, rewinds: bool = True, features: tuple[int, ...] = ()) -> ModelSession:
        """A session of the pair's "target" or "drafter" that keeps the hidden states of these layers.

        Raises UserError if its cache must be rewound but does not support it.
        """
        loaded: Any = getattr(self.pair, model)
        session = ModelSession(loaded, use_cache=self.settings.cache, rewinds=rewinds, features=features)
        if self.prefills is not None:
            if (key := (model, rewinds, features)) not in self.prefills:
                with suppress(UserError):  # a drafter that cannot read the prompt declines by itself
                    session.read(self.prompt)
                self.prefills[key] = session
            session = self.prefills[key].fork()
        # The logits of a model that drafts are masked by its drafter.
        session.grammar = self.grammar() if model == "target" or not rewinds else None
        return session

    def build_drafter(self) -> BuiltDrafter:
        """The drafter for one run, and the target's session. Raises UserError if the pair does not support it."""
        return drafter_kind(self.drafter).build(self.drafter_inputs())

    def drafter_inputs(self) -> DrafterInputs:
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
            shares_noise=RULES[settings.verify].shares_noise,
            filler_top_k=settings.top_k_filler,
            max_text=settings.ngram_limit,
            observed=self.tracer is not None,
        )

    def observed(self, drafter: Drafter, target: TargetSession) -> tuple[Drafter, TargetSession]:
        if self.stopwatch is None:
            return drafter, target
        return TimedDrafter(drafter, self.stopwatch, self.tracer), TimedSession(target, self.stopwatch)


def is_greedy(settings: Settings) -> bool:
    """Whether the processor always chooses the token with the highest logit."""
    return settings.processor.effective_temperature == 0


@dataclass(frozen=True, slots=True)
class Strategy:
    """A row of the table.

    `toggle` is the setting that enables it. `kind` is the drafter kind, and `word` its name in /drafter_kind, if there
    is one; `chooses_kind` is True if that setting applies. `uses_target` is False if it runs the drafter alone.
    `samples` is True if its tokens are drawn one by one from the processed distribution. `baseline` names what its runs
    are compared with.
    """

    name: str
    title: str
    colour: str
    toggle: str
    steps: Callable[[Job], Iterator[Step]]
    kind: DrafterKind = NO_DRAFTS
    word: str = ""
    chooses_kind: bool = False
    uses_target: bool = True
    samples: bool = True
    baseline: str = TARGET

    @property
    def drafts(self) -> bool:
        return self.kind is not NO_DRAFTS

    @property
    def needs_drafter(self) -> bool:
        """Whether it runs only with a loaded drafter."""
        return not self.uses_target or self.kind.uses_loaded

    @property
    def is_baseline(self) -> bool:
        return self.name == TARGET

    @property
    def lossless(self) -> bool:
        """Whether its text follows exactly the target's distribution."""
        return self.uses_target and self.samples

    def drafter_label(self, pair: Pair) -> str | None:
        """The drafter kind in records and costs, or None if there is no drafter."""
        return drafter_label(self.word, pair) if self.word else None

    def repeats_target(self, settings: Settings) -> bool:
        """Whether its text must be identical to the target's. Then rounds and acceptance follow from that text."""
        # With shared noise, the one-hot rule or greedy decoding, the target's own draw decides every token.
        return self.lossless and (settings.verify == "coupled" or not self.kind.has_probs or is_greedy(settings))

    def variants(self, words: Sequence[str], pair: Pair) -> list["Strategy"]:
        """A variant for each word of /drafter_kind, if that applies. Raises UserError for a kind that is not here."""
        if not self.chooses_kind:
            return [self]
        # The loaded drafter may be listed twice, as "loaded" and by its kind. The first word wins.
        by_label = {drafter_label(word, pair): word for word in reversed(words)}
        return [self._variant(word, pair, alone=len(by_label) == 1) for word in words if word in by_label.values()]

    def _variant(self, word: str, pair: Pair, *, alone: bool) -> "Strategy":
        kind, label = drafter_kind(word), drafter_label(word, pair)
        kind.check_pair(pair, word)
        return replace(
            self,
            name=self.name if alone else f"{self.name} {label}",
            title=self.title if word in (LOADED, CHAIN) and alone else f"{self.title}, {label}",
            steps=lambda job: self.steps(replace(job, drafter=word)),
            kind=kind,
            word=word,
        )


def _drafted(job: Job) -> Iterator[Step]:
    """Rounds with drafts of the job's kind."""
    built, rule = job.build_drafter(), RULES[job.settings.verify]
    drafter, target = job.observed(built.drafter, built.target)
    yield from speculative_steps(job.prompt, drafter, target, job.decoding, gamma=job.settings.max_drafts, rule=rule)


def _target(job: Job) -> Iterator[Step]:
    yield from autoregressive_steps(job.prompt, job.session("target", rewinds=False), job.decoding)


def _drafter(job: Job) -> Iterator[Step]:
    yield from autoregressive_steps(job.prompt, drafter_alone(job.drafter_inputs()), job.decoding)


def _beam(job: Job) -> Iterator[Step]:
    session = job.session("target", rewinds=False)
    yield from beam_search_steps(job.prompt, session, job.decoding, BeamWidth(num_beams=job.settings.beams))


STRATEGIES = (
    Strategy(
        name="speculative",
        title="Speculative",
        colour="magenta",
        toggle="speculative",
        steps=_drafted,
        kind=drafter_kind(LOADED),
        word=LOADED,
        chooses_kind=True,
    ),
    Strategy(
        name="ngram",
        title="N-gram assisted (NASD)",
        colour="yellow",
        toggle="ngram",
        steps=lambda job: _drafted(replace(job, drafter=NGRAM.name)),
        kind=NGRAM,
        word=NGRAM.name,
    ),
    Strategy(name=TARGET, title="Target only", colour="cyan", toggle="target", steps=_target),
    Strategy(
        name="drafter",
        title="Drafter only",
        colour="green",
        toggle="drafter",
        steps=_drafter,
        word=LOADED,
        uses_target=False,
    ),
    Strategy(name="beam", title="Beam search", colour="blue", toggle="beams", steps=_beam, samples=False),
)
