"""PARD models: causal language models that draft all tokens of a round in one pass over mask tokens (arXiv 2504.18583).

They are loaded and checked like any model; only their config says what they are. PARD-2 models (arXiv 2605.08632) also
draft without hidden states of the target, and are used in this way. The session answers like that of any model, so
drawing drafts and sharing noise work as for one that drafts token by token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from utils.bounds import MAX_GAMMA
from utils.decode.model_info import vocabulary_size
from utils.decode.model_session import ModelSession
from utils.decode.session import Session
from utils.errors import UserError
from utils.text import count_of

MASK, KIND, KINDS = "pard_token", "spd_type", ("pard", "pard2")
BLOCK_KEYS = ("para_num", "block_size")  # the first is the name of the number of drafts in PARD's training
DEFAULT_BLOCK = 8  # para_num in the published training configurations of PARD


@dataclass(frozen=True, slots=True)
class MaskedBlock:
    """The blocks of a PARD model: the mask token, and the number K of drafts per pass."""

    token: int
    size: int


def is_pard(config: Mapping[str, Any]) -> bool:
    """Whether the config of a model says that it drafts blocks."""
    return config.get(MASK) is not None or config.get(KIND) in KINDS


def masked_block(model: Any) -> MaskedBlock | None:
    """Return the blocks of a PARD model, or None for a different model. Raises UserError for unusable values."""
    config = model.config.get_text_config(decoder=True)
    token, kind = getattr(config, MASK, None), getattr(config, KIND, None)
    if not is_pard({MASK: token, KIND: kind}):
        return None
    name, tokens = model.name_or_path, vocabulary_size(model)
    if type(token) is not int or not 0 <= token < tokens:
        given = "no" if token is None else f"{token!r} as"
        raise UserError(
            f"'{name}' has {given} {MASK} in its config.json, and a PARD model needs an id from 0 to {tokens - 1}."
        )
    key = next((key for key in BLOCK_KEYS if getattr(config, key, None) is not None), "")
    size = getattr(config, key) if key else DEFAULT_BLOCK
    if type(size) is not int or not 1 <= size <= MAX_GAMMA:
        raise UserError(f"'{name}' has {size!r} as {key} in its config.json, not a whole number from 1 to {MAX_GAMMA}.")
    return MaskedBlock(token, size)


def pard_notes(block: MaskedBlock | None, name: str, *, translated: bool) -> tuple[str, ...]:
    """Messages for the user about a PARD drafter. translated: whether its tokenizer differs from the target's."""
    if block is None:
        return ()
    if translated:
        return (f"{name} is a PARD model with a different tokenizer: it drafts token by token, like any model",)
    return (f"{name} is a PARD model: {count_of(block.size, 'draft')} in one pass, without the target's hidden states",)


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
    """A drafter's session for this target, and how many drafts a pass gives: a block if the drafter is a PARD model.

    Raises UserError as `masked_block`.
    """
    model = session.model
    # The first layers of a target that is a PARD model have its config and its weights, but were not trained for this.
    block = masked_block(model)
    if block is None or model.get_input_embeddings().weight is target.get_input_embeddings().weight:
        return session, 1
    return MaskedSession(session, block.token, block.size), block.size
