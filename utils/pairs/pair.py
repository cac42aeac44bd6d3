"""A loaded pair: a target, its drafter and what is known about both, such as the number format and size of weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from utils.engine import Engine
from utils.models.feature_drafter import FeatureDrafter
from utils.models.memory import stored_bytes
from utils.models.quantization import has_nf4_kernel
from utils.pairs.compatibility import Compatibility
from utils.pairs.request import PairRequest
from utils.text import byte_size

ROUNDED = ("bfloat16", "int8", "int4")  # engine weights that differ from those of the checkpoint


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models, ready to decode. Everything about the drafter is None without one.

    `drafter_kind` is "model", "layers:K", "head", or the name of a published format, such as "EAGLE-3". `device` and
    `drafter_device` are where the weights are. `quantize` and `drafter_quantize` are one of utils.bounds.QUANTIZATIONS.
    `notes` are messages for the user. `request` has no defaults filled in. `drafter_tokenizer` is set if it differs
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

    # Counted at each access, because the engine replaces weights after loading.
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
        """The target's hidden states that the drafter reads, if any."""
        return self.drafter.feature_layers if isinstance(self.drafter, FeatureDrafter) else ()


def describe_target(pair: Pair) -> str:
    """Number format and size of the target's weights."""
    return _description(pair, pair.dtype, pair.quantize, pair.memory)


def describe_drafter(pair: Pair) -> str:
    """Number format and size of the drafter's weights that it does not share with the target."""
    if pair.drafter is None:
        return "none"
    return _description(pair, str(pair.drafter_dtype), pair.drafter_quantize or "none", pair.drafter_memory)


def loaded_message(pair: Pair) -> str:
    """The message after loading a pair."""
    drafter = "" if pair.drafter is None else f"; {pair.drafter_name} ({describe_drafter(pair)})"
    return f"loaded {pair.target_name} ({describe_target(pair)}){drafter}"


def weight_notes(pair: Pair) -> Iterator[str]:
    """Messages for the user: where equal texts cannot be guaranteed, and where quantization makes a model slower."""
    name = pair.target_name
    if (kind := pair.request.engine_weights) in ROUNDED:
        yield f"with {kind} weights {name} is a different model, compared only with itself"
    reason = (
        ""
        if pair.dtype == "float32"
        else f"in {pair.dtype} the rounding of {name}'s logits depends on the verify width"
    )
    if depends_on_width(pair):
        reason = (
            f"bnb-int8 searches all positions of a verify pass for outliers, so {name}'s logits depend on its width"
        )
    if reason:
        yield f"{reason}: texts can differ where two tokens are close, unless the engine is verified (see /audit)"
    weights = [(pair.quantize, pair.dtype, pair.device, name)]
    if pair.drafter_kind == "model":
        drafter = (pair.drafter_quantize, pair.drafter_dtype, pair.drafter_device, pair.drafter_name)
        weights.append(tuple(map(str, drafter)))  # type: ignore[arg-type]
    for quantize, dtype, device, name in weights:
        if _is_slow(quantize, dtype, device):
            yield f"{quantize} saves memory but not time: on this CPU {name} is slower than in float32"


def depends_on_width(pair: Pair) -> bool:
    """Whether the target's logits depend on the verify width by more than rounding.

    bnb-int8 keeps columns with outliers in full precision, and searches all rows of a pass for them.
    """
    return pair.quantize == "bnb-int8"


def _description(pair: Pair, dtype: str, quantize: str, memory: int | None) -> str:
    size = byte_size(memory) if memory else "shared with the target"
    kernels = ""
    if (weights := pair.request.engine_weights) != "float32":
        kernels = f"{weights} kernels"
        if pair.engine.state.weights != weights:  # loading is finished, and the engine has not begun
            kernels, size = f"{weights} kernels when the engine starts", ""
    return ", ".join(filter(None, (dtype, "" if quantize == "none" else quantize, kernels, size)))


def _is_slow(quantize: str, dtype: str, device: str) -> bool:
    """Whether a CPU unpacks the weights in every forward, which takes longer than to multiply float32 weights."""
    if device != "cpu" or quantize == "none":
        return False
    # Only in bfloat16 is there no loss of time: with int8, and with nf4 where bitsandbytes has a kernel.
    return dtype != "bfloat16" or not (quantize == "int8" or (quantize == "nf4" and has_nf4_kernel()))
