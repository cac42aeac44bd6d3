"""Drafters that read the target's hidden states, with sessions of their own, and such a drafter decoding alone."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sampling.drafters.feature_sessions import FeatureSession, HeadSession
from sampling.drafters.model import ModelDrafter
from utils.decode.decoding import Decoding
from utils.decode.drafts import Verified
from utils.decode.grammar import Grammar
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.models.feature_drafter import StepwiseDrafter


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

    def _confidence(self, context: list[int], logits: Tensor) -> float:
        own = self._head.confidence(context)
        return super()._confidence(context, logits) if own is None else own

    def commit(self, context: list[int], verified: Verified) -> None:
        # Before the new features are added: this rewind drops the entries made from the head's own states.
        super().commit(context, verified)
        if self._rests:
            return
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
