"""An EAGLE-3 drafter that is trained in seconds: only one that has learned something can tell readings apart."""

from __future__ import annotations

from functools import cache
from typing import Any

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
from utils.drafter_formats.eagle3 import Eagle3, layer_config
from utils.drafter_formats.target_parts import DraftHead, share_parts
from utils.logits_processor import MultinomialProcessor
from utils.metrics.results import tokens_of
from utils.models.feature_drafter import Conventions
from utils.pairs.doctor import OwnText

LAYERS, SIZE, LENGTH, PROMPT = 8, 32, 72, 4
RIGHT = Conventions((2, 4, 5), norm_output=True)


@cache
def target_model(seed: int = 0) -> Any:
    """Its layers change much, so that a short text shows which of them a drafter reads."""
    return tiny_llama(seed, vocab_size=SIZE, num_hidden_layers=LAYERS, initializer_range=1.0)


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
        drafter = new_drafter(target)
        drafter.requires_grad_(True)
        drafter.embed_tokens.requires_grad_(False)
        fit(drafter, features_of(target, text), torch.tensor(text))
        drafter.requires_grad_(False)
    return target, text, drafter


HITS: dict[tuple[Any, ...], torch.Tensor] = {}
compare = OwnText.hits


def remembered_hits(self: OwnText, drafter: Any, conventions: Conventions, *, moved: int = 0) -> torch.Tensor:
    """The hits of a reading, which are computed once for each drafter, text and target."""
    target = float(self.states[conventions.feature_layers[0]].sum())
    key = (drafter, target, *self.tokens, "from", *self.rounds, conventions, moved)
    if key not in HITS:
        HITS[key] = compare(self, drafter, conventions, moved=moved)
    return HITS[key]


def random_drafter(seed: int) -> Eagle3:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return new_drafter(target_model())


def new_drafter(target: Any) -> Eagle3:
    empty = DrafterCheckpoint("drafter", {}, {"layers.0.x": ()})
    config = layer_config(layer_keys(), empty, head_norms=False)
    config.vocab_size = SIZE
    drafter = Eagle3(config, RIGHT, target)
    head = DraftHead(nn.Linear(HIDDEN, SIZE, bias=False), None, SIZE)
    share_parts(drafter, target.get_input_embeddings(), head, target)
    return drafter


def features_of(target: Any, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        output = target(torch.tensor([text]), output_hidden_states=True)
        return FeatureReader(target, RIGHT.feature_layers).features(output)


def fit(drafter: Eagle3, features: torch.Tensor, text: torch.Tensor) -> None:
    drafter.config._attn_implementation = "sdpa"  # which has gradients
    count = len(text)
    positions = torch.arange(count)[None]
    optimizer = torch.optim.Adam([part for part in drafter.parameters() if part.requires_grad], lr=5e-3)
    for _ in range(100):
        states = drafter.next_states(drafter.fuse_features(features[:, :-2]), text[None, 1:-1], positions[:, :-2], None)
        loss = cross_entropy(drafter.logits(states[0]), text[2:])
        fed = drafter.feedback(states)[:, :-1]
        second = drafter.next_states(fed, text[None, 2:-1], positions[:, 1:-2], None)
        loss = loss + cross_entropy(drafter.logits(second[0]), text[3:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.config._attn_implementation = "row_invariant"
