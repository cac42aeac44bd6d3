"""The convention doctor finds a wrong reading, leaves a right one alone, and recognises a drafter of another target.

The drafter is trained here, in seconds: only one that has learned something can tell readings apart.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from drafter_checkpoints import HIDDEN, layer_keys
from tiny import tiny_llama
from torch import nn
from torch.nn.functional import cross_entropy

from sampling import autoregressive_steps
from utils.decode.decoding import Decoding
from utils.decode.features import FeatureReader
from utils.decode.model_session import ModelSession
from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.eagle3 import Eagle3, Parts, layer_config
from utils.drafter_formats.readings import shifted_layers
from utils.drafter_formats.target_parts import DraftHead
from utils.logits_processor import MultinomialProcessor
from utils.metrics.results import tokens_of
from utils.models.feature_drafter import Conventions
from utils.pairs.doctor import examine, sign_test

LAYERS, SIZE, LENGTH, PROMPT = 8, 32, 100, 4
RIGHT = Conventions((2, 4, 5), norm_output=True)


def target_model(seed: int = 0) -> Any:
    return tiny_llama(seed, vocab_size=SIZE, num_hidden_layers=LAYERS)


def text_of(target: Any) -> list[int]:
    """A sampled text, because a greedy one of a random model soon repeats itself."""
    plan = Decoding.of(MultinomialProcessor(1.0), LENGTH - PROMPT, end_ids=None, seed=0)
    prompt = list(range(PROMPT))
    return [*prompt, *tokens_of(autoregressive_steps(prompt, ModelSession(target, rewinds=False), plan))]


@cache
def trained() -> tuple[Any, list[int], Eagle3]:
    """A target, its text, and a drafter that was trained on this text: the first draft, and the one after it."""
    target = target_model()
    text = text_of(target)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        empty = DrafterCheckpoint("drafter", {}, {"layers.0.x": ()}, {})
        config = layer_config(layer_keys(), empty, head_norms=False)
        config.vocab_size = SIZE
        parts = Parts(LAYERS, HIDDEN, fc_norm=False, norm_before_fc=False, head_norms=False)
        drafter = Eagle3(config, RIGHT, parts)
        head = DraftHead(nn.Linear(HIDDEN, SIZE, bias=False), None, SIZE)
        drafter.share(target.get_input_embeddings(), head, target)
        drafter.requires_grad_(True)
        drafter.embed_tokens.requires_grad_(False)
        fit(drafter, features_of(target, text), torch.tensor(text))
        drafter.requires_grad_(False)
    return target, text, drafter


def features_of(target: Any, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        output = target(torch.tensor([text]), output_hidden_states=True)
        return FeatureReader(target, RIGHT.feature_layers).features(output)


def fit(drafter: Eagle3, features: torch.Tensor, text: torch.Tensor) -> None:
    drafter.config._attn_implementation = "sdpa"  # which has gradients
    count = len(text)
    positions = torch.arange(count)[None]
    optimizer = torch.optim.Adam([part for part in drafter.parameters() if part.requires_grad], lr=5e-3)
    for _ in range(150):
        states = drafter.next_states(drafter.fuse_features(features[:, :-2]), text[None, 1:-1], positions[:, :-2], None)
        loss = cross_entropy(drafter.logits(states[0]), text[2:])
        fed = drafter.feedback(states)[:, :-1]
        second = drafter.next_states(fed, text[None, 2:-1], positions[:, 1:-2], None)
        loss = loss + cross_entropy(drafter.logits(second[0]), text[3:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.config._attn_implementation = "row_invariant"


def diagnosed(conventions: Conventions) -> Any:
    target, text, drafter = trained()
    drafter.conventions = conventions
    found = examine(drafter, target, text, PROMPT)
    assert drafter.conventions == conventions
    return found


def test_a_right_reading_is_left_alone():
    found = diagnosed(RIGHT)
    assert found.better is None and found.reads_target
    assert found.readings[0].agreement[0] > 0.9


@pytest.mark.parametrize(
    "wrong",
    [
        replace(RIGHT, feature_layers=(3, 5, 6)),
        replace(RIGHT, feature_layers=(1, 3, 4)),
        replace(RIGHT, norm_output=False),
        replace(RIGHT, norm_before_residual=True),
    ],
)
def test_a_wrong_reading_is_replaced_by_the_one_it_was_trained_with(wrong):
    found = diagnosed(wrong)
    assert found.better is not None and found.better.conventions == RIGHT and found.reads_target


def test_a_drafter_of_another_target_is_recognised():
    _, _, drafter = trained()
    drafter.conventions = RIGHT
    other = target_model(seed=5)
    found = examine(drafter, other, text_of(other), PROMPT)
    assert found.better is None and not found.reads_target


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((2, 4, 5), {(3, 5, 6), (1, 3, 4)}),
        ((1, 4, 8), {(0, 3, 7), (1, 4, 9)}),  # 8 is after the final norm, 9 before it
        ((2, 5, 9), {(1, 4, 7), (2, 5, 8)}),
        ((0, 2, 7), {(1, 3, 9)}),
        ((-1,), {(7,), (9,)}),
    ],
)
def test_shifted_layers_stay_within_the_target(layers, expected):
    found = shifted_layers(Conventions(layers), LAYERS)
    assert {each.feature_layers for each in found.values()} == expected


def test_the_sign_test_is_exact():
    assert sign_test(3, 0) == 1 / 8 and sign_test(2, 1) == 4 / 8 and sign_test(0, 0) == 1.0
