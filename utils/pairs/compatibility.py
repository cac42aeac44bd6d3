"""Whether a drafter suits a target: vocabularies compared id by id, special tokens, context lengths, sizes and caches.

The target verifies every draft, so an unsuitable drafter never changes the text. It only makes drafts useless, so the
program reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from utils.decode.model_info import context_length
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.prompts.chat_template import has_chat_template, prompt_ids

MIN_SHARED = 0.99  # share of the target's tokens that must have the same id in the drafter's vocabulary
MAX_SIZE_RATIO = 0.5  # a drafter larger than this share of the target is rarely worth its time
DIFFERENT_TOKENIZERS = "different tokenizers"
NEEDS_CACHE_OFF = "needs /cache off"
WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class PairFinding:
    """One compared property, its value for both models, and a remark. With `warns`, loading reports it."""

    what: str
    value: str
    remark: str = ""
    warns: bool = False


@dataclass(frozen=True, slots=True)
class Compatibility:
    """The result of a comparison.

    `verdict` is "fine", "fine with N padding rows", "no drafter", NEEDS_CACHE_OFF, DIFFERENT_TOKENIZERS or WRONG, with
    a reason.
    """

    verdict: str
    reason: str
    findings: tuple[PairFinding, ...]

    @property
    def needs_translation(self) -> bool:
        """Whether drafts must be translated between tokenizers as text."""
        return self.verdict == DIFFERENT_TOKENIZERS

    def notes(self) -> tuple[str, ...]:
        """Messages for the user after loading the pair."""
        warnings = (f"pair: {found.what}: {found.value} ({found.remark})" for found in self.findings if found.warns)
        return (f"pair: {self.verdict}", *warnings)


class _Side:
    """A model, its tokenizer, and the figures to compare: ids by token, rows of the embedding, and parameters."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.ids: dict[str, int] = tokenizer.get_vocab()
        self.rows = int(model.get_input_embeddings().num_embeddings)
        # Ids need not be contiguous, so the highest id counts, not the number of tokens.
        self.padding = max(0, self.rows - 1 - max(self.ids.values(), default=self.rows - 1))
        self.parameters = sum(parameter.numel() for parameter in model.parameters())  # tied ones count once


def compare_models(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: PreTrainedModel,
    drafter_tokenizer: PreTrainedTokenizerBase | None,
) -> Compatibility:
    """Compare a target with a drafter model. A drafter without a tokenizer is assumed to share the target's."""
    ours, theirs = _Side(target, tokenizer), _Side(drafter, drafter_tokenizer or tokenizer)
    # Tokens are compared as strings, so the same string under two ids does not count.
    same, tokens = len(ours.ids.items() & theirs.ids.items()), len(ours.ids)
    caches = _caches(target, drafter)
    assumed = "assumed: no tokenizer" if drafter_tokenizer is None else ""
    findings = (
        PairFinding("vocabulary", f"{ours.rows:,} and {theirs.rows:,} rows, {tokens:,} and {len(theirs.ids):,} tokens"),
        PairFinding("ids that mean the same", f"{same:,} of {tokens:,}", assumed),
        *_properties(ours, theirs),
        caches,
    )
    if reason := _reason_against(ours, theirs, same):
        return Compatibility(WRONG, reason, findings)
    if same < MIN_SHARED * tokens:
        cost = "translated in both directions, which costs drafts and time: a drafter of the same family avoids it"
        return Compatibility(DIFFERENT_TOKENIZERS, "", (*findings, PairFinding("drafts", "as text", cost, warns=True)))
    if caches.warns:
        return Compatibility(NEEDS_CACHE_OFF, "", findings)
    extra = abs(ours.rows - theirs.rows)
    return Compatibility(f"fine with {extra:,} padding rows" if extra else "fine", "", findings)


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
    return Compatibility(verdict, "", (own, _first_token(tokenizer), caches))


def _reason_against(ours: _Side, theirs: _Side, same: int) -> str:
    """Why the drafter cannot be used. It is empty if it can."""
    encodes, tokens = ours.model.config.is_encoder_decoder, len(ours.ids)
    if encodes != theirs.model.config.is_encoder_decoder:
        return "one of them is an encoder-decoder model and the other is not"
    if same < MIN_SHARED * tokens:
        # Drafts can be translated, but the encoder's input cannot.
        return f"its tokenizer differs ({same:,} of {tokens:,} ids agree)" if encodes else ""
    # The drafter could not embed the target's last tokens. Missing padding rows do no harm, because they are never fed.
    return "its vocabulary is smaller" if theirs.rows < min(tokens, ours.rows) else ""


def _properties(ours: _Side, theirs: _Side) -> Iterator[PairFinding]:
    """What differs without making the drafter wrong."""
    padded = "never drafted and never sampled" if ours.padding or theirs.padding else ""
    yield PairFinding("padding rows", f"{ours.padding:,} and {theirs.padding:,}", padded)
    for what, read in COMPARED.items():
        mine, other = read(ours), read(theirs)
        if mine == other:
            yield PairFinding(what, _brief(mine), "the same")
        else:
            both = f"{_brief(mine)} and {_brief(other)}"
            yield PairFinding(what, both, "they differ: those of the target are used")
    yield _first_token(ours.tokenizer)
    ratio = theirs.parameters / max(1, ours.parameters)
    shown = f"{_millions(ours.parameters)} and {_millions(theirs.parameters)} parameters, 1 to {ratio:.2f}"
    large = "a drafter this large rarely saves time: use a smaller one" if ratio > MAX_SIZE_RATIO else ""
    yield PairFinding("size", shown, large, warns=bool(large))
    target, drafter = context_length(ours.model), context_length(theirs.model)
    shown = " and ".join("unbounded" if length is None else f"{length:,} tokens" for length in (target, drafter))
    is_short = drafter is not None and (target is None or drafter < target)
    remark = "nothing is drafted beyond the drafter's context" if is_short else ""
    yield PairFinding("context", shown, remark, warns=is_short)


def _brief(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value[:4]) + (f" and {len(value) - 4} more" if len(value) > 4 else "") or "none"
    return f"{len(value):,} characters" if isinstance(value, str) and value else "none"


def _end_tokens(side: _Side) -> list[str]:
    """The end tokens in the model's generation config."""
    configured = side.model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    # A config may name an id beyond the vocabulary, which convert_ids_to_tokens would refuse. bool is a subclass of
    # int.
    known = [number for number in ids if type(number) is int and 0 <= number < side.rows]
    return [str(token) for token in side.tokenizer.convert_ids_to_tokens(known)]


COMPARED: dict[str, Callable[[_Side], object]] = {
    "special tokens": lambda side: sorted(side.tokenizer.all_special_tokens),
    "end of text": _end_tokens,
    "chat template": lambda side: side.tokenizer.chat_template,
}


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
        with suppress(UserError):
            methods.append(ModelSession(model).rewind_method)
            continue
        methods.append("cannot be used")
    bad = "cannot be used" in methods
    remark = "drafts need /cache off" if bad else "after rejected drafts"
    return PairFinding("caches", " and ".join(dict.fromkeys(methods)), remark, bad)


def _millions(count: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:,}"
