"""The training text: pages of conversations that a target generates, many at once, and the folders that hold them.

The features that a drafter reads are hidden states of the same forward passes; nothing is computed for training only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from sampling.distill.chat_script import ANSWER, TEMPLATE, Conversation, Script
from utils.decode.engine_forward import PREFILL_CHUNK, prefill_pass
from utils.decode.features import FeatureReader
from utils.decode.sliding_window import empty_cache
from utils.engine import attention
from utils.files import replacing

ANSWER_TEMPERATURES = (0.0, 1.0, 0.4, 0.0, 1.0, 0.7)  # by row in turn: drafters serve greedy and sampled decoding
SHARES = (8, 2, 8, 1)  # the lengths of conversations, by page in turn: the longest one divided by these
LONG_DOCUMENT, SHORT_DOCUMENT = (0.7, 0.85), (0.1, 0.5)  # size of a document relative to its conversation
SHORT_TASKS = 0.35  # of short conversations are about a document; all longer ones are
MIN_LENGTH = 192  # of conversations, unless all are shorter
LEAST_TEXT = 24  # tokens of an answer that may become part of a document


@dataclass(frozen=True, slots=True)
class TextPage:
    """B conversations of T tokens.

    tokens (B, T) int32. features (B, T, F): hidden states at each position, ending with that after the target's final
    norm. sources (B, T): TEMPLATE, QUESTION, ANSWER or DOCUMENT of chat_script. temperatures (B,): of the answers.
    """

    tokens: Tensor
    features: Tensor
    sources: Tensor
    temperatures: Tensor

    @property
    def generated(self) -> Tensor:
        """(B, T): True for tokens that the target generated, in this conversation or in an earlier one."""
        return self.sources != TEMPLATE

    @property
    def answers(self) -> Tensor:
        """(B, T): True for tokens of answers."""
        return self.sources == ANSWER

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """The answers as tuples of token ids, without the shortest ones and without end tokens."""
        found = []
        for tokens, answers in zip(self.tokens, self.answers, strict=True):
            starts = (answers.int().diff(prepend=torch.zeros(1)) != 0).nonzero()[:, 0].tolist()
            runs = tokens.tensor_split(starts)
            found += [
                tuple(run.tolist()[:-1])
                for run, is_answer in zip(runs, answers.tensor_split(starts), strict=True)
                if len(run) > LEAST_TEXT and is_answer[0]
            ]
        return found

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The fields by their names."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def rows(self, index: Tensor | slice, device: torch.device | None = None) -> TextPage:
        """A page of some of its rows, on `device`."""
        return TextPage(**{name: tensor[index].to(device) for name, tensor in self.tensors.items()})


class Corpus:
    """The pages in a folder, one safetensors file each, numbered from 0. A page is written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        """The number of pages; their numbers have no gaps."""
        return len([*self._folder.glob("page-*.safetensors")])

    def add(self, page: TextPage) -> None:
        """Write a page after the last one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._path(len(self))) as file:
            file.write(save(page.tensors))

    def page(self, number: int) -> TextPage:
        """One page, memory-mapped."""
        return TextPage(**load_file(self._path(number)))

    def _path(self, number: int) -> Path:
        return self._folder / f"page-{number:05d}.safetensors"


class PageGenerator:
    """Generates pages with a target, in conversations of at most `length` tokens.

    layers: the hidden states that become features, see utils.decode.features. The last one must be -1.
    """

    def __init__(self, model: Any, script: Script, layers: tuple[int, ...], *, length: int) -> None:
        self._model, self._script, self._layers, self._length = model, script, layers, length
        if model.config._attn_implementation == "sdpa":
            _use_grouped_attention(model)

    def generate(
        self, seed: int, size: int, earlier: Corpus, *, on_tokens: Callable[[int], None] = lambda count: None
    ) -> TextPage:
        """The page of a seed after the `earlier` ones, whose answers become documents. It has about `size` tokens.

        on_tokens: called with the number of new tokens.
        """
        # Generators of their own, so that a page depends on its seed and the earlier pages alone.
        generator = torch.Generator(self._model.device).manual_seed(seed)
        share = 1 if self._script.complete else SHARES[len(earlier) % len(SHARES)]  # a question may fill a short one
        length = max(min(MIN_LENGTH, self._length), self._length // share)
        conversations = self._conversations(random.Random(seed), max(1, size // length), length, earlier)
        cache, reader = empty_cache(self._model), FeatureReader(self._model, self._layers)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        position, sampled = 0, [0] * len(conversations)  # placeholders: rows begin with tokens of the template
        with torch.no_grad(), reader.watching():
            # Every row gets equally many tokens per pass, inserted or one sampled, so nothing is padded.
            while position < length:
                width = max(1, min(length - position, PREFILL_CHUNK, *(len(row.inserted) for row in conversations)))
                pairs = zip(conversations, sampled, strict=True)
                block = torch.tensor([[row.next_token(token) for _ in range(width)] for row, token in pairs])
                tokens, sources = block.unbind(-1)
                arguments = {"past_key_values": cache, "use_cache": True, "output_hidden_states": True}
                with prefill_pass(width > 1):
                    output = self._model(input_ids=tokens.to(self._model.device), logits_to_keep=1, **arguments)
                parts.append((tokens.int(), sources.byte(), reader.features(output).to("cpu", torch.bfloat16)))
                sampled = _sample(output.logits[:, -1], [row.temperature for row in conversations], generator)
                position += width
                on_tokens(tokens.numel())
        tokens, sources, features = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return TextPage(tokens, features, sources, torch.tensor([row.answer_temperature for row in conversations]))

    def _conversations(self, rng: random.Random, count: int, length: int, earlier: Corpus) -> list[Conversation]:
        """Long ones about documents, and short ones of which some are. Questions from a file have none."""
        short = [number for number in range(len(earlier)) if SHARES[number % len(SHARES)] == max(SHARES)]
        texts = earlier.page(rng.choice(short)).texts if short and not self._script.complete else []
        is_short, conversations = length < self._length // 2, []
        for row in range(count):
            opening = self._script.draw_opening(rng)
            if texts and not (is_short and rng.random() > SHORT_TASKS):
                share = rng.uniform(*(SHORT_DOCUMENT if is_short else LONG_DOCUMENT))
                opening = self._script.draw_task(rng, texts, int(share * length))
            temperature = ANSWER_TEMPERATURES[row % len(ANSWER_TEMPERATURES)]
            conversations.append(Conversation(self._script, temperature, opening))
        return conversations


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
    tokens = logits.argmax(-1)
    scale = torch.tensor(temperatures, device=logits.device)[:, None]
    drawn = (scale > 0)[:, 0]
    if bool(drawn.any()):
        probs = (logits[drawn].float() / scale[drawn]).softmax(-1)
        tokens[drawn] = torch.multinomial(probs, 1, generator=generator)[:, 0]
    return tokens.tolist()
