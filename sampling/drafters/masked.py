"""A model that drafts a whole block in one pass over mask tokens, as in PARD (arXiv 2504.18583).

The session answers like that of any model, so drawing drafts and sharing noise work as for one that drafts token by
token.
"""

from typing import Any

from torch import Tensor

from utils.decode.model_session import ModelSession
from utils.decode.session import Session
from utils.drafter_formats.pard import drafting_block


class MaskedSession:
    """A session of a PARD model. The first feed after a rewind computes the logits of all drafts, later ones look them
    up.

    `session` is the model's, with its cache, if any. `mask_token` is fed in place of the drafts. `block_size` is the
    number of drafts per pass, or fewer at the end of the model's context.
    """

    def __init__(self, session: ModelSession, mask_token: int, block_size: int) -> None:
        self.name, self.vocab_size, self.context_length = session.name, session.vocab_size, session.context_length
        self.block_size = block_size
        self._session, self._mask = session, mask_token
        self._block: tuple[int, Tensor] | None = None  # context length, and logits (K, V) of what follows

    def begin(self, prompt: list[int]) -> list[int]:
        """Start a run."""
        self._block = None
        return self._session.begin(prompt)

    def room(self, context: list[int]) -> int | None:
        """How many more tokens it can predict: at most a block."""
        room = self._session.room(context)
        return self.block_size if room is None else min(room, self.block_size)

    def feed(self, context: list[int], keep: int) -> Tensor:
        """Logits (1, V) for the next token; `keep` is 1. After the first call it holds at most K - 1 more tokens."""
        assert keep == 1
        if self._block is None:
            size = self.room(context)
            assert size
            masks = [self._mask] * (size - 1)
            # The last token's row gives the first draft, and each mask token's row one more.
            self._block = len(context), self._session.feed(context + masks, keep=size)
        start, rows = self._block
        row = len(context) - start
        return rows[row : row + 1]

    def rewind(self, length: int) -> None:
        """Forget the block, and everything after the first `length` positions. Accepted drafts were never fed: the
        cache has mask tokens in their place.
        """
        known = length if self._block is None else min(length, self._block[0])
        self._block = None
        self._session.rewind(known)


def block_session(session: ModelSession, target: Any) -> tuple[Session, int]:
    """A drafter's session for this target, and how many drafts a pass gives: a block if the drafter is a PARD model."""
    if (block := drafting_block(session.model, target)) is None:
        return session, 1
    return MaskedSession(session, block.token, block.size), block.size
