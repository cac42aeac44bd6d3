"""The target writes: many rows at once, each a conversation, with the features that a head reads.

Nothing is computed for the sake of training: what the target saw on the way is kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sampling.distill.chat_script import ANSWERED, FORCED, Script, Speaker
from utils.decode.kv_cache import growing_cache
from utils.decode.model_session import hidden_features
from utils.engine import attention

SOME = 16  # rows drawn at once: what they need stays in a processor's cache
BLOCK = 256  # tokens whose chances are added up at once
WARMTHS = (0.0, 0.0, 0.4, 0.7, 1.0, 1.0)  # greedy answers and drawn ones: drafters are asked for both


@dataclass(frozen=True, slots=True)
class Page:
    """B rows of T tokens. tokens (B, T) int32; features (B, T, F) of each position; voices (B, T): whose each token is, see conversation.

    warmths (B,): the temperatures of the answers.
    """

    tokens: Tensor
    features: Tensor
    voices: Tensor
    warmths: Tensor

    @property
    def own(self) -> Tensor:
        """(B, T): the tokens that the target chose."""
        return self.voices != FORCED

    @property
    def answers(self) -> Tensor:
        """(B, T): those of its answers."""
        return self.voices == ANSWERED

    def rows(self, which: Any, device: Any = None) -> Page:
        """Some rows of it."""
        return Page(*(part[which].to(device) for part in (self.tokens, self.features, self.voices, self.warmths)))


class Writer:
    """A target at its desk: `write` gives one page after the other, each from a seed of its own.

    model: computed as it is handed over. layers: which hidden states are features (utils.models.draft_head.feature_layers).
    """

    def __init__(self, model: Any, script: Script, layers: tuple[int, ...], *, rows: int, length: int) -> None:
        self._model, self._script, self._layers = model, script, layers
        self._rows, self._length = rows, length
        if model.config._attn_implementation == "sdpa":
            _group_heads(model)

    @property
    def tokens(self) -> int:
        """Of a page."""
        return self._rows * self._length

    def write(self, seed: int, *, asked: bool = False, tell: Callable[[int], None] = lambda made: None) -> Page:
        """A page; the same seed writes the same. asked: openings are whole questions. tell: hears of each token column."""
        chance = random.Random(seed)
        generator = torch.Generator(self._model.device).manual_seed(seed)
        openings = (self._script.opening(chance) for _ in range(self._rows))
        speakers = [
            Speaker(self._script, WARMTHS[row % len(WARMTHS)], opening, asked) for row, opening in enumerate(openings)
        ]
        tokens = torch.empty(self._rows, self._length, dtype=torch.int32)
        voices = torch.zeros(self._rows, self._length, dtype=torch.uint8)
        features: Tensor | None = None
        cache = growing_cache(self._model.config)
        drawn = [0] * self._rows
        with torch.no_grad():
            for place in range(self._length):
                column = [speaker.next(token) for speaker, token in zip(speakers, drawn, strict=True)]
                tokens[:, place] = torch.tensor([token for token, _ in column])
                voices[:, place] = torch.tensor([voice for _, voice in column])
                ids = tokens[:, place : place + 1].long().to(self._model.device)
                output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
                seen = hidden_features(output, self._layers)[:, 0]
                if features is None:
                    features = torch.empty(self._rows, self._length, seen.shape[-1], dtype=torch.bfloat16)
                features[:, place] = seen
                drawn = _draw(output.logits[:, -1], [speaker.temperature for speaker in speakers], generator)
                tell(self._rows)
        assert features is not None
        return Page(tokens, features, voices, torch.tensor([speaker.warmth for speaker in speakers]))


def _group_heads(model: Any) -> None:
    """Let query heads that share keys go together, which is four times as fast, where the model's attention is of the usual kind."""
    model.set_attn_implementation(attention.NAME)
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)
    except NotImplementedError:  # a cap, a sink or a bias
        model.set_attn_implementation("sdpa")


def _draw(logits: Tensor, temperatures: list[float], generator: torch.Generator) -> list[int]:
    """A token per row of (B, V)."""
    warm = torch.tensor([temperature > 0 for temperature in temperatures], device=logits.device)
    scale = torch.tensor([temperature for temperature in temperatures if temperature > 0], device=logits.device)
    tokens = torch.empty(len(temperatures), dtype=torch.long, device=logits.device)
    if not bool(warm.all()):
        tokens[~warm] = logits[~warm].argmax(-1)
    if len(scale):
        uniform = torch.rand(len(scale), 1, generator=generator, device=logits.device)
        parts = zip(logits[warm].split(SOME), scale[:, None].split(SOME), uniform.split(SOME), strict=True)
        tokens[warm] = torch.cat([inverted(some.float().div_(warmth), number) for some, warmth, number in parts])
    return tokens.tolist()


def inverted(logits: Tensor, uniform: Tensor) -> Tensor:
    """Tokens (B,) drawn from softmax((B, V)) by inversion: one uniform number (B, 1) a row is much cheaper than one a token.

    Sums of blocks tell the block, sums within it the token: adding up a whole vocabulary one by one is slow.
    """
    weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    if spare := -weights.shape[-1] % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, spare))
    blocks = weights.unflatten(-1, (-1, BLOCK))
    rising = blocks.sum(-1).cumsum(-1)
    place = uniform * rising[:, -1:]
    block = torch.searchsorted(rising, place, right=True).clamp(max=rising.shape[-1] - 1)
    before = torch.nn.functional.pad(rising, (1, 0)).gather(1, block)
    within = blocks[torch.arange(len(block), device=block.device), block[:, 0]]
    found = torch.searchsorted(within.cumsum(-1), place - before, right=True).clamp(max=BLOCK - 1)
    return (block * BLOCK + found)[:, 0].clamp(max=logits.shape[-1] - 1)
