"""Whether two models fit together: what a drafter's ids mean to its target, and what else decides whether a pair is worth anything.

Drafts are judged by the target, so that no misfit changes the text; it only makes drafts worthless. That is why it has to be said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from utils.decode.model_session import context_length, way_back
from utils.errors import UserError
from utils.prompts.chat_template import has_chat_template, prompt_ids

ENOUGH = 0.99  # of the target's tokens, that must mean the same to a drafter
RATHER_LARGE = 0.5  # of the target's size: such a drafter hardly ever pays
OTHER_WORDS = "different tokenizers"
TRANSLATED = "translated back and forth, which costs drafts and time: a drafter of the same family does without"
FAMILY = "take a drafter of the same family"


@dataclass(frozen=True, slots=True)
class Row:
    """What was looked at, what was found, and a remark; warns: whether that is worth saying unasked."""

    what: str
    value: str
    remark: str = ""
    warns: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """verdict: fine, fine with N padding rows, different tokenizers, or wrong. reason: of a bad one."""

    verdict: str
    reason: str
    rows: tuple[Row, ...]

    @property
    def translated(self) -> bool:
        """Whether drafts have to be told as text."""
        return self.verdict == OTHER_WORDS

    def notes(self) -> tuple[str, ...]:
        """What is to be said at load."""
        warnings = (f"pair: {row.what}: {row.value} ({row.remark})" for row in self.rows if row.warns)
        return (f"pair: {self.verdict}", *warnings)


@dataclass(frozen=True, slots=True)
class _Side:
    """A model, and the tokenizer it was made with, where one is known."""

    model: Any
    tokenizer: Any

    @property
    def rows(self) -> int:
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def tokens(self) -> dict[str, int]:
        return dict(self.tokenizer.get_vocab()) if self.tokenizer is not None else {}

    @property
    def size(self) -> int:
        """Parameters, tied ones once."""
        return sum(part.numel() for part in self.model.parameters())


def fit_of(target: Any, tokenizer: Any, drafter: Any, own: Any) -> Fit:
    """own: the drafter's tokenizer; None where it brought none, and is taken to share the target's."""
    ours, theirs = _Side(target, tokenizer), _Side(drafter, own if own is not None else tokenizer)
    same, padding = _same_ids(ours, theirs), _padding(ours)
    rows = (
        Row(
            "vocabulary",
            f"{ours.rows:,} and {theirs.rows:,} rows, {len(ours.tokens):,} and {len(theirs.tokens):,} tokens",
        ),
        Row(
            "ids that mean the same",
            f"{same:,} of {len(ours.tokens):,}",
            "" if own is not None else "no tokenizer of its own",
        ),
        Row(
            "padding rows",
            f"{padding:,} and {_padding(theirs):,}",
            "never drafted, nor drawn" if padding or _padding(theirs) else "",
        ),
        _named("special tokens", ours, theirs, lambda side: sorted(side.tokenizer.all_special_tokens)),
        _named("end of text", ours, theirs, _ends),
        _named("chat template", ours, theirs, lambda side: side.tokenizer.chat_template, note="the target's is used"),
        _first_token(tokenizer),
        _sizes(ours, theirs),
        _contexts(ours, theirs),
        _caches(way_back(target), way_back(drafter)),
    )
    reason = _misfit(ours, theirs, same)
    if reason:
        return Fit("wrong", reason, rows)
    if same < ENOUGH * len(ours.tokens):
        return Fit(OTHER_WORDS, "", (*rows, Row("drafts", "as text", TRANSLATED, warns=True)))
    extra = abs(ours.rows - theirs.rows)
    return Fit(f"fine with {extra:,} padding rows" if extra else "fine", "", rows)


def own_fit(target: Any, tokenizer: Any, drafter: str | None) -> Fit:
    """Of a drafter that was cut out of its target, or made for it; or of none."""
    told = Row("drafter", drafter, "the target's own: its tokens are the same") if drafter else Row("drafter", "none")
    return Fit("fine" if drafter else "no drafter", "", (told, _first_token(tokenizer), _caches(way_back(target))))


def check_fit(fit: Fit, name: str, *, cuttable: bool) -> None:
    """Raises UserError where a drafter is of no use to its target."""
    if fit.reason:
        raise UserError(
            f"'{name}' cannot draft for this target: {fit.reason}; {FAMILY}{', or layers:K' if cuttable else ''}."
        )


def _misfit(ours: _Side, theirs: _Side, same: int) -> str:
    if ours.model.config.is_encoder_decoder != theirs.model.config.is_encoder_decoder:
        return "one of them is an encoder-decoder model and the other is not"
    if same < ENOUGH * len(ours.tokens):
        return (
            ""
            if not ours.model.config.is_encoder_decoder
            else f"its tokenizer is another one ({same:,} of {len(ours.tokens):,} ids agree)"
        )
    if theirs.rows < min(len(ours.tokens), ours.rows):
        return "its vocabulary is smaller"
    return ""


def _same_ids(ours: _Side, theirs: _Side) -> int:
    others = theirs.tokens
    return sum(others.get(token) == number for token, number in ours.tokens.items())


def _padding(side: _Side) -> int:
    """Rows of the embedding that no token names."""
    return max(0, side.rows - 1 - max(side.tokens.values(), default=side.rows - 1))


def _named(what: str, ours: _Side, theirs: _Side, told: Callable[[_Side], Any], *, note: str = "") -> Row:
    mine, other = told(ours), told(theirs)
    if mine == other:
        return Row(what, _brief(mine), "the same")
    return Row(what, f"{_brief(mine)} and {_brief(other)}", note or "they differ: what the target says is what counts")


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value[:4]) + (f" and {len(value) - 4} more" if len(value) > 4 else "") or "none"
    return "none" if not value else f"{len(value):,} characters"


def _ends(side: _Side) -> list[str]:
    """Of the model's configuration, as tokens."""
    found = side.model.generation_config.eos_token_id
    ids = [
        number
        for number in (found if isinstance(found, list) else [found])
        if type(number) is int and 0 <= number < side.rows
    ]
    return [str(token) for token in side.tokenizer.convert_ids_to_tokens(ids)]


def _first_token(tokenizer: Any) -> Row:
    """How often a prompt begins with the tokenizer's first token: doubled ones hurt without a word."""
    first = tokenizer.bos_token_id
    if first is None:
        return Row("first token", "none")
    chat = has_chat_template(tokenizer)
    try:
        start = prompt_ids(tokenizer, "Hello", chat=chat, system=None)[:2]
    except UserError:
        return Row("first token", "unknown", "the chat template renders no prompt", warns=True)
    count = start.count(first) if start[0] == first else 0
    shown = f"{tokenizer.bos_token} {('not written', 'once', 'twice')[count]}"
    return Row("first token", shown, "the template doubles it, which hurts" if count == 2 else "", warns=count == 2)


def _sizes(ours: _Side, theirs: _Side) -> Row:
    share = theirs.size / max(1, ours.size)
    remark = "a drafter so large hardly ever pays: take a smaller one" if share > RATHER_LARGE else ""
    return Row(
        "size",
        f"{_human(ours.size)} and {_human(theirs.size)} parameters, 1 to {share:.2f}",
        remark,
        warns=bool(remark),
    )


def _contexts(ours: _Side, theirs: _Side) -> Row:
    most = [context_length(side.model) for side in (ours, theirs)]
    shown = " and ".join("unbounded" if length is None else f"{length:,} tokens" for length in most)
    short = most[1] is not None and most[1] < (most[0] or most[1] + 1)
    return Row("context", shown, "beyond the drafter's nothing is drafted" if short else "", warns=short)


def _caches(*ways: str) -> Row:
    """How rejected drafts are forgotten."""
    bad = not all(ways)
    remark = "drafts need /cache off" if bad else "after rejected drafts"
    return Row("caches", " and ".join(dict.fromkeys(way or "cannot be used" for way in ways)), remark, warns=bad)


def _human(count: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:,}"
