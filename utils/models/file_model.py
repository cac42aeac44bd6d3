"""Load a decoder whose linear weights stay in its safetensors files until an engine reads them, layer by layer.

Everything else (embedding, norms, biases) is read into memory. All weights are read once and checked. Models that no
engine packs are left to transformers' loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from utils.decode.generation_rules import GenerationRules
from utils.engine.invariant import packing_problem
from utils.engine.read_decoder import read_decoder
from utils.engine.stored_weights import RowTable, TableRows, fill_before_forward, placeholder, with_placeholder
from utils.engine.weight_format import NOT_POSSIBLE
from utils.errors import UserError
from utils.files import file_state, has_changed
from utils.models.memory import Placement, plan_memory
from utils.models.sources import (
    Source,
    StoredTensor,
    checkpoint_folder,
    downloaded_folder,
    stored_tensors,
    weight_files,
)
from utils.text import Count, byte_size

CHANGED = "{} has changed since it was loaded: load the model again (/load)."
FORMATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # the same names in GGUF files


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A `WeightSource` in a safetensors file, whose contents have this state. `dtype` is the model's number format."""

    tensor: StoredTensor
    state: str
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.tensor.name.removesuffix(".weight")

    @property
    def itemsize(self) -> int:
        return min(self.dtype.itemsize, FORMATS.get(self.tensor.kind, self.dtype).itemsize)

    def read(self) -> Tensor:
        # A copy ends the mapping of the file, so that its pages do not count as memory of this process.
        return self._mapped().to(self.dtype, copy=True)

    def stored(self) -> Tensor:
        mapped = self._mapped()
        return mapped if torch.promote_types(mapped.dtype, self.dtype) == self.dtype else mapped.to(self.dtype)

    def _mapped(self) -> Tensor:
        if has_changed(self.tensor.path, self.state):
            raise UserError(CHANGED.format(self.tensor.path))
        return self.tensor.read()


def load_from_files(
    source: Source, config: PreTrainedConfig, where: Placement
) -> tuple[PreTrainedModel, list[str]] | None:
    """Load a model without its linear weights. Returns it with the names of unused tensors in its files, or None if
    its files do not hold its weights by their names, or if no engine would pack them.

    Raises UserError for weights that do not fit into memory, are not finite or cannot be computed in their format.
    """
    if where.device != "cpu" or source.gguf:
        return None
    if config.is_encoder_decoder or getattr(config, "quantization_config", None):
        return None
    dtype = where.dtype if isinstance(where.dtype, torch.dtype) else config.dtype or torch.float32
    model = empty_model(config, dtype)
    if isinstance(read_decoder(model), str) and (problem := packing_problem(model)):
        if where.engine_weights != "float32":
            raise UserError(
                NOT_POSSIBLE.format(where.engine_weights, f"invariant does not support {source.name} ({problem})")
            )
        return None
    folder = downloaded_folder(source)
    if not (tensors := _tensors(folder, model, dtype)):
        return None
    size = byte_size(plan_memory(source, "none", where, in_files=True)[0])
    where.report(f"loading {source.name} ({where.device}, {str(dtype).removeprefix('torch.')}, {size}) ...")
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in _checked(source, tensors, where):
        if name in names:
            _place(model, name, tensors[name])
    model.tie_weights()
    if any(name not in tensors for name, _ in model.named_parameters()):  # shared in a way that tying does not restore
        return None
    finish(model, source.name, folder)
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    unused = sorted({*tensors} - names)
    return model, [name for name in unused if not any(re.search(pattern, name) for pattern in ignored)]


def check_tensor(tensor: Tensor, model: str, name: str) -> None:
    """Raise UserError if a weight of a model is NaN or infinite."""
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return
    # NaN and infinity propagate to the extremes, so no mask as large as the weight is needed.
    if not torch.isfinite(torch.stack(tensor.aminmax())).all():
        raise UserError(f"'{model}' holds NaN or infinite weights (in {name}): fetch or copy it again.")


def empty_model(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A model with weights that were not initialized. Memory that was never written uses none of the machine's."""
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def finish(model: PreTrainedModel, name: str, folder: Path) -> None:
    """Give a model its name and the generation config of a folder, and let transformers' own forward read the weights
    that are in files, if it is called. Raises UserError for rules of generation that are not valid.
    """
    model.name_or_path, model.generation_config = name, stored_generation_config(model, folder)
    GenerationRules.of(model)
    vars(model)["_in_files"] = True
    model.register_forward_pre_hook(fill_before_forward)


def stored_generation_config(model: PreTrainedModel, folder: Path) -> GenerationConfig:
    """The generation config in a folder, or else the model's own."""
    is_stored = (folder / "generation_config.json").is_file()
    return GenerationConfig.from_pretrained(folder) if is_stored else model.generation_config


def layer_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers of a decoder by name, without the output head, from which drafters read rows."""
    head = model.get_output_embeddings()
    return {name: part for name, part in model.named_modules() if type(part) is nn.Linear and part is not head}


def model_files(source: Source) -> list[Path]:
    """The files of a checkpoint that decide what it computes. Empty if they are not known."""
    if source.gguf:
        return [Path(source.location, source.gguf)]
    folder = checkpoint_folder(source)
    return [] if folder is None else [folder / "config.json", *filter(Path.is_file, weight_files(folder))]


def _tensors(folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, FileTensor]:
    """The tensors of a model's files by name. Empty if one is missing or of another shape or kind of format."""
    shapes = {name: tuple(part.shape) for name, part in model.named_parameters()}
    found: dict[str, FileTensor] = {}
    try:
        for path in filter(Path.is_file, weight_files(folder)):
            state = file_state(path)
            for tensor in stored_tensors(path):
                if tensor.name in shapes and (tensor.kind not in FORMATS or tensor.shape != shapes[tensor.name]):
                    return {}
                found[tensor.name] = FileTensor(tensor, state, dtype)
    except Exception:  # damaged files, which transformers' loader explains
        return {}
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    # Where a shared weight is stored twice, transformers compares the two.
    is_stored_twice = bool(found.keys() & (names - shapes.keys()))
    has_buffers = bool(model.state_dict().keys() - names)
    return found if shapes.keys() <= found.keys() and not is_stored_twice and not has_buffers else {}


def _checked(source: Source, tensors: Mapping[str, FileTensor], where: Placement) -> Iterator[str]:
    """Read all tensors once, one at a time. Raises UserError for one that is not finite."""
    total = sum(path.stat().st_size for path in {entry.tensor.path for entry in tensors.values()})
    done = 0
    for name, entry in tensors.items():
        # Opened for each tensor: pages that were read count as memory of this process until the file is closed.
        tensor = entry.tensor.read()
        check_tensor(tensor, source.name, name)
        done += tensor.nbytes
        del tensor
        where.report(Count(f"reading {source.name}: {byte_size(done)} of {byte_size(total)}"))
        yield name


def _place(model: PreTrainedModel, name: str, entry: FileTensor) -> None:
    """Give a model one of its tensors, or a placeholder for it."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if type(module) is nn.Linear and leaf == "weight":
        is_head = module is model.get_output_embeddings()
        made = with_placeholder(entry.read(), entry) if is_head else placeholder(module.weight, entry)
    elif module is model.get_input_embeddings():
        made = nn.Parameter(RowTable(TableRows(entry, entry.dtype)), requires_grad=False)
    else:
        made = nn.Parameter(entry.read(), requires_grad=False)
    setattr(module, leaf, made)
