"""Convert GGUF files once: transformers unpacks one for minutes at every load, so the result is cached as safetensors.

A cache entry is identified by the file's path, size and modification time, the number format and the version of
transformers. A damaged entry is rebuilt. If nothing can be cached, the GGUF file itself is loaded, as slowly as before.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import transformers
from safetensors import SafetensorError

from utils.artifact_cache import build_folder, is_intact, remove_stale
from utils.errors import UserError
from utils.files import file_state, user_folder
from utils.models.checkpoints import load_model, load_tokenizer
from utils.models.devices import Placement
from utils.models.load_errors import explained_errors, quiet
from utils.models.sources import Source
from utils.text import byte_size

RECIPE = 1  # increase it whenever `convert` writes something else, so that older entries are rebuilt
NOT_CACHED = "every start converts it again"
SIZE_MARGIN = 1.05  # size of an entry over the size of its weights


def convert_if_gguf(source: Source, where: Placement) -> Source:
    """Return the cached conversion of a GGUF file, which is created on first use.

    Returns `source` itself if it is not a GGUF file or nothing can be cached. Raises UserError if it cannot be loaded.
    """
    if source.gguf is None:
        return source
    folder, made_from = cache_entry(Path(source.location, source.gguf), str(where.dtype).removeprefix("torch."))
    if not is_intact(folder, made_from):
        try:
            with build_folder(folder, made_from) as made:
                convert(source, made, where)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            where.report(
                f"the conversion of {source.name} could not be cached in {folder.parent} ({reason}): {NOT_CACHED}"
            )
            return source
    return Source(str(folder), source.name)


def convert(source: Source, folder: Path, where: Placement) -> None:
    """Write a GGUF file's model and tokenizer to a folder. Raises OSError if the disk has no room for them."""
    # Checked before minutes are spent on a conversion that would have to be repeated.
    with explained_errors(source.name), quiet():
        weights = _weight_count(Path(source.location, str(source.gguf)))
        # A format that the checkpoint chooses ("auto") is counted as float32, the largest.
        needed = int(weights * SIZE_MARGIN) * (4 if "16" not in str(where.dtype) else 2)
    if (free := shutil.disk_usage(folder.parent).free) < needed:
        raise OSError(None, f"{byte_size(free)} free, {byte_size(needed)} needed")
    where.report(f"converting {source.name} (once, cached in {folder.parent.parent}) ...")
    # On the CPU, because the model is only written to disk, and silently, because the conversion is reported above.
    model = load_model(source, "none", replace(where, device="cpu", report=lambda line: None))
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise UserError(f"'{source.name}' has no tokenizer: use a different GGUF file of this model.")
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def cache_entry(path: Path, form: str) -> tuple[Path, str]:
    """Return the folder of a file's cache entry and the origin that it must have. form: a number format, or "blocks".

    Removes entries of older contents, and what killed runs have left.
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
    name = f"{file_key}-{state_key}-{form}-{transformers.__version__}"
    return root / name, f"{state}, {form}, {transformers.__version__}, recipe {RECIPE}"


def _weight_count(path: Path) -> int:
    """Return the number of weights in a GGUF file."""
    from gguf import GGUFReader

    return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
