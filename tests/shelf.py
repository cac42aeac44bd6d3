"""Loading a pair from words, well or with the one sentence that it is refused with; and a shelf of checkpoint
folders.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import save_folder, tiny_llama, tiny_mamba, tiny_t5, tiny_tokenizer
from tiny_gguf import write_gguf

from utils.errors import UserError
from utils.pairs.load_pair import load_pair
from utils.pairs.pair import Pair
from utils.pairs.request import PairRequest


def load(target: Path | str, drafter: Path | str | None = None, **words: str) -> Pair:
    return load_pair(
        PairRequest(str(target), None if drafter is None else str(drafter), **{"device": "cpu"} | words),
        lambda line: None,
    )


def refusal(target: Path | str, drafter: Path | str | None = None, **words: str) -> str:
    """The one sentence of a request that must fail."""
    with pytest.raises(UserError) as caught:
        load(target, drafter, **words)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


def fill_shelf(root: Path) -> Path:
    """Write checkpoint folders by name."""
    tokenizer = tiny_tokenizer()
    save_folder(root / "target", tiny_llama(vocab_size=300, num_hidden_layers=6), tokenizer)
    save_folder(root / "drafter", tiny_llama(1, vocab_size=300), tokenizer)
    save_folder(root / "padded", tiny_llama(1, vocab_size=320), tokenizer)
    save_folder(root / "bare", tiny_llama(1, vocab_size=300), None)
    save_folder(root / "narrow", tiny_llama(1, vocab_size=280), None)
    save_folder(root / "stranger", tiny_llama(1, vocab_size=300), tiny_tokenizer(shift=1))
    save_folder(root / "cousin", tiny_llama(1, vocab_size=300), tiny_tokenizer(299))
    save_folder(root / "single", tiny_llama(vocab_size=300, num_hidden_layers=1), tokenizer)
    save_folder(root / "t5", tiny_t5(vocab_size=300), tokenizer)
    save_folder(root / "mamba", tiny_mamba(vocab_size=300), tokenizer)
    save_folder(root / "half", tiny_llama(vocab_size=300).to(torch.bfloat16), tokenizer)
    return root


def write_wide_gguf(path: Path) -> Path:
    """Write a GGUF file whose layers are wide enough for every quantization."""
    return write_gguf(path, tiny_llama(vocab_size=300, hidden_size=64, intermediate_size=256), tiny_tokenizer())
