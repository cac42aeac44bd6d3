"""The table of drafter kinds: what can draft for a loaded pair, under which name, and how each drafter is built.

Everything else follows from a row: /drafter_kind and its completion, records, costs, /whatif, and what survives /load.
A drafter is built from DrafterInputs alone; it never sees settings.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import Any

from ngram_assisted import LongestMatch, MatchDrafter, NGramDrafter, NGramStorage, SuffixAutomaton
from sampling import AdaptiveGamma, ChainDrafter, FreeHead, HeadDrafter, ModelDrafter
from sampling.drafters.cross_tokenizer import CrossTokenizerDrafter, Retokenizer
from sampling.drafters.feature_sessions import feature_session
from sampling.drafters.masked import block_session
from utils.decode.decoding import Decoding
from utils.decode.drafts import Drafter
from utils.decode.layer_cut import check_depth, first_layers
from utils.decode.model_session import ModelSession
from utils.decode.session import Session
from utils.errors import UserError
from utils.metrics.costs import Costs
from utils.models.feature_drafter import BlockDrafter, FeatureDrafter, StepwiseDrafter
from utils.pairs.pair import Pair
from utils.pairs.request import CHAIN, LAYERS, LOADED

# With a fixed gamma nothing weighs a match against the drafter, which is right more often than shorter matches are.
CHAINED_MATCH = 3


@dataclass(frozen=True, slots=True)
class DrafterCaches:
    """What drafters keep between prompts, by drafter kind: layer cuts of the target and earlier texts."""

    cut_models: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, SuffixAutomaton] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrafterInputs:
    """Everything that a drafter is built from, for one run.

    `kind` is a name of the table with its number. `open_session` opens a session of the pair's "target" or "drafter".
    `costs` are for adaptive gamma, or None if gamma is fixed. With `shares_noise`, drafts are drawn with the target's
    noise. `filler_top_k` is described in NGramDrafter. `max_text` is the maximum number of tokens of earlier texts.
    With `observed`, drafts carry evidence.
    """

    kind: str
    pair: Pair
    decoding: Decoding
    open_session: Callable[..., ModelSession]
    storage: NGramStorage
    caches: DrafterCaches
    costs: Costs | None
    use_cache: bool
    shares_noise: bool
    filler_top_k: int
    max_text: int
    observed: bool

    def adaptive(self, kind: str | None, *, block: int = 1, rival: AdaptiveGamma | None = None) -> AdaptiveGamma | None:
        """Chooses the number of drafts for this drafter kind, or None if gamma is fixed. `block` and `rival` are as in
        AdaptiveGamma.
        """
        if self.costs is None:
            return None
        return AdaptiveGamma(self.costs, block=block, kind=kind or "", max_new=self.decoding.max_new, rival=rival)

    def options(self, adaptive: AdaptiveGamma | None) -> dict[str, Any]:
        """The keywords of drafters that draw from a model's distributions."""
        return {"shares_noise": self.shares_noise, "adaptive": adaptive, "observed": self.observed}


class Replay(Enum):
    """How the drafts along a finished text can be obtained for every gamma at once."""

    BY_TOKEN = auto()  # a draft depends on the context alone: request one at each position, and chain them
    BY_ROUND = auto()  # request a full round at each position
    NEVER = auto()  # the number requested changes the drafts: run each gamma separately


@dataclass(frozen=True, slots=True)
class BuiltDrafter:
    """A drafter for one run, and the target's session, which keeps the hidden states that the drafter reads.
    `adaptive` chooses how much a loaded drafter drafts.
    """

    drafter: Drafter
    target: ModelSession
    replay: Replay = Replay.BY_ROUND
    adaptive: AdaptiveGamma | None = None


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """A row of the table.

    `name` is as in `utils.pairs.request.DRAFTERS`. `build` makes the drafter. `has_probs` is True if its drafts have a
    distribution q. `uses_loaded` is True if it needs the pair's drafter. `cuts_target` is True if it is made from the
    target's weights. `keeps_texts` is True if it drafts from earlier prompts. `parts` are the kinds that it combines,
    whose costs add up.
    """

    name: str
    build: Callable[[DrafterInputs], BuiltDrafter]
    has_probs: bool = False
    uses_loaded: bool = False
    cuts_target: bool = False
    keeps_texts: bool = False
    parts: tuple[str, ...] = ()

    def check_pair(self, pair: Pair, word: str) -> None:
        """Raise UserError if the target has too few layers for a cut."""
        if self.cuts_target and word != pair.drafter_kind:
            check_depth(pair.target, int(word.removeprefix(LAYERS)))


def _loaded(inputs: DrafterInputs) -> BuiltDrafter:
    pair = inputs.pair
    # A head has no session: it reads hidden states that the target's session must keep.
    if isinstance(pair.drafter, FeatureDrafter):
        return _head(inputs, pair.drafter)
    target = inputs.open_session("target")
    if pair.drafter_tokenizer is not None:
        adaptive = inputs.adaptive(pair.drafter_kind)
        retokenizer = Retokenizer(pair.tokenizer, pair.drafter_tokenizer)
        new_session = partial(ModelSession, pair.drafter, use_cache=inputs.use_cache)
        drafter = CrossTokenizerDrafter(new_session, retokenizer, target.vocab_size, adaptive=adaptive)
        # Text is tokenized again for every draft, so drafts depend on the requested number.
        return BuiltDrafter(drafter, target, Replay.NEVER, adaptive)
    own = inputs.open_session("drafter")
    session, block = block_session(own, pair.target)
    built = _model(inputs, session, target, inputs.adaptive(pair.drafter_kind, block=block), block=block)
    # A PARD model's draft depends on its position in the round, so drafts cannot be chained token by token.
    return built if session is own else replace(built, replay=Replay.BY_ROUND)


def _head(inputs: DrafterInputs, model: FeatureDrafter) -> BuiltDrafter:
    session, target = feature_session(model), inputs.open_session("target", features=model.feature_layers)
    adaptive = inputs.adaptive(inputs.pair.drafter_kind, block=session.block_size)
    drafter = HeadDrafter(
        session,
        inputs.decoding,
        target.vocab_size,
        # A session that shares a prefill already has the prompt's features; otherwise this is None.
        prefilled=target.take_features(),
        not_needed=target.keep_no_features,
        **inputs.options(adaptive),
    )
    return BuiltDrafter(drafter, target, adaptive=adaptive)


def _cut(inputs: DrafterInputs) -> BuiltDrafter:
    """The target's own first layers. The cut is cached."""
    if inputs.kind == inputs.pair.drafter_kind:
        return _loaded(inputs)
    cuts = inputs.caches.cut_models
    if inputs.kind not in cuts:
        cuts[inputs.kind] = first_layers(inputs.pair.target, int(inputs.kind.removeprefix(LAYERS)))
    session = ModelSession(cuts[inputs.kind], use_cache=inputs.use_cache)
    return _model(inputs, session, inputs.open_session("target"), inputs.adaptive(inputs.kind))


def _model(
    inputs: DrafterInputs, session: Session, target: ModelSession, adaptive: AdaptiveGamma | None, *, block: int = 1
) -> BuiltDrafter:
    drafter = ModelDrafter(session, inputs.decoding, target.vocab_size, block=block, **inputs.options(adaptive))
    return BuiltDrafter(drafter, target, Replay.BY_TOKEN, adaptive)


def _lookup(inputs: DrafterInputs) -> BuiltDrafter:
    """Prompt lookup: this prompt and its answer only."""
    drafter = MatchDrafter(LongestMatch(), adaptive=inputs.adaptive("lookup"), observed=inputs.observed)
    return BuiltDrafter(drafter, inputs.open_session("target"))


def _suffix_drafter(inputs: DrafterInputs, *, shortest: int = 1, rival: AdaptiveGamma | None = None) -> MatchDrafter:
    texts = inputs.caches.texts
    # An automaton cannot forget its oldest text, so a too large one is replaced by an empty one.
    if inputs.kind not in texts or texts[inputs.kind].size > inputs.max_text:
        texts[inputs.kind] = SuffixAutomaton()
    adaptive = inputs.adaptive("suffix", rival=rival)
    return MatchDrafter(texts[inputs.kind], shortest=shortest, adaptive=adaptive, observed=inputs.observed)


def _chain(inputs: DrafterInputs) -> BuiltDrafter:
    second = _loaded(inputs)
    kinds = ("suffix", inputs.pair.drafter_kind or "")
    shortest = CHAINED_MATCH if inputs.costs is None else 1
    first = _suffix_drafter(inputs, shortest=shortest, rival=second.adaptive)
    drafter = ChainDrafter(first, second.drafter, kinds=kinds)
    # One of them is chosen once per round, so drafts cannot be chained token by token.
    replay = Replay.NEVER if second.replay is Replay.NEVER else Replay.BY_ROUND
    return BuiltDrafter(drafter, second.target, replay)


def _storage(inputs: DrafterInputs) -> BuiltDrafter:
    target = inputs.open_session("target")
    drafter = NGramDrafter(
        inputs.storage,
        inputs.decoding.noise,
        filler_top_k=inputs.filler_top_k,
        vocab_size=target.vocab_size,
        adaptive=inputs.adaptive("ngram"),
        observed=inputs.observed,
    )
    return BuiltDrafter(drafter, target)


NO_DRAFTS = DrafterKind("", _loaded)  # of strategies that do not draft, and never build it
NGRAM = DrafterKind("ngram", _storage, keeps_texts=True)  # for n-gram assisted decoding, a separate strategy
DRAFTER_KINDS = (
    DrafterKind(LOADED, _loaded, has_probs=True, uses_loaded=True),
    DrafterKind(f"{LAYERS}K", _cut, has_probs=True, cuts_target=True),
    DrafterKind("lookup", _lookup),
    DrafterKind(
        "suffix", lambda inputs: BuiltDrafter(_suffix_drafter(inputs), inputs.open_session("target")), keeps_texts=True
    ),
    DrafterKind(CHAIN, _chain, has_probs=True, uses_loaded=True, keeps_texts=True, parts=("suffix", LOADED)),
)


def drafter_kind(word: str) -> DrafterKind:
    """The kind with this word of /drafter_kind, which the value type of the setting has checked, or "ngram"."""
    name = f"{LAYERS}K" if word.startswith(LAYERS) else word
    return next(kind for kind in (*DRAFTER_KINDS, NGRAM) if kind.name == name)


def drafter_label(word: str, pair: Pair) -> str | None:
    """The drafter kind of a word of /drafter_kind for this pair, as in tables, records and costs."""
    return pair.drafter_kind if word == LOADED else word


def surviving_kinds(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of /drafter_kind that still make sense after loading another pair, or the default."""
    return tuple(word for word in words if not drafter_kind(word).cuts_target) or (CHAIN,)


def drafter_alone(inputs: DrafterInputs) -> Session:
    """A session in which the loaded drafter decodes alone.

    Raises UserError if its output cannot be compared with the target's.
    """
    pair = inputs.pair
    if isinstance(pair.drafter, BlockDrafter):
        raise UserError("The drafter cannot run alone: it drafts blocks after hidden states of the target.")
    if isinstance(pair.drafter, StepwiseDrafter):
        return FreeHead(pair.drafter, pair.target, use_cache=inputs.use_cache, grammar=inputs.decoding.grammar)
    if pair.drafter_tokenizer is not None:
        raise UserError("The drafter cannot run alone: its tokenizer differs from the target's.")
    return inputs.open_session("drafter", rewinds=False)
