"""Graphs of a decoder that were converted once and are read from files afterwards.

Files are mapped into memory: weights are not held twice, and graphs can be compiled again without the model.
"""

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from utils.artifact_cache import build_folder, is_intact, mark_as_used
from utils.engine.decoder_spec import DecoderSpec
from utils.engine.openvino_graph import GraphBuilder
from utils.engine.openvino_runtime import ov
from utils.engine.openvino_weights import storage
from utils.engine.weight_format import EngineWeights

HERE = Path(__file__).parent
# What the files depend on besides the weights.
SOURCE = tuple(
    HERE / name for name in ("openvino_graph.py", "openvino_weights.py", "weight_blocks.py", "weight_format.py")
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def converted(spec: DecoderSpec, weights: EngineWeights, folder: Path) -> Path:
    """Return the folder with the graphs of a decoder in a number format, below `folder`. It is filled if necessary.

    Raises OSError if files cannot be written.
    """
    recipe, key = _recipe(), _key(spec, weights)
    made = folder / f"{recipe}-{key[:32]}"
    if is_intact(made, key):
        mark_as_used(made)
    else:
        _remove_outdated(folder, recipe)
        with build_folder(made, key) as path:
            path.mkdir()
            for name, graph in _graphs(GraphBuilder(spec, storage(weights, spec.head))):
                _save(graph, path / f"{name}.xml")
    return made


def _save(graph: Any, path: Path) -> None:
    try:
        ov.save_model(graph, path, compress_to_fp16=False)
    except RuntimeError as error:  # of a C++ stream, which does not say what went wrong
        raise OSError(f"{path.parents[2]} cannot be written to; the disk may be full") from error


def graph_names(layers: int) -> list[str]:
    """Return the names of the graphs of a decoder: `begin`, one for each layer, and `head`."""
    return ["begin", *(f"layer-{index}" for index in range(layers)), "head"]


def _graphs(builder: GraphBuilder) -> Iterator[tuple[str, Any]]:
    """Each graph with its name, built when its turn comes."""
    first, *layers, last = graph_names(len(builder.spec.layers))
    yield first, builder.begin()
    for index, name in enumerate(layers):
        yield name, builder.advance(index)
    yield last, builder.head()


def _recipe() -> str:
    """How graphs are made: folders of another recipe are never used again."""
    digest = hashlib.sha256(ov.get_version().encode())
    for path in SOURCE:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _remove_outdated(folder: Path, recipe: str) -> None:
    """Remove what other versions have made. A process that still reads such files keeps them until it ends."""
    for path in folder.glob(f"{'[0-9a-f]' * 16}-{'[0-9a-f]' * 32}"):
        if not path.name.startswith(recipe):
            with suppress(OSError):
                shutil.rmtree(path)


def _key(spec: DecoderSpec, weights: EngineWeights) -> str:
    digest = hashlib.sha256()
    for part in (*_parts(spec), *_parts(weights)):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    """Everything of a value that graphs depend on. Embeddings and rotary tables are not in the graphs."""
    if isinstance(value, Tensor) and value.is_meta:
        yield f"{value.dtype}{tuple(value.shape)}".encode()  # its data are among the blocks
    elif origin := getattr(value, "origin", ""):
        yield origin.encode(errors="surrogateescape")  # the file of the blocks: reading all of it would take seconds
    elif isinstance(value, Tensor):
        bits = value.detach().contiguous().view(_INTEGERS[value.element_size()])
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        # One checksum for each row, so that weights with another order of rows are different weights.
        yield torch.hash_tensor(bits.reshape(len(bits), -1), 1).numpy().tobytes()
    elif isinstance(value, Mapping | tuple):
        for item in value.items() if isinstance(value, Mapping) else value:
            yield from _parts(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from (field.name.encode(), *_parts(getattr(value, field.name)))
    elif not callable(value) and not isinstance(value, nn.Module):
        yield repr(value).encode() + b"\0"
