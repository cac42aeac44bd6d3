"""Short trainings of drafters for a tiny target, and what their tests share."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_folder, tiny_llama, tiny_tokenizer

from sampling.distill.__main__ import main
from sampling.distill.pages import TextPage
from utils.decode.features import FeatureReader

FLAGS = "--tokens 250 --page 288 --length 96 --batch 288 --passes 4 --rate 0.1 --vocabulary 150 --device cpu"
LAYERS = 8


def target_folder(root: Path) -> Path:
    """The folder of a tiny target."""
    save_folder(root / "tiny", tiny_llama(vocab_size=300, num_hidden_layers=LAYERS), tiny_tokenizer())
    return root / "tiny"


def trained(target: Path, out: Path, *flags: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sampling.distill.students.training_dtype", lambda device: torch.float32)
        assert main(["--target", str(target), "--out", str(out), *FLAGS.split(), *flags]) == 0
    return out


def changed(folder: Path, out: Path, **keys: Any) -> Path:
    """A copy with other keys in config.json."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | keys))
    return out


def page_of(model: Any, read: tuple[int, ...]) -> TextPage:
    """One conversation of random tokens, with the hidden states that a drafter reads and the last one."""
    tokens = torch.randint(300, (1, 14), generator=torch.Generator().manual_seed(1))
    reader = FeatureReader(model, (*read, -1))
    with torch.no_grad(), reader.watching():
        output = model(input_ids=tokens, output_hidden_states=True)
    return TextPage(tokens.int(), reader.features(output), torch.ones(1, 14), torch.zeros(1))
