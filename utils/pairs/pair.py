"""A loaded pair: a target, its drafter and what is known about both."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from utils.engine import Engine
from utils.models.feature_drafter import FeatureDrafter
from utils.models.stored_bytes import stored_bytes
from utils.pairs.compatibility import Compatibility
from utils.pairs.request import PairRequest


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models, ready to decode. Everything about the drafter is None without one.

    drafter_kind: "model", "layers:K", "head", or the name of a published drafter's format, such as "EAGLE-3". device,
    drafter_device: where the weights are. quantize, drafter_quantize: see utils.bounds.QUANTIZATIONS. notes: messages
    for the user. request: what was requested, defaults not filled in. drafter_tokenizer: the drafter's if it differs
    from the target's, so that drafts must be translated.
    """

    target: PreTrainedModel
    drafter: PreTrainedModel | FeatureDrafter | None
    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]
    target_name: str
    drafter_name: str | None
    drafter_kind: str | None
    device: str
    drafter_device: str | None
    dtype: str
    quantize: str
    drafter_quantize: str | None
    drafter_dtype: str | None
    engine: Engine
    notes: tuple[str, ...]
    request: PairRequest
    compatibility: Compatibility
    drafter_tokenizer: PreTrainedTokenizerBase | None

    # Counted when asked, because the engine replaces weights after loading.
    @property
    def memory(self) -> int:
        """Bytes of the target's weights as they are now."""
        return stored_bytes(self.target) + self.engine.unread_bytes(self.target)

    @property
    def drafter_memory(self) -> int | None:
        """Bytes of the drafter's weights as they are now, without those that it shares with the target."""
        if self.drafter is None:
            return None
        unread = self.engine.unread_bytes(self.drafter, besides=self.target)
        return stored_bytes(self.drafter, besides=self.target) + unread

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's hidden states that the drafter reads. Empty unless it reads some."""
        return self.drafter.feature_layers if isinstance(self.drafter, FeatureDrafter) else ()
