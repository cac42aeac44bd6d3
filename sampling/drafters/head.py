"""A head as a drafter: a session that goes on from the target's hidden states where there are any, and from its own where there are none.

The session answers like that of a model, so that drawing drafts, sharing noise and plain decoding are what they are for any model.
"""

from typing import Any

import torch
from torch import Tensor

from sampling.adaptive_gamma import DraftLength
from sampling.drafters.model import ModelDrafter, Verified
from utils.decode.decoding import Decoding
from utils.decode.kv_cache import growing_cache
from utils.decode.model_session import ModelSession, context_length, model_name, vocabulary_size
from utils.errors import UserError
from utils.models.draft_head import Grafted


class HeadSession:
    """One run's use of a head. Entry i joins what is known behind token i with token i + 1, and tells of token i + 2.

    It has room for drafts once `see` has brought it features of the target.
    """

    def __init__(self, model: Grafted) -> None:
        self.model = model
        self.name = f"the head of {model_name(model)}"
        self.vocab_size = vocabulary_size(model)
        self.context_length = context_length(model)
        self._reset()

    def _reset(self) -> None:
        self._cache = growing_cache(self.model.config)
        self._held = 0  # entries in the cache
        self._seen = 0  # positions whose features have come
        self._waiting: Tensor | None = None  # features (T, F) of positions that have no entry yet
        self._state: Tensor | None = None  # (1, H) of the last entry

    def begin(self, prompt: list[int]) -> list[int]:
        """A new run."""
        self._reset()
        return list(prompt)

    def room(self, context: list[int]) -> int | None:
        """How many more tokens it can tell of."""
        if not self._seen:
            return 0
        return None if self.context_length is None else self.context_length - len(context)

    def see(self, features: Tensor, first: int, known: int) -> None:
        """Features (T, F) of the positions from `first`; those that are new and below `known` are kept."""
        new = features[self._seen - first : known - first]
        self._waiting = new if self._waiting is None else torch.cat([self._waiting, new])
        self._seen = known

    @torch.no_grad()
    def feed(self, context: list[int], keep: int) -> Tensor:
        """Logits (1, V) of what follows the context; `keep` is 1. Each call brings at most one token that was not there at the last."""
        assert keep == 1
        end = len(context) - 1
        if end > self._held:
            before = self._before(end)
            tokens = torch.tensor([context[self._held + 1 : end + 1]], device=self.model.device)
            places = torch.arange(self._held, end, device=self.model.device)[None]
            self._state = self.model.state(before[None], tokens, places, self._cache)[0, -1:]
            self._held = end
        assert self._state is not None
        return self.model.logits(self._state)

    def _before(self, end: int) -> Tensor:
        """What is known behind the tokens from `held` to `end` - 1, (T, H): the target's features of them, or the last state."""
        if self._waiting is None:
            assert self._state is not None and end == self._held + 1
            return self._state
        features, self._waiting = self._waiting, None
        assert len(features) == end - self._held
        return self.model.head.guess(features)

    def rewind(self, length: int) -> None:
        """Forget the entries that were made of guesses, and those behind the first `length` positions."""
        kept = min(self._held, self._seen, length)
        if kept < self._held:
            self._cache.crop(kept - self._held)
            self._held = kept


class HeadDrafter(ModelDrafter):
    """Drafts with a head; the target's session must keep the features that it reads (`Grafted.head.shape.layers`).

    It declines until the first round has brought it those of the prompt. read: those of the prompt but for its last token (T, F), where
    the target had read that before; then it drafts in the first round too.
    """

    def __init__(
        self,
        session: HeadSession,
        decoding: Decoding,
        vocab_size: int,
        *,
        shares_noise: bool = False,
        length: DraftLength | None = None,
        read: Tensor | None = None,
    ) -> None:
        super().__init__(session, decoding, vocab_size, shares_noise=shares_noise, length=length)
        self._head, self._read = session, read

    def begin(self, prompt: list[int], context: list[int]) -> None:
        super().begin(prompt, context)
        if self._read is not None:
            self._head.see(self._read, 0, len(self._read))

    def commit(self, context: list[int], verified: Verified) -> None:
        super().commit(context, verified)
        if verified.features is None:
            raise UserError(
                "A head drafts from the target's hidden states: give the target's session features=head.shape.layers."
            )
        first = (
            verified.start + len(verified.logits) - 1 - len(verified.features)
        )  # the last row fed is the last draft's
        self._head.see(verified.features, first, len(context) - 1)


class FreeHead(HeadSession):
    """A head that is left alone with the target's features of the prompt: what it writes when nobody corrects it."""

    def __init__(self, model: Grafted, target: Any, *, use_cache: bool = True) -> None:
        super().__init__(model)
        self._target = ModelSession(target, use_cache=use_cache, rewinds=False, features=model.head.shape.layers)

    def begin(self, prompt: list[int]) -> list[int]:
        """Raises UserError for a prompt of one token: there is nothing before it that the target has read."""
        context = self._target.begin(prompt)
        if len(context) < 2:
            raise UserError("A head alone needs a prompt of two tokens or more.")
        super().begin(prompt)
        self._target.feed(context[:-1], keep=1)
        features = self._target.take_features()
        assert features is not None
        self.see(features, 0, len(context) - 1)
        return context
