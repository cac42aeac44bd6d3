"""GGUF files as models whose linear weights stay in the file until an engine reads them or multiplies with their
blocks.

The rest (embedding, output head, norms, biases, other types) is unpacked once, into a cache folder with the tokenizer,
the config and an index of the blocks. Later starts map it and read nothing else. Models that no engine has a forward
pass of its own for are left to transformers' loader, which unpacks the whole file at every start.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from gguf import GGUFReader, dequantize
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

from utils.artifact_cache import build_folder, is_intact, remove_stale
from utils.engine.read_decoder import read_decoder
from utils.engine.stored_weights import placeholder, with_origin
from utils.errors import UserError
from utils.files import file_state, user_folder
from utils.freed_memory import release_memory
from utils.models import counted_seconds
from utils.models.checkpoints import load_tokenizer
from utils.models.embedded import MODEL_NAME, split_digits
from utils.models.file_model import check_tensor, empty_model, finish, layer_linears
from utils.models.gguf_blocks import BlockIndex, GgufBlocks, Stored, block_index, shared_reader, tensor_processor
from utils.models.load_errors import explained_errors, quiet
from utils.models.memory import Placement, check_free, plan_memory
from utils.models.sources import Source
from utils.text import byte_size

INDEX, DENSE = "blocks.json", "model.safetensors"
HEAD_LAYER = "lm_head"
RECIPE = 2  # increase it whenever `_unpack` writes something else, so that older entries are rebuilt


class BlockSource(NamedTuple):
    """A `WeightSource` in a GGUF file."""

    blocks: GgufBlocks
    name: str

    @property
    def itemsize(self) -> int:
        return torch.float32.itemsize

    def read(self) -> Tensor:
        return self.blocks[self.name].dense()

    def stored(self) -> Tensor:
        return self.read()


class InBlocks(NamedTuple):
    """A model whose linear weights are in a file, its tokenizer and these weights."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    blocks: GgufBlocks


def load_in_blocks(source: Source, where: Placement) -> InBlocks | str:
    """Load a GGUF file on the CPU, in float32.

    If no engine has a forward pass of its own for the model, returns a clause that says why it must be unpacked. Raises
    UserError if the file cannot be loaded, or if its parts do not fit into memory or on the disk.
    """
    path = Path(source.location, str(source.gguf))
    with explained_errors(source.name), quiet():
        folder, made_from = cache_entry(path)
        if not is_intact(folder, made_from):
            with shared_reader(path) as reader:
                if reason := _prepare(source, reader, folder, made_from, where=where):
                    return reason
            release_memory()
        loaded, size = _loaded(source.name, path, folder), path.stat().st_size
        if where.engine_weights == "gguf":
            remedy = "use a smaller model, or a file with fewer bits per weight"
            check_free(source.name, size + (folder / DENSE).stat().st_size, where.device, remedy)
        else:
            counts = {"F32": sum(part.numel() for part in loaded.model.parameters())}
            plan_memory(replace(source, weight_counts=counts), "none", where, in_files=True)
        where.report(f"loading {source.name} (cpu, blocks of the GGUF file, {byte_size(size)}) ...")
        return loaded


def _prepare(source: Source, reader: GGUFReader, folder: Path, made_from: str, *, where: Placement) -> str | None:
    """Write what `_loaded` reads. Returns a reason as `load_in_blocks` does. Raises UserError."""
    model = empty_model(AutoConfig.from_pretrained(source.location, **source.arguments), torch.float32)
    if isinstance(reason := read_decoder(model), str):
        return reason
    where.report(f"preparing {source.name} (once, cached in {folder.parent.parent}) ...")
    what = f"What is prepared of '{source.name}'"
    with build_folder(folder, made_from, what) as made, counted_seconds(where.report, f"preparing {source.name}"):
        made.mkdir()
        _unpack(source, reader, made, model)
        tokenizer = load_tokenizer(source)
        if source.name == MODEL_NAME:
            split_digits(tokenizer)
        tokenizer.save_pretrained(made)
    return None


def _loaded(name: str, path: Path, folder: Path) -> InBlocks:
    """Load from a prepared folder."""
    stored = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    index = BlockIndex(stored["architecture"], {layer: Stored(*row) for layer, row in stored["tensors"].items()})
    model = empty_model(AutoConfig.from_pretrained(folder), torch.float32)
    blocks = GgufBlocks(path, model, index)
    with safe_open(folder / DENSE, framework="pt") as file:  # pages of the file are read when they are needed
        names = list(file.keys())  # the file is not iterable
        _set_weights(model, {name: file.get_tensor(name) for name in names}, blocks)
    finish(model, name, folder)
    return InBlocks(model, load_tokenizer(Source(str(folder), name)), blocks)


def _unpack(source: Source, reader: GGUFReader, folder: Path, model: PreTrainedModel) -> None:
    """Write everything but the tokenizer. Raises UserError if weights are missing or not finite."""
    path, index = Path(source.location, str(source.gguf)), block_index(reader, model)
    dense = _dense_tensors(reader, model, index)
    blocks = GgufBlocks(path, model, index)
    for name, tensor in (*dense.items(), *blocks.halves()):
        check_tensor(tensor, source.name, name)
    if missing := _set_weights(model, dense, blocks):
        raise UserError(f"'{source.name}' lacks {len(missing)} of its weights ({missing[0]}, ...): fetch it again.")
    save_file(dense, folder / DENSE, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps(index._asdict()), encoding="utf-8")
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _dense_tensors(reader: GGUFReader, model: PreTrainedModel, index: BlockIndex) -> dict[str, Tensor]:
    """The weights that are not computed in blocks, as transformers unpacks them, in float32."""
    processor = tensor_processor(index.architecture, model)
    names: dict[str, str] = get_gguf_hf_weights_map(model, processor)
    held = _layers_in_blocks(model, index)
    dense = {}
    for tensor in reader.tensors:
        if names.get(tensor.name, "").removesuffix(".weight") in held:
            continue
        weights = dequantize(tensor.data, tensor.tensor_type)
        made = processor.process(
            weights=weights, name=tensor.name, tensor_key_mapping=names, parsed_parameters={"tensors": {}}
        )
        if made.name in names:
            dense[names[made.name]] = torch.from_numpy(np.copy(made.weights)).float()
    return dense


def _layers_in_blocks(model: PreTrainedModel, index: BlockIndex) -> dict[str, nn.Linear]:
    """The linear layers that hold no data."""
    return {name: part for name, part in layer_linears(model).items() if name in index.tensors}


def _set_weights(model: PreTrainedModel, dense: Mapping[str, Tensor], blocks: GgufBlocks) -> list[str]:
    """Give a model its tensors, and placeholders for those in blocks. Returns the names of parameters without both."""
    for name, layer in _layers_in_blocks(model, blocks.index).items():
        layer.weight = placeholder(layer.weight, BlockSource(blocks, name))
    for name, tensor in dense.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(tensor, requires_grad=False))
    model.tie_weights()
    if HEAD_LAYER in blocks.index.tensors:  # in memory as well, because drafters read its rows
        with_origin(model.get_output_embeddings().weight, BlockSource(blocks, HEAD_LAYER))
    return [name for name, part in model.named_parameters() if name not in dense and not part.is_meta]


def cache_entry(path: Path) -> tuple[Path, str]:
    """Return the folder of a file's cache entry and the origin that it must have.

    Removes entries of older contents, and the remains of killed runs.
    """
    state = file_state(path)
    file_key, state_key = (
        # File names need not be valid UTF-8.
        hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]
        for text in (str(path.resolve()), state)
    )
    root = user_folder("cache") / "gguf"
    remove_stale(root)
    for old in root.glob(f"{file_key}-*"):
        # Folders with .new- may belong to a process that is converting the file now.
        if not old.name.startswith(f"{file_key}-{state_key}-") and ".new-" not in old.name:
            shutil.rmtree(old, ignore_errors=True)
    name = f"{file_key}-{state_key}-{transformers.__version__}"
    return root / name, f"{state}, {transformers.__version__}, recipe {RECIPE}"
