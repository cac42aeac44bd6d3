"""A drafter cut out of the target: its embedding, its first blocks, its final norm and its head.

It costs no memory and needs no download. Every module gets an empty shell that shares the target's tensors, created
without calling a constructor, so this works for any class and for quantized weights. Hooks, configs and caches of one
model never reach the other.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from utils.decode.engine_forward import engine_forward
from utils.decode.model_info import is_spread, model_name
from utils.errors import UserError
from utils.text import count_of


def default_depth(model: PreTrainedModel) -> int | None:
    """A third of the blocks, at least one, or None if the model cannot be cut."""
    try:
        return max(1, len(_blocks(model, _stack_path(model))) // 3)
    except UserError:
        return None


def first_layers(model: PreTrainedModel, depth: int) -> PreTrainedModel:
    """A model made of the first `depth` blocks of `model`, sharing every weight with it.

    Quantize before cutting: modules that are replaced in the target later are not replaced in the cut.

    Raises UserError if the model has no stack of blocks to cut, or if `depth` is not in 1..blocks-1.
    """
    check_depth(model, depth)
    return chosen_layers(model, range(depth))


def check_depth(model: PreTrainedModel, depth: int) -> None:
    """Raise UserError as `first_layers` does."""
    count = len(_blocks(model, _stack_path(model)))
    if not 1 <= depth < count:
        raise UserError(
            f"layers:{depth} cannot be cut from {model_name(model)}: it has {count_of(count, 'layer')}, so K must be "
            f"in 1..{count - 1}."
        )


def chosen_layers(model: PreTrainedModel, indices: Sequence[int]) -> PreTrainedModel:
    """A model made of some blocks of `model`, in this order, sharing every weight with it.

    Only the first blocks can be chosen of a model that an engine computes. Raises UserError as `first_layers` does.
    """
    path = _stack_path(model)
    # deepcopy's memo maps every config to its copy, nested ones too; the mirror replaces them wherever they occur.
    memo: dict[int, Any] = {}
    config = copy.deepcopy(model.config, memo)
    _choose(config.get_text_config(decoder=True), len(_blocks(model, path)), indices)
    cut = _mirror(model, memo)
    # Not a PreTrainedConfig, so the mirror still shares it with the target.
    cut.generation_config = copy.deepcopy(model.generation_config)
    blocks = [_blocks(cut, path)[index] for index in indices]
    for index, block in enumerate(blocks):
        for part in block.modules():  # attention finds its part of a cache by this number
            if hasattr(part, "layer_idx"):
                part.layer_idx = index
    cut.set_submodule(path, nn.ModuleList(blocks))
    # The forward pass of an engine belongs to the whole model, so the cut gets one of its own.
    if forward := engine_forward(model):
        cut.forward = forward.for_cut(cut)
    _check_runs(cut)
    return cut


def shell(model: PreTrainedModel) -> PreTrainedModel:
    """A model of new modules that share every weight with those of `model`, with a config of its own."""
    memo: dict[int, Any] = {}
    copy.deepcopy(model.config, memo)
    twin: PreTrainedModel = _mirror(model, memo)
    return twin


def layer_kinds(model: PreTrainedModel) -> list[object]:
    """The kinds of blocks of a model, by their type in the config and the shapes of their weights.

    Raises UserError as `first_layers` does.
    """
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    blocks = _blocks(model, _stack_path(model))
    shapes = [tuple((name, tuple(part.shape)) for name, part in block.named_parameters()) for block in blocks]
    return [(types[index] if types else None, shape) for index, shape in enumerate(shapes)]


def _mirror(module: nn.Module, memo: dict[int, Any]) -> Any:
    """A new object of the same class, with the same tensors and with mirrored children."""
    if id(module) not in memo:
        # Stored before the children are visited: a shared module stays shared, and a cycle ends.
        twin = memo[id(module)] = copy.copy(module)
        # A forward pass that was set on the instance, by accelerate or by an engine, would run the original's layers.
        vars(twin).pop("forward", None)
        for name, value in vars(module).items():
            if isinstance(value, dict):  # parameters, buffers, children, hooks: a new dict, the same values
                vars(twin)[name] = copy.copy(value)
            elif isinstance(value, PreTrainedConfig):
                vars(twin)[name] = memo.get(id(value), value)
        for name, child in module._modules.items():
            twin._modules[name] = child and _mirror(child, memo)
    return memo[id(module)]


def _choose(config: Any, count: int, indices: Sequence[int]) -> None:
    """Set the number of layers, and choose from the lists that have one entry per layer."""
    config.num_hidden_layers = len(indices)
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, list | tuple) and len(value) == count:
            setattr(config, name, type(value)(value[index] for index in indices))  # caches are built from these lists


def _stack_path(model: PreTrainedModel) -> str:
    """The dotted name of the list of decoder blocks. Raises UserError unless there is exactly one."""
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    lists: list[str] = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    # Lists inside a block (experts, for example) are nested deeper than the list of blocks.
    shallowest = min((name.count(".") for name in lists), default=0)
    outermost = [name for name in lists if name.count(".") == shallowest]
    if model.config.is_encoder_decoder:
        reason = "it is an encoder-decoder model"
    elif is_spread(model):
        reason = "its layers are spread over several devices"
    elif getattr(model, "_is_stateful", False):
        reason = "it is a recurrent model"
    elif count < 2:
        reason = "it has a single layer, or its config does not state the number"
    elif len(outermost) != 1:
        reason = "its blocks are not in one list"
    else:
        return outermost[0]
    raise UserError(f"{model_name(model)} cannot be cut into layers: {reason}; give a model as --drafter.")


def _blocks(model: PreTrainedModel, path: str) -> Any:
    return model.get_submodule(path)


def _check_runs(cut: PreTrainedModel) -> None:
    """Feed one token: some classes count their layers where no config field governs it, or need one layer of each
    type.
    """
    # A decoder whose weights are in files was read layer by layer or cut when it was loaded, so its cuts run.
    if any(part.is_meta for part in cut.parameters()):
        return
    try:
        with torch.no_grad():
            cut(input_ids=torch.zeros((1, 1), dtype=torch.long, device=cut.device), use_cache=True)
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{model_name(cut)} cannot be cut into layers: the cut model does not run; give a model as --drafter."
        ) from error
