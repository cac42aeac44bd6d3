"""What every engine provides, and the plain one. `utils.engine.engine` lists the engines and chooses one."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from utils.decode.engine_forward import EngineForward
from utils.decode.model_info import is_spread
from utils.engine.stored_weights import fill, release
from utils.engine.weight_format import EngineWeights, placeholder_bytes, tensor_bytes

Report = Callable[[str], None]  # shows how far a step has got
# Of a self-test: that of a first start, that of a later one, which repeats little of it, or more than a start does.
Extent = Literal["first", "later", "complete"]
BIT_IDENTICAL = "bit-identical at every verify width"
NO_PROMISE = "rounding depends on the verify width"


def unreported(text: str) -> None:
    """Show nothing."""


class PlainEngine:
    """The models as PyTorch and transformers compute them, and the base of every other way to compute their layers.

    models: the target, then the drafter if there is one. helpers: modules that are computed the same way but not
    tested, such as a draft head, whose drafts are verified in any case; the owner of this list may change it. weights:
    the format of linear weights; another than the loaded one cannot be undone.

    Nothing changes before `install`, and after `remove` an engine can be installed again. Reasons are clauses without a
    full stop, such as "it is an encoder-decoder model". An empty string means that there is none.
    """

    promise = ""  # BIT_IDENTICAL, or empty. The self-test holds the engine to it
    has_own_forward = False  # whether it replaces transformers' forward pass, too; with False set, it does not

    def __init__(self, models: Sequence[PreTrainedModel], helpers: Sequence[nn.Module], weights: EngineWeights) -> None:
        self._models, self._helpers, self._format = models, helpers, weights
        self._attention = [model.config._attn_implementation for model in models]  # another engine may change it
        self._replaced: list[tuple[PreTrainedModel, Any]] = []  # models, and forward passes that were set on them

    def unsupported(self) -> str:
        """Return why these models cannot be computed this way."""
        return "" if self._format.as_loaded else f"it has no {self._format.format} weights"

    def need(self) -> int:
        """Return the bytes of memory that the installed engine takes beyond what the models hold without it."""
        return placeholder_bytes(self._models)

    def install(self, report: Report = unreported) -> str:
        """Replace the layers, one at a time. Returns why that is not possible."""
        if self.need():
            report("reading the weights")
        fill(self._models)
        self.compute(self._helpers)
        return ""

    def compute(self, helpers: Sequence[nn.Module]) -> None:
        """Compute helpers in the installed engine, as far as that is not so yet."""
        fill(helpers)

    def self_test(self, thread_count: int, report: Report = unreported, extent: Extent = "first") -> str:
        """Test what the installed layers promise, with this number of threads. Returns why the test failed."""
        return ""

    def nbytes(self) -> int:
        """Return the bytes of the weights of all models as they are held now."""
        return tensor_bytes([*self._models, *self._helpers])

    def _replace_forward(self, model: PreTrainedModel, forward: EngineForward) -> None:
        self._replaced.append((model, vars(model).get("forward")))
        model.forward = cast(Any, forward)

    def remove(self) -> None:
        """Put the plain layers back, and leave weights to their files again."""
        for model, own in self._replaced:
            vars(model).pop("forward", None)
            if own is not None:  # of a library, such as accelerate
                model.forward = own
        self._replaced = []
        for helper in self._helpers:
            vars(helper).pop("compiled", None)
        release([*self._models, *self._helpers])


def install_with_fallback(engine: PlainEngine, report: Report, differs: Callable[[], str] = str) -> str:
    """Install an engine, with transformers' forward pass if its own one fails. Returns why that failed.

    differs: returns how the logits of the installed engine differ from what is expected.
    """
    failure = engine.install(report) or differs()
    if failure and engine.has_own_forward:
        report(f"using transformers' forward pass, because of {failure}")
        engine.remove()
        engine.has_own_forward = False
        failure = engine.install(report) or differs()
    return failure


def attention_problem(model: PreTrainedModel, device_type: str) -> str:
    """Return why a model is not one of full or sliding attention on one device of this type."""
    if is_spread(model):
        return "its layers are spread over several devices"
    if model.device.type != device_type:
        return f"it needs a model on {device_type}, and this one is on {model.device.type}"
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if not layers or layers - {DynamicLayer, DynamicSlidingWindowLayer} or getattr(model, "_is_stateful", False):
        return "some of its layers are neither full nor sliding attention"
    return ""
