"""Sessions of drafters that read the target's hidden states: one pass for each draft, or one for all drafts of a round.

They answer like those of a model, so drawing drafts and sharing noise work as for any model.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from utils.decode.engine_forward import MAX_WIDTH, PREFILL_CHUNK, prefill_pass
from utils.decode.model_info import context_length, model_name, vocabulary_size
from utils.models.feature_drafter import BlockDrafter, FeatureDrafter, StepwiseDrafter


class FeatureSession(ABC):
    """One run's use of a drafter that reads the target's hidden states.

    It has room for drafts once `add_features` has brought it features of the target.
    """

    block_size = 1  # drafts that a pass gives

    def __init__(self, model: FeatureDrafter) -> None:
        self.model = model
        self.name = f"the drafter {model_name(model)}"
        self.vocab_size = vocabulary_size(model)
        self.context_length = context_length(model)
        self._reset()

    def _reset(self) -> None:
        self._cache: Any = None  # the last one ends first, so that the new one can have its memory
        self._cache = self.model.new_cache()
        self._cached = 0  # entries in the cache
        self._known = 0  # positions whose features have arrived
        # Features (T, F) of positions that have no entry yet. They are joined when they are needed: otherwise a drafter
        # that waits would copy all of them in every round.
        self._waiting: list[Tensor] = []

    @abstractmethod
    def feed(self, context: list[int], keep: int) -> Tensor:
        """Logits (1, V) for the next token; `keep` is 1."""

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Forget the drafts, and what was made from them."""

    def confidence(self, context: list[int]) -> float | None:
        """The drafter's own estimate that the draft after this context, which was fed last, is accepted; None if it has
        no such estimate.
        """
        return None

    def begin(self, prompt: list[int]) -> list[int]:
        self._reset()
        return list(prompt)

    def room(self, context: list[int]) -> int | None:
        """How many more tokens it can predict."""
        if not self._known:
            return 0
        return None if self.context_length is None else self.context_length - len(context)

    def add_features(self, features: Tensor, first: int, known: int) -> None:
        """Add features (T, F) of the positions from `first`. Those that are new and below `known` are kept."""
        self._waiting.append(features[self._known - first : known - first])
        self._known = known

    def _take_waiting(self) -> Tensor:
        """The features (T, F) of the positions that have no entry yet. They get one now."""
        waiting, self._waiting = self._waiting, []
        return torch.cat(waiting)

    def _tokens_after(self, context: list[int], end: int) -> Tensor:
        """The tokens (T,) that follow the positions from the last entry to `end` - 1."""
        return torch.tensor(context[self._cached + 1 : end + 1], device=self.model.device)


class HeadSession(FeatureSession):
    """A session of a stepwise drafter. Cache entry i joins what is known after token i with token i + 1, and predicts
    token i + 2.
    """

    model: StepwiseDrafter

    def _reset(self) -> None:
        super()._reset()
        self._state: Tensor | None = None  # (1, H) of the last entry
        self._logits: Tensor | None = None  # (1, V) of this state

    @torch.no_grad()
    def feed(self, context: list[int], keep: int) -> Tensor:
        assert keep == 1
        # n tokens give n - 1 entries: each needs the token after it.
        while self._cached < len(context) - 1:
            states = self._next_states()
            tokens = self._tokens_after(context, self._cached + len(states))
            # As for the target: a prompt is read by the same operations in every run, which may be faster ones.
            with prefill_pass(len(tokens) > MAX_WIDTH):
                for part in zip(states.split(PREFILL_CHUNK), tokens.split(PREFILL_CHUNK), strict=True):
                    self._add_entries(*part)
        assert self._logits is not None
        return self._logits

    def _add_entries(self, states: Tensor, tokens: Tensor) -> None:
        """Extend the cache by states (T, H) and the tokens (T,) that follow."""
        self._state, self._logits = self.model.add_entries(states, tokens, self._cached, self._cache)
        self._cached += len(tokens)

    def _next_states(self) -> Tensor:
        """States (T, H) after the tokens from the last entry: from the target's features, or the drafter's own last
        one.
        """
        if self._waiting:
            return self.model.fuse_features(self._take_waiting())
        assert self._state is not None
        return self.model.feedback(self._state)

    def rewind(self, length: int) -> None:
        """Forget the entries made from the drafter's own states, and those after the first `length` positions."""
        kept = min(self._cached, self._known, length)
        if kept < self._cached:
            self._cache.crop(kept - self._cached)
            self._cached = kept


class BlockSession(FeatureSession):
    """A session of a block drafter. The first feed after a rewind computes the drafts' logits, and further ones look
    them up.
    """

    model: BlockDrafter

    def _reset(self) -> None:
        super()._reset()
        self.block_size = self.model.block_size
        self._block: Tensor | None = None  # logits (K, V) of what follows the tokens that the target has read
        self._conditioned = 0  # rows of the block whose logits were needed

    def room(self, context: list[int]) -> int | None:
        """How many more tokens it can predict: at most a block, of which forced tokens take rows."""
        room, left = super().room(context), self.block_size - (len(context) - 1 - self._known)
        return left if room is None else min(room, left)

    @torch.no_grad()
    def feed(self, context: list[int], keep: int) -> Tensor:
        assert keep == 1
        if self._block is None:
            features, tokens = self._take_waiting(), self._tokens_after(context, self._known)
            self._block = self.model.block_logits(features, tokens, self._cached, self._cache)
            self._cached, self._conditioned = self._known, 0
        row = len(context) - 1 - self._known
        for index in range(min(self._conditioned, row), row + 1):  # each after the token before it
            logits = self.model.conditioned(
                self._block[index : index + 1], index, context[self._known + index], self._cache
            )
        self._conditioned = row + 1
        return logits

    def confidence(self, context: list[int]) -> float | None:
        return self.model.confidence(len(context) - 1 - self._known, context[-1], self._cache)

    def rewind(self, length: int) -> None:
        """Forget the block. The cache holds nothing of it."""
        self._block = None


def feature_session(model: FeatureDrafter) -> FeatureSession:
    if isinstance(model, BlockDrafter):
        return BlockSession(model)
    assert isinstance(model, StepwiseDrafter)
    return HeadSession(model)
