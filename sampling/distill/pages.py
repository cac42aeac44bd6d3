"""The training text: pages of conversations that a target generates, many at once, and the folders that hold them.

The features that a drafter reads are hidden states of the same forward passes; nothing is computed for training only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.functional import pad

from sampling.distill.chat_script import ANSWER, TEMPLATE, Conversation, Script
from utils.decode.features import FeatureReader
from utils.decode.sliding_window import empty_cache
from utils.engine import attention
from utils.files import replacing

SAMPLED_ROWS = 16  # rows sampled at once, few enough for the CPU cache
BLOCK = 256  # width of the blocks that `sample_by_inversion` sums first
ANSWER_TEMPERATURES = (0.0, 0.0, 0.4, 0.7, 1.0, 1.0)  # by row in turn: drafters serve greedy and sampled decoding


@dataclass(frozen=True, slots=True)
class TextPage:
    """B conversations of T tokens.

    tokens (B, T) int32. features (B, T, F): hidden states at each position, ending with that after the target's final
    norm. sources (B, T): TEMPLATE, QUESTION or ANSWER of chat_script. temperatures (B,): of the answers.
    """

    tokens: Tensor
    features: Tensor
    sources: Tensor
    temperatures: Tensor

    @property
    def generated(self) -> Tensor:
        """(B, T): True for tokens that the target generated."""
        return self.sources != TEMPLATE

    @property
    def answers(self) -> Tensor:
        """(B, T): True for tokens of answers."""
        return self.sources == ANSWER

    def rows(self, index: Tensor | slice, device: torch.device | None = None) -> TextPage:
        """A page of some of its rows, on `device`."""
        tensors = (self.tokens, self.features, self.sources, self.temperatures)
        return TextPage(*(tensor[index].to(device) for tensor in tensors))


class Corpus:
    """The pages in a folder, one safetensors file each, numbered from 0. A page is written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        """The number of pages; their numbers have no gaps."""
        count = 0
        while self._path(count).exists():
            count += 1
        return count

    @property
    def generated_tokens(self) -> int:
        """The number of tokens in all pages that the target generated; tokens of the template do not count."""
        total = 0
        for number in range(len(self)):
            with safe_open(self._path(number), framework="pt") as file:
                total += int(file.metadata()["count"])
        return total

    def add(self, page: TextPage) -> None:
        """Write a page after the last one."""
        # "voices" and "warmths" are names of the file format, for sources and temperatures.
        tensors = {
            "tokens": page.tokens,
            "features": page.features,
            "voices": page.sources,
            "warmths": page.temperatures,
        }
        with replacing(self._path(len(self))) as file:
            file.write(save(tensors, metadata={"count": str(int(page.generated.sum()))}))

    def page(self, number: int) -> TextPage:
        """One page, memory-mapped."""
        tensors = load_file(self._path(number))
        return TextPage(tensors["tokens"], tensors["features"], tensors["voices"], tensors["warmths"])

    def _path(self, number: int) -> Path:
        return self._folder / f"page-{number:05d}.safetensors"


class PageGenerator:
    """Generates pages of `rows` conversations of `length` tokens with a target.

    layers: the hidden states that become features, see utils.decode.features. The last one must be -1.
    """

    def __init__(self, model: Any, script: Script, layers: tuple[int, ...], *, rows: int, length: int) -> None:
        self._model, self._script, self._layers = model, script, layers
        self._rows, self._length = rows, length
        if model.config._attn_implementation == "sdpa":
            _use_grouped_attention(model)

    @property
    def page_tokens(self) -> int:
        """The number of tokens of a page."""
        return self._rows * self._length

    def generate(
        self, seed: int, *, complete: bool = False, on_tokens: Callable[[int], None] = lambda count: None
    ) -> TextPage:
        """The page of a seed.

        complete: whether openings are complete user messages. on_tokens: called with the number of new tokens.
        """
        # Generators of their own, so that a page depends on its seed alone and can be generated again.
        rng = random.Random(seed)
        generator = torch.Generator(self._model.device).manual_seed(seed)
        conversations = []
        for row in range(self._rows):
            temperature = ANSWER_TEMPERATURES[row % len(ANSWER_TEMPERATURES)]
            conversations.append(Conversation(self._script, temperature, self._script.draw_opening(rng), complete))
        tokens = torch.empty(self._rows, self._length, dtype=torch.int32)
        sources = torch.zeros(self._rows, self._length, dtype=torch.uint8)
        features: Tensor | None = None
        cache = empty_cache(self._model)
        sampled = [0] * self._rows  # a placeholder: rows begin with tokens of the template
        reader = FeatureReader(self._model, self._layers)
        with torch.no_grad(), reader.watching():
            # Every row gets one token per pass, inserted or sampled. So rows stay equally long, and nothing is padded.
            for position in range(self._length):
                column = [row.next_token(token) for row, token in zip(conversations, sampled, strict=True)]
                tokens[:, position] = torch.tensor([token for token, _ in column])
                sources[:, position] = torch.tensor([source for _, source in column])
                ids = tokens[:, position : position + 1].long().to(self._model.device)
                output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
                hidden = reader.features(output)[:, 0]  # (B, F)
                if features is None:
                    features = torch.empty(self._rows, self._length, hidden.shape[-1], dtype=torch.bfloat16)
                features[:, position] = hidden
                sampled = _sample(output.logits[:, -1], [row.temperature for row in conversations], generator)
                on_tokens(self._rows)
        assert features is not None
        return TextPage(tokens, features, sources, torch.tensor([row.answer_temperature for row in conversations]))


def _use_grouped_attention(model: Any) -> None:
    """Process query heads that share keys together, which is four times as fast, if the model's attention allows it."""
    model.set_attn_implementation(attention.NAME)
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)
    except NotImplementedError:  # soft-capping, attention sinks or a bias
        model.set_attn_implementation("sdpa")


def _sample(logits: Tensor, temperatures: Sequence[float], generator: torch.Generator) -> list[int]:
    """One token per row of logits (B, V); temperature 0 is greedy."""
    is_sampled = torch.tensor([temperature > 0 for temperature in temperatures], device=logits.device)
    scale = torch.tensor([temperature for temperature in temperatures if temperature > 0], device=logits.device)
    tokens = torch.empty(len(temperatures), dtype=torch.long, device=logits.device)
    if not bool(is_sampled.all()):
        tokens[~is_sampled] = logits[~is_sampled].argmax(-1)
    if len(scale):
        uniform = torch.rand(len(scale), 1, generator=generator, device=logits.device)
        parts = (part.split(SAMPLED_ROWS) for part in (logits[is_sampled], scale[:, None], uniform))
        tokens[is_sampled] = torch.cat(
            [
                sample_by_inversion(rows.float().div_(temperature), numbers)
                for rows, temperature, numbers in zip(*parts, strict=True)
            ]
        )
    return tokens.tolist()


def sample_by_inversion(logits: Tensor, uniform: Tensor) -> Tensor:
    """Tokens (B,) sampled from softmax(logits), (B, V), with one uniform number (B, 1) per row. Overwrites `logits`.

    Block sums select a block, and sums within it the token: a cumulative sum over the vocabulary is slow.
    """
    # Not normalised: the uniform number is scaled by the total instead.
    weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    if padding := -weights.shape[-1] % BLOCK:
        weights = pad(weights, (0, padding))
    blocks = weights.unflatten(-1, (-1, BLOCK))
    block_ends = blocks.sum(-1).cumsum(-1)
    target = uniform * block_ends[:, -1:]
    # right=True skips blocks and tokens of weight 0. The clamps catch a target that rounding moved past the end.
    block = torch.searchsorted(block_ends, target, right=True).clamp(max=block_ends.shape[-1] - 1)
    block_start = pad(block_ends, (1, 0)).gather(1, block)
    within = blocks[torch.arange(len(block), device=block.device), block[:, 0]]
    offset = torch.searchsorted(within.cumsum(-1), target - block_start, right=True).clamp(max=BLOCK - 1)
    return (block * BLOCK + offset)[:, 0].clamp(max=logits.shape[-1] - 1)
