"""Check that a model consists of modules and parameters that the reader of decoders knows, unchanged."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel, activations

from utils.engine.stored_weights import source_of

# The classes of a family, after its own name: LlamaAttention, Gemma3TextModel.
OWN_CLASSES = (
    *("ForCausalLM", "Model", "TextModel", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding"),
    "TextScaledWordEmbedding",
)
# Dropout does nothing outside training.
SHARED_CLASSES = (nn.ModuleList, nn.Linear, nn.Embedding, nn.Dropout)
# The modules that compute a function of ACTIVATIONS. NewGELU is the same formula as the tanh approximation of GELU.
ACTIVATION_NAMES: dict[type[nn.Module], str] = {
    activations.SiLUActivation: "silu",
    nn.SiLU: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_pytorch_tanh",
    activations.NewGELUActivation: "gelu_pytorch_tanh",
    nn.ReLU: "relu",
}
# Transformers reads hidden states with hooks that do not change them.
HARMLESS_HOOKS = "transformers.utils.output_capturing"


class Unreadable(Exception):
    """Why a model cannot be read, as a clause."""


def check_modules(model: PreTrainedModel) -> None:
    """Raise Unreadable if a module is of an unknown class, or if something may change what it computes."""
    source, family = type(model).__module__, type(model).__name__.removesuffix("ForCausalLM")
    if not source.startswith("transformers.models."):
        raise Unreadable(f"its class {type(model).__name__} is not one of transformers")
    own = {f"{family}{name}" for name in OWN_CLASSES}
    for name, module in model.named_modules():
        kind = type(module)
        known = kind.__module__ == source and kind.__name__ in own
        if not known and kind not in SHARED_CLASSES and kind not in ACTIVATION_NAMES:
            raise Unreadable(f"its module {name or 'itself'} is of the unknown class {kind.__name__}")
        if module.training and kind is not nn.ModuleList:  # a layer cut has a new list, which computes nothing
            raise Unreadable("it is in training mode")
        if "forward" in vars(module) or any(map(_changes, _hooks(module))):
            raise Unreadable(f"a hook changes its module {name}" if name else "a hook changes its forward pass")


def _hooks(module: nn.Module) -> list[Callable[..., object]]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _changes(hook: Callable[..., object]) -> bool:
    return getattr(hook, "__module__", "") != HARMLESS_HOOKS and not getattr(hook, "keeps_outputs", False)


def check_parameters(model: PreTrainedModel) -> None:
    """Raise Unreadable unless all parameters are ordinary tensors of one floating-point format on one device."""
    formats, devices = set(), set()
    for name, parameter in model.named_parameters():
        # Quantized and distributed tensors are of other classes.
        if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
            raise Unreadable(f"its parameter {name} is not an ordinary floating-point tensor")
        formats.add(parameter.dtype)
        if source_of(parameter) is None:  # engines read weights that are in files
            devices.add(parameter.device)
    if len(formats) != 1:
        raise Unreadable("its parameters have several number formats")
    if len(devices) > 1:
        raise Unreadable("its layers are spread over several devices")
    if devices == {torch.device("meta")}:
        raise Unreadable("its parameters are not in memory")
