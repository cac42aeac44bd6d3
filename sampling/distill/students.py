"""The drafters that are trained ("students"): what they predict on a page.

A head, or a drafter in the EAGLE-3 format, is unrolled over several drafts (arXiv 2503.01840): its prediction of step s
at entry t uses its own state of step s - 1 at t and the true token. A small language model needs no unrolling, because
it reads the target's text as long as its drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from sampling.distill.generate import Page
from utils.drafter_formats.eagle3 import Eagle3
from utils.models.draft_head import Head

LAST = -1  # the hidden state after the final norm, which the target's output layer reads


@dataclass(frozen=True, slots=True)
class Predictions:
    """The predictions of one step, as the logits `states @ rows.T` of states (B, N, H) and output rows (V', H).

    position: entry 0 predicts the token at this position of the page, entry 1 the next one, and so on.
    """

    states: Tensor
    rows: Tensor
    position: int


class Student(Protocol):
    """A drafter in training.

    kind: as --kind names it. weights: the trained module. vocabulary: the ids (V',) it can draft, None for all. layers:
    the hidden states that its pages hold, of which the last one is the input of the target's output layer.
    """

    kind: str
    weights: nn.Module
    vocabulary: Tensor | None
    layers: tuple[int, ...]

    def predictions(self, page: Page, steps: int) -> Iterator[Predictions]: ...


class HeadStudent:
    """A head or an EAGLE-3 drafter in training. embed: its input embedding. rows: its output rows (V', H) of
    `vocabulary`. Neither is trained.
    """

    def __init__(self, head: Head | Eagle3, embed: Any, rows: Tensor, vocabulary: Tensor) -> None:
        self.kind = "eagle3" if isinstance(head, Eagle3) else "head"
        self.head, self.ids = head, vocabulary
        self.weights: nn.Module = head
        self.vocabulary: Tensor | None = vocabulary
        self.layers = page_layers(head.feature_layers)
        self.embed, self.rows = embed, rows

    def predictions(self, page: Page, steps: int) -> Iterator[Predictions]:
        """The predictions of each step, with N = T - steps - 1 entries."""
        # The same N for all steps, so that the last entry of the last step still has a token to predict.
        count = page.tokens.shape[1] - steps - 1
        tokens, head = page.tokens.long(), self.head
        read = len(head.feature_layers) * self.rows.shape[1]  # the pages may hold the last hidden state besides
        states = head.fuse_features(page.features[:, :count, :read].to(head.norm.weight.dtype))
        # Not the growing cache of the decoders, whose writes in place would break the backward pass.
        cache = DynamicCache(config=head.config)
        for step in range(steps):
            # Entry i of step s stands at position i + s, as it does when the head drafts.
            positions = torch.arange(step, step + count, device=tokens.device)[None]
            embedded = self.embed(tokens[:, step + 1 : step + 1 + count]).to(states.dtype)  # true tokens, not drafts
            states = head(states, embedded, positions, cache=cache, mask=_attention_mask(count, step, tokens.device))
            yield Predictions(head.norm(states), self.rows, step + 2)
            states = head.feedback(states)


class ModelStudent:
    """A small causal language model in training, with the target's vocabulary."""

    def __init__(self, model: Any) -> None:
        self.kind, self.layers = "lm", page_layers(())
        self.model = model
        self.weights: nn.Module = model
        self.vocabulary: Tensor | None = None

    def predictions(self, page: Page, steps: int) -> Iterator[Predictions]:
        """The predictions of each step; one forward pass serves them all."""
        states = self.model.get_decoder()(input_ids=page.tokens.long()).last_hidden_state
        count = page.tokens.shape[1] - steps - 1
        rows = self.model.get_output_embeddings().weight
        for step in range(steps):
            # The state at position p predicts token p + 1, so entry 0 of this slice predicts token step + 2.
            yield Predictions(states[:, step + 1 : step + 1 + count], rows, step + 2)


def _attention_mask(count: int, step: int, device: torch.device) -> Tensor:
    """(1, 1, N, (step + 1) N): an entry attends to true entries up to itself and to its own earlier steps."""
    # (N, N) each. Keys lie in the cache step after step.
    true_entries = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    own_steps = torch.eye(count, dtype=torch.bool, device=device)
    return torch.cat([true_entries, *[own_steps] * step], dim=-1)[None, None]


def page_layers(read: tuple[int, ...]) -> tuple[int, ...]:
    """The hidden states that pages hold for a drafter that reads these: training compares with the last one."""
    return read if read[-1:] == (LAST,) else (*read, LAST)
