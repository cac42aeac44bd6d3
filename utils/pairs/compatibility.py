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

    def check(self, name: str, *, can_cut: bool) -> None:
        """Raise UserError if the drafter cannot draft for its target. With `can_cut`, layers:K is an alternative."""
        if self.verdict == WRONG:
            remedy = "use a drafter of the same model family" + (", or layers:K" if can_cut else "")
            raise UserError(f"'{name}' cannot draft for this target: {self.reason}; {remedy}.")


@dataclass(frozen=True, slots=True)
class _Side:
    """A model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def rows(self) -> int:
        """Rows of the embedding."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def vocabulary(self) -> dict[str, int]:
        return dict(self.tokenizer.get_vocab()) if self.tokenizer is not None else {}

    @property
    def padding(self) -> int:
        """Rows of the embedding after the last token."""
        # Ids need not be contiguous, so the highest id counts, not the number of tokens.
        return max(0, self.rows - 1 - max(self.vocabulary.values(), default=self.rows - 1))

    @property
    def parameters(self) -> int:
        """Number of parameters. Tied ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def compare_models(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: PreTrainedModel,
    drafter_tokenizer: PreTrainedTokenizerBase | None,
) -> Compatibility:
    """Compare a target with a drafter model. A drafter without a tokenizer is assumed to share the target's."""
    ours, theirs = (
        _Side(target, tokenizer),
        _Side(drafter, tokenizer if drafter_tokenizer is None else drafter_tokenizer),
    )
    # Tokens are compared as strings, so the same string under two ids does not count.
    same = len(ours.vocabulary.items() & theirs.vocabulary.items())
    tokens = len(ours.vocabulary)
    caches = _caches(_rewind_method(target), _rewind_method(drafter))
    findings = (
        *_vocabularies(ours, theirs, same, assumed=drafter_tokenizer is None),
        _compared("special tokens", ours, theirs, lambda side: sorted(side.tokenizer.all_special_tokens)),
        _compared("end of text", ours, theirs, _end_tokens),
        _compared("chat template", ours, theirs, lambda side: side.tokenizer.chat_template),
        _first_token(tokenizer),
        _sizes(ours, theirs),
        _contexts(ours, theirs),
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
    caches = _caches(_rewind_method(target))
    verdict = "no drafter" if not drafter else NEEDS_CACHE_OFF if caches.warns else "fine"
    return Compatibility(verdict, "", (own, _first_token(tokenizer), caches))


def _reason_against(ours: _Side, theirs: _Side, same: int) -> str:
    """Why the drafter cannot be used. It is empty if it can."""
    encodes = ours.model.config.is_encoder_decoder
    if encodes != theirs.model.config.is_encoder_decoder:
        return "one of them is an encoder-decoder model and the other is not"
    tokens = len(ours.vocabulary)
    if same < MIN_SHARED * tokens:
        # Drafts can be translated, but the encoder's input cannot.
        return f"its tokenizer differs ({same:,} of {tokens:,} ids agree)" if encodes else ""
    # The drafter could not embed the target's last tokens. Missing padding rows do no harm, because they are never fed.
    if theirs.rows < min(tokens, ours.rows):
        return "its vocabulary is smaller"
    return ""


def _vocabularies(ours: _Side, theirs: _Side, same: int, *, assumed: bool) -> Iterator[PairFinding]:
    """`assumed` is True if the drafter has no tokenizer."""
    tokens, others = len(ours.vocabulary), len(theirs.vocabulary)
    padded = "never drafted and never sampled" if ours.padding or theirs.padding else ""
    yield PairFinding("vocabulary", f"{ours.rows:,} and {theirs.rows:,} rows, {tokens:,} and {others:,} tokens")
    yield PairFinding("ids that mean the same", f"{same:,} of {tokens:,}", "assumed: no tokenizer" if assumed else "")
    yield PairFinding("padding rows", f"{ours.padding:,} and {theirs.padding:,}", padded)


def _compared(what: str, ours: _Side, theirs: _Side, read: Callable[[_Side], object]) -> PairFinding:
    mine, other = read(ours), read(theirs)
    if mine == other:
        return PairFinding(what, _brief(mine), "the same")
    return PairFinding(what, f"{_brief(mine)} and {_brief(other)}", "they differ: those of the target are used")


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


def _sizes(ours: _Side, theirs: _Side) -> PairFinding:
    ratio = theirs.parameters / max(1, ours.parameters)
    remark = "a drafter this large rarely saves time: use a smaller one" if ratio > MAX_SIZE_RATIO else ""
    shown = f"{_millions(ours.parameters)} and {_millions(theirs.parameters)} parameters, 1 to {ratio:.2f}"
    return PairFinding("size", shown, remark, warns=bool(remark))


def _contexts(ours: _Side, theirs: _Side) -> PairFinding:
    target, drafter = context_length(ours.model), context_length(theirs.model)
    shown = " and ".join("unbounded" if length is None else f"{length:,} tokens" for length in (target, drafter))
    short = drafter is not None and (target is None or drafter < target)
    return PairFinding(
        "context", shown, "nothing is drafted beyond the drafter's context" if short else "", warns=short
    )


def _caches(*methods: str) -> PairFinding:
    """How the caches drop rejected drafts."""
    bad = not all(methods)
    remark = "drafts need /cache off" if bad else "after rejected drafts"
    return PairFinding(
        "caches", " and ".join(dict.fromkeys(method or "cannot be used" for method in methods)), remark, bad
    )


def _millions(count: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:,}"


def _rewind_method(model: Any) -> str:
    """How the model's cache forgets rejected drafts, or an empty string if it cannot."""
    with suppress(UserError):
        return ModelSession(model).rewind_method
    return ""
