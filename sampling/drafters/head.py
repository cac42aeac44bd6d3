"""Drafters that read the target's hidden states: one pass for each draft, or one for all drafts of a round.

Their sessions answer like those of a model, so drawing drafts and sharing noise work as for any model.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from sampling.adaptive_gamma import AdaptiveGamma
from sampling.drafters.model import ModelDrafter
from utils.decode.decoding import Decoding
from utils.decode.drafts import Verified
from utils.decode.kv_cache import new_cache
from utils.decode.model_info import context_length, model_name, vocabulary_size
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.models.feature_drafter import BlockDrafter, FeatureDrafter, StepwiseDrafter


class FeatureSession(ABC):
    """One run's use of a drafter that reads the target's hidden states.

    It has room for drafts once `add_features` has brought it features of the target.
    """

    block_size = 1  # drafts that a pass gives

    def __init__(self, model: FeatureDrafter) -> None:
        self.name = f"the head of {model_name(model)}"
        self.vocab_size = vocabulary_size(model)
        self.context_length = context_length(model)
        self._device = model.device
        self._reset()

    def _reset(self) -> None:
        self._cache = self._new_cache()
        self._cached = 0  # entries in the cache
        self._known = 0  # positions whose features have arrived
        self._pending: Tensor | None = None  # features (T, F) of positions that have no entry yet

    @abstractmethod
    def _new_cache(self) -> Any: ...

    @abstractmethod
    def feed(self, context: list[int], keep: int) -> Tensor:
        """Logits (1, V) for the next token; `keep` is 1. Each call adds at most one token that was not in the last
        context.
        """

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Forget the drafts, and what was made from them."""

    def confidence(self, context: list[int]) -> float | None:
        """The drafter's own estimate that the draft after this context, which was fed last, is accepted; None if it has
        no such estimate.
        """
        return None

    def begin(self, prompt: list[int]) -> list[int]:
        """Start a run."""
        self._reset()
        return list(prompt)

    def room(self, context: list[int]) -> int | None:
        """How many more tokens it can predict."""
        if not self._known:
            return 0
        return None if self.context_length is None else self.context_length - len(context)

    def add_features(self, features: Tensor, first: int, known: int) -> None:
        """Add features (T, F) of the positions from `first`. Those that are new and below `known` are kept."""
        new = features[self._known - first : known - first]
        self._pending = new if self._pending is None else torch.cat([self._pending, new])
        self._known = known

    def _tokens_after(self, context: list[int], end: int) -> Tensor:
        """The tokens (T,) that follow the positions from the last entry to `end` - 1."""
        return torch.tensor(context[self._cached + 1 : end + 1], device=self._device)


class HeadSession(FeatureSession):
    """A session of a stepwise drafter. Cache entry i joins what is known after token i with token i + 1, and predicts
    token i + 2.
    """

    def __init__(self, model: StepwiseDrafter) -> None:
        self.model = model
        super().__init__(model)

    def _reset(self) -> None:
        super()._reset()
        self._state: Tensor | None = None  # (1, H) of the last entry

    def _new_cache(self) -> Any:
        return new_cache(self.model.config)

    @torch.no_grad()
    def feed(self, context: list[int], keep: int) -> Tensor:
        assert keep == 1
        end = len(context) - 1  # n tokens give n - 1 entries: each needs the token after it
        if end > self._cached:
            states, tokens = self._states_before(end), self._tokens_after(context, end)
            positions = torch.arange(self._cached, end, device=self._device)[None]  # (1, T)
            self._state = self.model.next_states(states[None], tokens[None], positions, self._cache)[0, -1:]
            self._cached = end
        assert self._state is not None
        return self.model.logits(self._state)

    def _states_before(self, end: int) -> Tensor:
        """States (T, H) after the tokens from the last entry to `end` - 1: from the target's features, or the head's
        own last one.
        """
        if self._pending is None:
            assert self._state is not None and end == self._cached + 1
            return self.model.feedback(self._state)
        features, self._pending = self._pending, None
        assert len(features) == end - self._cached
        return self.model.fuse_features(features)

    def rewind(self, length: int) -> None:
        """Forget the entries made from the head's own states, and those after the first `length` positions."""
        kept = min(self._cached, self._known, length)
        if kept < self._cached:
            self._cache.crop(kept - self._cached)
            self._cached = kept


class BlockSession(FeatureSession):
    """A session of a block drafter. The first feed after a rewind computes the drafts' logits, and further ones look
    them up.
    """

    def __init__(self, model: BlockDrafter) -> None:
        self.model, self.block_size = model, model.block_size
        super().__init__(model)

    def _reset(self) -> None:
        super()._reset()
        self._block: tuple[int, Tensor] | None = None  # context length, and logits (K, V) of what follows

    def _new_cache(self) -> Any:
        return self.model.new_cache()

    def room(self, context: list[int]) -> int | None:
        """How many more tokens it can predict: at most a block."""
        room = super().room(context)
        return self.block_size if room is None else min(room, self.block_size)

    @torch.no_grad()
    def feed(self, context: list[int], keep: int) -> Tensor:
        assert keep == 1
        if self._block is None:
            end, features = len(context) - 1, self._pending
            assert features is not None and len(features) == end - self._cached
            tokens = self._tokens_after(context, end)
            self._block = len(context), self.model.block_logits(features, tokens, self._cached, self._cache)
            self._cached, self._pending = end, None
        start, rows = self._block
        row = len(context) - start
        return self.model.conditioned(rows[row : row + 1], row, context[-1], self._cache)

    def confidence(self, context: list[int]) -> float | None:
        assert self._block is not None
        return self.model.confidence(len(context) - self._block[0], context[-1], self._cache)

    def rewind(self, length: int) -> None:
        """Forget the block. The cache holds nothing of it."""
        self._block = None


def feature_session(model: FeatureDrafter) -> FeatureSession:
    """A session of a drafter that reads hidden states."""
    if isinstance(model, BlockDrafter):
        return BlockSession(model)
    assert isinstance(model, StepwiseDrafter)
    return HeadSession(model)


class HeadDrafter(ModelDrafter):
    """Drafts with a head. The target's session must keep the features that it reads (`FeatureDrafter.feature_layers`).

    It declines until the first round has brought the prompt's features. prefilled: the features of the prompt without
    its last token (T, F), if the target computed them earlier; then it drafts in the first round too.
    """

    def __init__(
        self,
        session: FeatureSession,
        decoding: Decoding,
        vocab_size: int,
        *,
        shares_noise: bool = False,
        adaptive: AdaptiveGamma | None = None,
        observed: bool = False,
        prefilled: Tensor | None = None,
    ) -> None:
        super().__init__(
            session,
            decoding,
            vocab_size,
            shares_noise=shares_noise,
            adaptive=adaptive,
            observed=observed,
            block=session.block_size,
        )
        self._head, self._prefilled = session, prefilled

    def begin(self, prompt: list[int], context: list[int]) -> None:
        super().begin(prompt, context)
        if self._prefilled is not None:
            self._head.add_features(self._prefilled, 0, len(self._prefilled))

    def _confidence(self, context: list[int], logits: Tensor) -> float:
        own = self._head.confidence(context)
        return super()._confidence(context, logits) if own is None else own

    def commit(self, context: list[int], verified: Verified) -> None:
        # Before the new features are added: this rewind drops the entries made from the head's own states.
        super().commit(context, verified)
        if verified.features is None:
            raise UserError(
                "A head drafts from the target's hidden states: open its session with features=head.feature_layers."
            )
        first = verified.start + len(verified.logits) - 1 - len(verified.features)  # the last row is the last draft's
        # Up to the last token, which the target has not been fed.
        self._head.add_features(verified.features, first, len(context) - 1)


class FreeHead(HeadSession):
    """A head that decodes alone after the target's features of the prompt: its own text, without corrections."""

    def __init__(self, model: StepwiseDrafter, target: Any, *, use_cache: bool = True) -> None:
        super().__init__(model)
        layers = model.feature_layers
        self._target = ModelSession(target, use_cache=use_cache, rewinds=False, features=layers)

    def begin(self, prompt: list[int]) -> list[int]:
        """Raises UserError for a prompt of one token: the target has no features before it."""
        context = self._target.begin(prompt)
        if len(context) < 2:
            raise UserError("A head alone needs a prompt of at least two tokens.")
        super().begin(prompt)
        # The last token enters the head by its embedding only.
        self._target.feed(context[:-1], keep=1)
        features = self._target.take_features()
        assert features is not None
        self.add_features(features, 0, len(context) - 1)
        return context
