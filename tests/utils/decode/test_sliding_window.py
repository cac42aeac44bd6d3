"""A config that names a sliding window which the class does not use: the cache must not drop what the model attends to.

The reference is one forward pass per token, without a cache.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import checked, open_session, records_of, screen
from shelf import load
from tiny import next_logits, save_folder, tiny_llama, tiny_sliding, tiny_tokenizer
from transformers.cache_utils import DynamicSlidingWindowLayer

from sampling import autoregressive_generate, speculative_generate
from utils.decode import sliding_window
from utils.decode.model_session import ModelSession
from utils.decode.sliding_window import empty_cache, keeps_all

PROMPT = [3, 14, 15, 9, 26, 5, 35]
LENGTH = 10
KINDS = [
    {"sliding_window": 5},
    {"sliding_window": 5, "use_sliding_window": False},
    {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    {"sliding_window": 1},
    {"attention_chunk_size": 5},
]


def own_text(model: Any) -> list[int]:
    made: list[int] = []
    for _ in range(LENGTH):
        made.append(int(next_logits(model, PROMPT, made).argmax()))
    return made


def noisy(model: Any) -> Any:
    """A copy with noise on its weights, so that some drafts are accepted and some are not."""
    drafter = deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std(correction=0) * 0.3)
    return drafter


@pytest.mark.parametrize(
    "fields",
    [pytest.param(fields, marks=pytest.mark.full if index % 2 else ()) for index, fields in enumerate(KINDS)],
    ids=str,
)
def test_a_class_that_ignores_its_window_gives_its_own_text(fields: dict[str, Any]) -> None:
    model = tiny_llama(**fields)
    expected, drafter = own_text(model), noisy(model)
    for cached in (True, False):
        assert autoregressive_generate(PROMPT, model, LENGTH, eos_tokens_id=None, use_cache=cached) == expected
        made, rate = speculative_generate(
            PROMPT, drafter, model, max_gen_len=LENGTH, eos_tokens_id=None, gamma=3, use_cache=cached
        )
        assert made == expected and 0 < rate < 1
    assert keeps_all(model) and keeps_all(drafter)


@pytest.mark.parametrize("window", [2, 8, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_class_that_uses_its_window_keeps_its_small_cache(window: int, dtype: torch.dtype) -> None:
    model = tiny_sliding(sliding_window=window).to(dtype)
    ModelSession(model)
    assert {type(layer) for layer in empty_cache(model).layers} == {DynamicSlidingWindowLayer}
    assert model.config.sliding_window == window, "the check puts the window back"


def test_a_large_unused_window_is_noticed_before_a_text_reaches_it() -> None:
    model = tiny_llama(sliding_window=100)
    ModelSession(model)
    assert keeps_all(model) and model.config.sliding_window == 100


def test_the_check_is_short_and_runs_once_per_model() -> None:
    widths: list[int] = []
    model = tiny_llama(sliding_window=4096)
    model.register_forward_hook(
        lambda module, args, kwargs, output: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    ModelSession(model), ModelSession(model, rewinds=False)
    assert len(widths) == 7 and max(widths) == sliding_window.LENGTH


def test_the_program_says_so_and_all_strategies_agree(tmp_path: Path) -> None:
    folder = save_folder(
        tmp_path / "windowed", tiny_llama(vocab_size=300, num_hidden_layers=3), tiny_tokenizer(chat=False)
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 5}))
    pair = load(folder, "layers:2")
    assert any("sliding window" in note for note in pair.notes)
    session = open_session(screen(), pair, records=tmp_path / "runs.jsonl")
    for cache in ("on", "off"):
        checked(session, tmp_path / "runs.jsonl", f"/cache {cache}", "/length 8", "hello there")
    texts = {tuple(record["token_ids"]) for record in records_of(tmp_path / "runs.jsonl") if "token_ids" in record}
    assert len(texts) == 1
    assert pair.engine.use("invariant", 1).verified
