"""A loaded pair: a target, its drafter, whether the two fit together, and what is known about their weights.

Vocabularies are compared id by id, context lengths, sizes and caches as a whole. The target verifies every draft, so
an unsuitable drafter never changes the text. It only makes drafts useless, so the program reports it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from utils.decode.model_info import context_length
from utils.decode.model_session import ModelSession
from utils.engine import Engine
from utils.engine.weight_format import tensor_bytes
from utils.errors import UserError
from utils.models.feature_drafter import FeatureDrafter
from utils.pairs.request import PairRequest
from utils.prompts.conversation import has_chat_template, prompt_ids
from utils.text import byte_size

MIN_SHARED = 0.99  # share of the target's tokens that must have the same id in the drafter's vocabulary
MAX_SIZE_RATIO = 0.5  # a drafter larger than this share of the target is rarely worth its time
DIFFERENT_TOKENIZERS = "different tokenizers"
NEEDS_CACHE_OFF = "needs /cache off"
ROUNDED = ("bfloat16", "int8", "int4")  # engine weights that differ from those of the checkpoint


@dataclass(frozen=True, slots=True)
class PairFinding:
    """One compared property, its value for both models, and a remark. With `warns`, loading reports it."""

    what: str
    value: str
    remark: str = ""
    warns: bool = False


@dataclass(frozen=True, slots=True)
class Compatibility:
    """`verdict` is "fine", "fine with N padding rows", "no drafter", NEEDS_CACHE_OFF or DIFFERENT_TOKENIZERS."""

    verdict: str
    findings: tuple[PairFinding, ...]

    @property
    def needs_translation(self) -> bool:
        return self.verdict == DIFFERENT_TOKENIZERS

    def notes(self) -> tuple[str, ...]:
        warnings = (f"pair: {found.what}: {found.value} ({found.remark})" for found in self.findings if found.warns)
        return (f"pair: {self.verdict}", *warnings)


class _Side:
    """A model, its tokenizer, and the figures to compare: ids by token, rows of the embedding, and parameters."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.ids: dict[str, int] = tokenizer.get_vocab()
        self.rows = int(model.get_input_embeddings().num_embeddings)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())  # tied ones count once


def compare_models(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: PreTrainedModel,
    drafter_tokenizer: PreTrainedTokenizerBase | None,
) -> Compatibility:
    """Compare a target with a drafter model. A drafter without a tokenizer is assumed to share the target's.

    Raises UserError if the drafter cannot draft for the target.
    """
    ours, theirs = _Side(target, tokenizer), _Side(drafter, drafter_tokenizer or tokenizer)
    # Tokens are compared as strings, so the same string under two ids does not count.
    same, tokens = len(ours.ids.items() & theirs.ids.items()), len(ours.ids)
    _check_fit(ours, theirs, same)
    caches = _caches(target, drafter)
    assumed = "assumed: no tokenizer" if drafter_tokenizer is None else ""
    findings = (
        PairFinding("vocabulary", f"{ours.rows:,} and {theirs.rows:,} rows, {tokens:,} and {len(theirs.ids):,} tokens"),
        PairFinding("ids that mean the same", f"{same:,} of {tokens:,}", assumed),
        *_properties(ours, theirs),
        caches,
    )
    if same < MIN_SHARED * tokens:
        cost = "translated in both directions, which costs drafts and time: a drafter of the same family avoids it"
        return Compatibility(DIFFERENT_TOKENIZERS, (*findings, PairFinding("drafts", "as text", cost, warns=True)))
    if caches.warns:
        return Compatibility(NEEDS_CACHE_OFF, findings)
    extra = abs(ours.rows - theirs.rows)
    return Compatibility(f"fine with {extra:,} padding rows" if extra else "fine", findings)


def describe_without_model(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: str | None, *, reads_states: bool
) -> Compatibility:
    """The findings without a drafter model: for layers of the target, for drafters that read its hidden states, or for
    no drafter.
    """
    relation = "reads hidden states of the target" if reads_states else "part of the target"
    own = PairFinding("drafter", drafter or "none", f"{relation}, with the same tokens" if drafter else "")
    caches = _caches(target)
    verdict = "no drafter" if not drafter else NEEDS_CACHE_OFF if caches.warns else "fine"
    return Compatibility(verdict, (own, _first_token(tokenizer), caches))


def _check_fit(ours: _Side, theirs: _Side, same: int) -> None:
    """Raise UserError if the drafter cannot be used, with the number of tokens that have the same id in both."""
    encodes, tokens = ours.model.config.is_encoder_decoder, len(ours.ids)
    remedy = "use a drafter of the same model family" + ("" if encodes else ", or layers:K")
    if encodes != theirs.model.config.is_encoder_decoder:
        reason = "one of them is an encoder-decoder model and the other is not"
    elif encodes and same < MIN_SHARED * tokens:  # drafts can be translated, but the encoder's input cannot
        reason = f"its tokenizer differs ({same:,} of {tokens:,} ids agree)"
    # The drafter could not embed the target's last tokens. Missing padding rows do no harm, because they are never fed.
    elif same >= MIN_SHARED * tokens and theirs.rows < min(tokens, ours.rows):
        reason = "its vocabulary is smaller"
    else:
        return
    raise UserError(f"'{theirs.model.name_or_path}' cannot draft for this target: {reason}; {remedy}.")


def _properties(ours: _Side, theirs: _Side) -> Iterator[PairFinding]:
    """What differs without making the drafter wrong."""
    yield _first_token(ours.tokenizer)
    millions, ratio = (ours.parameters / 1e6, theirs.parameters / 1e6), theirs.parameters / max(1, ours.parameters)
    shown = "{:,.1f} and {:,.1f} million parameters, 1 to {:.2f}".format(*millions, ratio)
    large = "a drafter this large rarely saves time: use a smaller one" if ratio > MAX_SIZE_RATIO else ""
    yield PairFinding("size", shown, large, warns=bool(large))
    target, drafter = context_length(ours.model), context_length(theirs.model)
    shown = " and ".join("unbounded" if length is None else f"{length:,} tokens" for length in (target, drafter))
    is_short = drafter is not None and (target is None or drafter < target)
    remark = "nothing is drafted beyond the drafter's context" if is_short else ""
    yield PairFinding("context", shown, remark, warns=is_short)


def _first_token(tokenizer: PreTrainedTokenizerBase) -> PairFinding:
    """How often a prompt starts with the tokenizer's first token. A doubled one silently degrades the text."""
    first = tokenizer.bos_token_id
    if first is None:
        return PairFinding("first token", "none")
    try:
        start = prompt_ids(tokenizer, "Hello", chat=has_chat_template(tokenizer), system=None)[:2]
    except UserError:
        return PairFinding("first token", "unknown", "the chat template renders no prompt", warns=True)
    count = start.count(first) if start[0] == first else 0
    shown = f"{tokenizer.bos_token} {('not written', 'once', 'twice')[count]}"
    remark = "the chat template doubles it, which degrades the text" if count == 2 else ""
    return PairFinding("first token", shown, remark, warns=count == 2)


def _caches(*models: Any) -> PairFinding:
    """How the caches drop rejected drafts."""
    methods = []
    for model in models:
        try:
            methods.append(ModelSession(model).rewind_method)
        except UserError:
            methods.append("cannot be used")
    bad = "cannot be used" in methods
    remark = "drafts need /cache off" if bad else "after rejected drafts"
    return PairFinding("caches", " and ".join(dict.fromkeys(methods)), remark, bad)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models, ready to decode. Everything about the drafter is None without one.

    `drafter_kind` is "model", "layers:K", "head", or the name of a published format, such as "EAGLE-3". `notes` are
    messages for the user. `request` has no defaults filled in. `drafter_tokenizer` is set if it differs from the
    target's, so that drafts must be translated.
    """

    target: PreTrainedModel
    drafter: PreTrainedModel | FeatureDrafter | None
    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]
    target_name: str
    drafter_name: str | None
    drafter_kind: str | None
    device: str
    dtype: str
    quantize: str
    drafter_quantize: str | None
    drafter_dtype: str | None
    engine: Engine
    notes: tuple[str, ...]
    request: PairRequest
    compatibility: Compatibility
    drafter_tokenizer: PreTrainedTokenizerBase | None

    # Counted at each access, because the engine replaces weights after loading.
    @property
    def memory(self) -> int:
        """Bytes of the target's weights as they are now."""
        return tensor_bytes([self.target], in_files=True)

    @property
    def drafter_memory(self) -> int | None:
        """Bytes of the drafter's weights as they are now, without those that it shares with the target."""
        if self.drafter is None:
            return None
        return tensor_bytes([self.drafter], besides=[self.target], in_files=True)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.drafter.feature_layers if isinstance(self.drafter, FeatureDrafter) else ()


def describe_target(pair: Pair) -> str:
    return _description(pair, pair.dtype, pair.quantize, pair.memory)


def describe_drafter(pair: Pair) -> str:
    """Number format and size of the drafter's weights that it does not share with the target."""
    if pair.drafter is None:
        return "none"
    return _description(pair, str(pair.drafter_dtype), pair.drafter_quantize or "none", pair.drafter_memory)


def loaded_message(pair: Pair) -> str:
    drafter = "" if pair.drafter is None else f"; {pair.drafter_name} ({describe_drafter(pair)})"
    return f"loaded {pair.target_name} ({describe_target(pair)}){drafter}"


def weight_notes(pair: Pair) -> Iterator[str]:
    """Messages for the user about what the formats of weights mean for texts and speed."""
    name = pair.target_name
    if (kind := pair.request.engine_weights) in ROUNDED:
        yield f"with {kind} weights {name} is a different model, compared only with itself"
    if pair.device == "cpu" and pair.request.quantize != "none":
        yield "on a CPU, --engine-weights int8 is usually several times as fast as --quantize"
    if depends_on_width(pair):
        yield (
            f"bnb-int8 looks for outliers in all positions of a verify pass, so {name}'s logits depend on its width: "
            "texts can differ where two tokens are close (see /audit)"
        )


def depends_on_width(pair: Pair) -> bool:
    """Whether the target's logits depend on the verify width by more than rounding.

    bnb-int8 keeps columns with outliers in full precision, and searches all rows of a pass for them.
    """
    return pair.quantize == "bnb-int8"


def _description(pair: Pair, dtype: str, quantize: str, memory: int | None) -> str:
    size = byte_size(memory) if memory else "shared with the target"
    kernels = ""
    if (weights := pair.request.engine_weights) != "float32":
        kernels = f"{weights} kernels"
        if pair.engine.state.weights != weights:  # loading is finished, and the engine has not begun
            kernels, size = f"{weights} kernels when the engine starts", ""
    return ", ".join(filter(None, (dtype, "" if quantize == "none" else quantize, kernels, size)))
