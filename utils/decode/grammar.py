"""A grammar: which tokens may follow the new tokens of a text. llguidance computes that.

It is a pure function of these tokens, and applies to the logits of the target and of every drafter before the
processor. So no verification rule knows of it, and the text has the target's distribution under its masks.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from torch.nn.functional import pad

from utils.decode.steps import matching_prefix
from utils.errors import UserError
from utils.logits_processor import one_thread

KEPT = 64  # masks: those of a round are needed by the drafter, and then by the target


class NextTokens(NamedTuple):
    """The ids (V',) that may not follow a text, or None if all may, and the only id that may, if there is just one."""

    forbidden: Tensor | None = None
    only: int | None = None


class Grammar:
    """`text` is a grammar in the language of llguidance. After one of the `end_ids`, everything is allowed: the text is
    over.
    """

    def __init__(self, text: str, tokenizer: LLTokenizer, end_ids: frozenset[int]) -> None:
        self._matcher, self._end_ids = LLMatcher(tokenizer, text), end_ids
        self._consumed: list[int] = []  # what the matcher has read
        self._after = lru_cache(KEPT)(self._next_tokens)

    def _next_tokens(self, text: tuple[int, ...]) -> NextTokens:
        # Replayed drafts that nobody knows have a negative id.
        if not self._end_ids.isdisjoint(text) or min(text, default=0) < 0 or not self._read(text):
            return NextTokens()
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        if self._matcher.is_error():
            raise UserError(f"response_format cannot be followed: {self._matcher.get_error().splitlines()[0]}")
        return NextTokens(torch.from_numpy(bits == 0), int(bits.argmax()) if bits.sum() == 1 else None)

    def _read(self, text: tuple[int, ...]) -> bool:
        """Move the matcher to the end of a text. False if the grammar does not allow this text."""
        common = matching_prefix(self._consumed, text)
        self._matcher.rollback(len(self._consumed) - common)
        read = common + self._matcher.try_consume_tokens(list(text[common:]))
        self._consumed = list(text[:read])
        return read == len(text)

    def forbidden(self, text: Sequence[int], count: int, size: int) -> Tensor:
        """The ids (count, size) that may not follow the new tokens, the last row after all of `text`."""
        rows = torch.zeros(count, size, dtype=torch.bool)
        for row in range(max(0, count - 1 - len(text)), count):  # rows before the first new token are free
            ids = self._after(tuple(text[: len(text) - count + 1 + row])).forbidden
            if ids is not None:
                rows[row] = pad(ids, (0, size - len(ids)), value=True)  # or cut, if it is negative
        return rows

    @one_thread()
    def masked(self, logits: Tensor, text: Sequence[int]) -> Tensor:
        """Logits (k, V), the last row after all of the new tokens `text`, with minus infinity for forbidden ids."""
        forbidden = self.forbidden(text, *logits.shape).to(logits.device)
        # Finite, because only ids may be left that the model never generates, such as those that a drafter lacks.
        return logits.clamp(min=torch.finfo(logits.dtype).min).masked_fill(forbidden, -torch.inf)

    def forced(self, text: Sequence[int], most: int) -> list[int]:
        """The ids, at most `most`, that must follow the new tokens `text`."""
        found: list[int] = []
        while len(found) < most and (token := self._after((*text, *found)).only) is not None:
            found.append(token)
        return found

    def forced_places(self, text: Sequence[int], drafts: Sequence[int]) -> tuple[int, ...]:
        """The indices of the drafts after `text` at which only one id is allowed."""
        places = range(len(drafts))
        return tuple(place for place in places if self._after((*text, *drafts[:place])).only is not None)

    def cut(self, text: Sequence[int], drafts: list[int]) -> list[int]:
        """The drafts after `text` before the first one that is forbidden."""
        for place, token in enumerate(drafts):
            forbidden = self._after((*text, *drafts[:place])).forbidden
            if forbidden is not None and token >= 0 and forbidden[token]:
                return drafts[:place]
        return drafts


@lru_cache(2)
def _vocabulary(tokenizer: Any, end_ids: frozenset[int]) -> LLTokenizer:
    try:
        return from_tokenizer(tokenizer, eos_token=sorted(end_ids))
    except ValueError as error:
        raise UserError(f"response_format does not work with this tokenizer: {str(error).splitlines()[0]}.") from error


@lru_cache(8)
def grammar_of(text: str, tokenizer: Any, end_ids: frozenset[int]) -> Grammar:
    """The grammar for a tokenizer. Raises UserError if the tokenizer is not supported, or if no token ends a text."""
    if not end_ids:
        raise UserError("response_format needs an end token, and this target has none.")
    return Grammar(text, _vocabulary(tokenizer, end_ids), end_ids)
