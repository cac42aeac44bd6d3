"""Drafters that read the target's hidden states: with one pass for each draft, or one for all drafts of a round.

Their sessions answer like those of a model, so drawing drafts and sharing noise work as for any model. Such a drafter
can also decode alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sampling.drafters.model import ModelDrafter
from utils.decode.decoding import Decoding
from utils.decode.drafts import NO_DRAFT, Draft, Verified
from utils.decode.engine_forward import MAX_WIDTH, PREFILL_CHUNK, prefill_pass
from utils.decode.grammar import Grammar
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
                for before, after in zip(states.split(PREFILL_CHUNK), tokens.split(PREFILL_CHUNK), strict=True):
                    self._state, self._logits = self.model.add_entries(before, after, self._cached, self._cache)
                    self._cached += len(after)
        assert self._logits is not None
        return self._logits

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


class HeadDrafter(ModelDrafter):
    """Drafts with a head. The target's session must keep the features that it reads (`FeatureDrafter.feature_layers`).

    It declines until the first round has brought the prompt's features. With `prefilled`, the features of the prompt
    without its last token (T, F), it also drafts in the first round. `not_needed` is called when a run begins in which
    it will not draft.
    """

    def __init__(
        self,
        session: FeatureSession,
        decoding: Decoding,
        vocab_size: int,
        *,
        prefilled: Tensor | None = None,
        not_needed: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        """`options` are the keywords of ModelDrafter."""
        super().__init__(session, decoding, vocab_size, block=session.block_size, **options)
        self._head, self._prefilled, self._not_needed = session, prefilled, not_needed
        self._rests = False  # in this run it will not draft

    def begin(self, prompt: list[int], context: list[int]) -> None:
        super().begin(prompt, context)
        self._rests = False
        if self._not_needed is not None and self._adaptive is not None and self._adaptive.never_drafts:
            self._rests = True
            self._not_needed()  # the target's features of a long prompt take time as well
        elif self._prefilled is not None:
            self._head.add_features(self._prefilled, 0, len(self._prefilled))

    def propose(self, context: list[int], count: int) -> Draft:
        return NO_DRAFT if self._rests else super().propose(context, count)

    def _confidence(self, context: list[int], logits: Tensor) -> float:
        own = self._head.confidence(context)
        return super()._confidence(context, logits) if own is None else own

    def commit(self, context: list[int], verified: Verified) -> None:
        if self._rests:
            return
        # Before the new features are added: this rewind drops the entries made from the head's own states.
        super().commit(context, verified)
        if verified.features is None:
            raise UserError(
                "This drafter reads the target's hidden states: open its session with features=drafter.feature_layers."
            )
        first = verified.start + len(verified.logits) - 1 - len(verified.features)  # the last row is the last draft's
        # Up to the last token, which the target has not been fed.
        self._head.add_features(verified.features, first, len(context) - 1)


class FreeHead(HeadSession):
    """A head that decodes alone after the target's features of the prompt: its own text, without corrections."""

    def __init__(
        self, model: StepwiseDrafter, target: Any, *, use_cache: bool = True, grammar: Grammar | None = None
    ) -> None:
        super().__init__(model)
        self._grammar, self._origin = grammar, 0
        layers = model.feature_layers
        self._target = ModelSession(target, use_cache=use_cache, rewinds=False, features=layers)

    def begin(self, prompt: list[int]) -> list[int]:
        """Raises UserError for a prompt of one token: the target has no features before it."""
        context = self._target.begin(prompt)
        if len(context) < 2:
            raise UserError("A drafter that reads hidden states needs a prompt of at least two tokens to run alone.")
        super().begin(prompt)
        self._origin = len(context)
        # The last token enters the head by its embedding only.
        self._target.feed(context[:-1], keep=1)
        features = self._target.take_features()
        assert features is not None
        self.add_features(features, 0, len(context) - 1)
        return context

    def feed(self, context: list[int], keep: int) -> Tensor:
        logits = super().feed(context, keep)
        return logits if self._grammar is None else self._grammar.masked(logits, context[self._origin :])
