"""GGUF files, converted once: transformers unpacks one for minutes at every load, so what came out is kept as a folder of safetensors.

An entry is known by the file's place, size and time of change, the number format and the transformers version. A damaged one is made
anew. Where none can be kept, the file itself is loaded, as slowly as before.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import transformers
from safetensors import SafetensorError

from utils.errors import UserError
from utils.models.artifact_cache import cache_root, is_whole, making
from utils.models.checkpoints import load_model, load_tokenizer
from utils.models.devices import Placement
from utils.models.load_errors import explained, quiet
from utils.models.sources import Source
from utils.units import in_units

# Raised whenever `_convert` writes something else, so that older entries are made again.
RECIPE = 1
ROOM = 1.05  # of the weights' size: the tokenizer, and a little


def converted(source: Source, where: Placement) -> Source:
    """The folder that holds what is in a GGUF file, made on first use; `source` itself where it is no such file or nothing can be kept.

    Raises UserError when the file cannot be loaded.
    """
    if source.gguf is None:
        return source
    folder, made_from = _entry(Path(source.place, source.gguf), str(where.dtype).removeprefix("torch."))
    if not is_whole(folder, made_from):
        try:
            with making(folder, made_from) as made:
                _convert(source, made, where)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            where.report(
                f"{source.name}, converted, could not be kept in {folder.parent} ({reason}): every start converts it again"
            )
            return source
    return Source(str(folder), source.name)


def _entry(path: Path, dtype: str) -> tuple[Path, str]:
    """Where the entry of a file belongs, and what must have been its origin. What the same file was before it changed is thrown away."""
    path = path.resolve()
    seen = path.stat()
    state = f"{path}, {seen.st_size} bytes, {seen.st_mtime_ns}"
    place, now = (hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12] for text in (str(path), state))
    root = cache_root() / "gguf"
    for old in root.glob(f"{place}-*"):
        if not old.name.startswith(f"{place}-{now}-") and ".new-" not in old.name:
            shutil.rmtree(old, ignore_errors=True)
    return (
        root / f"{place}-{now}-{dtype}-{transformers.__version__}",
        f"{state}, {dtype}, {transformers.__version__}, recipe {RECIPE}",
    )


def _convert(source: Source, folder: Path, where: Placement) -> None:
    # Known before the minutes are spent; otherwise all of it would be done twice.
    with explained(source.name), quiet():
        needed = int(_elements(Path(source.place, str(source.gguf))) * ROOM) * (
            4 if "16" not in str(where.dtype) else 2
        )
    if (free := shutil.disk_usage(folder.parent).free) < needed:
        raise OSError(None, f"{in_units(free)} free, {in_units(needed)} needed")
    where.report(f"converting {source.name} (once, kept in {folder.parent.parent}) ...")
    model = load_model(source, "none", replace(where, device="cpu", report=lambda line: None))
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise UserError(f"'{source.name}' has no tokenizer: take another GGUF file of this model.")
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _elements(path: Path) -> int:
    """How many weights a GGUF file holds."""
    from gguf import GGUFReader

    return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
