"""MTP layers of targets that are not supported are refused by the name of the model type, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drafter_checkpoints import random_tensors
from mtp_checkpoints import HIDDEN, write_target
from shelf import refusal
from tiny import tiny_llama, tiny_tokenizer

from utils.pairs import load_pair

JOIN = (HIDDEN, 2 * HIDDEN)


def not_loaded(*_: Any, **__: Any) -> None:
    raise AssertionError("the target was loaded")


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("step3p7", "model.layers.3.eh_proj.weight"),
        ("llama", "mtp.fc.weight"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_other_model_types_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, name: str, nested: bool
) -> None:
    target = tiny_llama(vocab_size=300)
    folder = write_target(tmp_path, target, random_tensors({name: JOIN}, seed=1), tiny_tokenizer())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"model_type": model_type}
    config = {"model_type": "outer", "text_config": config} if nested else config
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr(load_pair, "load_model", not_loaded)
    assert f"model type {model_type} are not supported" in refusal(folder, "mtp")
