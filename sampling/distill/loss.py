"""What a step of training computes: a student's guesses of a page, and how far they are from the target's own laws.

A head is unrolled over several drafts: entry t of step s predicts the target's law behind token t + 1 + s, given its own state of step
s - 1 at t (its guess of a feature) and the true token. It attends to the real entries up to t and to its own earlier steps at t, exactly
as when it drafts. A small language model needs no unrolling: while its drafts are accepted it reads the target's text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import DynamicCache

from sampling.distill.generate import Page
from utils.models.draft_head import Head

FADE = 0.8  # what a step's loss weighs of the one before it
CHUNK = 128  # rows of logits at a time: few enough to stay in a cache


@dataclass(frozen=True, slots=True)
class Guesses:
    """What a student made of a page at one step. Logits are states (B, N, H) times `rows` (V', H).

    place: entry 0 guesses the token at this place of the page, entry 1 the one behind it, ...
    """

    states: Tensor
    rows: Tensor
    place: int


class Student(Protocol):
    """A drafter that is being made. weights: what is trained. vocabulary: the ids (V',) it can draft; None for all."""

    weights: nn.Module
    vocabulary: Tensor | None

    def guesses(self, page: Page, steps: int) -> Iterator[Guesses]: ...


class HeadStudent:
    """embed: the target's embedding. rows: those rows (V', H) of the target's head that `vocabulary` names."""

    def __init__(self, head: Head, embed: Any, rows: Tensor, vocabulary: Tensor) -> None:
        self.weights: nn.Module = head
        self.vocabulary: Tensor | None = vocabulary
        self.head, self.ids = head, vocabulary
        self._embed, self._rows = embed, rows

    def guesses(self, page: Page, steps: int) -> Iterator[Guesses]:
        """One step after the other, N = T - steps - 1 entries each."""
        count = page.tokens.shape[1] - steps - 1
        tokens, head = page.tokens.long(), self.head
        states = head.guess(page.features[:, :count].to(head.mix.weight.dtype))
        cache = DynamicCache(config=head.config)
        for step in range(steps):
            places = torch.arange(step, step + count, device=tokens.device)[None]
            embedded = self._embed(tokens[:, step + 1 : step + 1 + count]).to(states.dtype)
            states = head(states, embedded, places, cache=cache, mask=_mask(count, step, tokens.device))
            yield Guesses(head.norm(states), self._rows, step + 2)


class ModelStudent:
    """A small causal language model with the target's vocabulary."""

    def __init__(self, model: Any) -> None:
        self.weights: nn.Module = model
        self.vocabulary: Tensor | None = None
        self.model = model

    def guesses(self, page: Page, steps: int) -> Iterator[Guesses]:
        """Where a drafter has agreed so far, it has read the target's text: one forward tells all steps."""
        states = self.model.get_decoder()(input_ids=page.tokens.long()).last_hidden_state
        count = page.tokens.shape[1] - steps - 1
        rows = self.model.get_output_embeddings().weight
        for step in range(steps):
            yield Guesses(states[:, step + 1 : step + 1 + count], rows, step + 2)


def _mask(count: int, step: int, device: Any) -> Tensor:
    """(1, 1, N, (step + 1) N): real entries up to one's own, and one's own earlier steps."""
    real = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    mine = torch.eye(count, dtype=torch.bool, device=device)
    return torch.cat([real, *[mine] * step], dim=-1)[None, None]


class _SoftCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of softmax(states @ rows.T) to softmax(wanted @ others.T), its gradient computed on the way.

    Each logit is visited once, and few of them exist at a time; autograd would write and read them many times over.
    """

    @staticmethod
    def forward(context: Any, states: Tensor, rows: Tensor, wanted: Tensor, others: Tensor) -> Tensor:
        gradient = torch.empty_like(states)
        for_rows = torch.zeros_like(rows, dtype=torch.float32) if context.needs_input_grad[1] else None
        total = torch.zeros((), device=states.device)
        half = rows.to(others.dtype)
        for begin in range(0, len(states), CHUNK):
            chunk = slice(begin, begin + CHUNK)
            law = torch.softmax(linear(wanted[chunk], others).float(), dim=-1)
            log_guess = torch.log_softmax(linear(states[chunk].to(half.dtype), half).float(), dim=-1)
            total -= torch.dot(law.flatten(), log_guess.flatten())
            away = log_guess.exp_().sub_(law).to(half.dtype)
            gradient[chunk] = away @ half
            if for_rows is not None:
                for_rows += away.T @ states[chunk].to(half.dtype)
        count = max(1, len(states))
        context.save_for_backward(
            gradient.div_(count), *([] if for_rows is None else [for_rows.div_(count).to(rows.dtype)])
        )
        return total / count

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        kept = [part * gradients[0] for part in context.saved_tensors]
        return kept[0], kept[1] if len(kept) > 1 else None, None, None


def loss_of(student: Student, page: Page, head: Tensor, steps: int) -> Tensor:
    """Cross entropy to the target's laws where the target chose the token, later steps weighing less.

    head: the target's own (V, H), of which the student's vocabulary is compared.
    """
    # The target's last hidden state behind a token tells the law of the next one.
    last = page.features[..., -head.shape[1] :].to(head.dtype)
    others = head if student.vocabulary is None else head[student.vocabulary]
    losses = []
    for guesses in student.guesses(page, steps):
        here = slice(guesses.place, guesses.place + guesses.states.shape[1])
        own = page.own[:, here]
        wanted = last[:, guesses.place - 1 : guesses.place - 1 + guesses.states.shape[1]]
        losses.append(_SoftCrossEntropy.apply(guesses.states[own], guesses.rows, wanted[own], others))
    weights = [FADE**step for step in range(steps)]
    total: Tensor = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
    return total


@dataclass(slots=True)
class Acceptance:
    """Counts by the draft's place in its round.

    greedy: (accepted, tried) in greedy answers, a place counting as tried where all earlier ones agreed. drawn: summed chance and count
    in answers drawn at temperature 1: sum_x min(p(x), q(x)), behind the text's own tokens.
    """

    greedy: list[list[float]]
    drawn: list[list[float]]

    @classmethod
    def empty(cls, steps: int) -> Acceptance:
        return cls([[0.0, 0.0] for _ in range(steps)], [[0.0, 0.0] for _ in range(steps)])

    def rates(self) -> dict[str, list[float | None]]:
        """Each a rate per place, None where nothing was tried."""
        return {
            name: [part / whole if whole else None for part, whole in counts]
            for name, counts in (("greedy", self.greedy), ("drawn", self.drawn))
        }


@torch.no_grad()
def count_acceptance(student: Student, page: Page, head: Tensor, counts: Acceptance) -> None:
    """Add what a page tells, by the target's whole vocabulary."""
    steps = len(counts.greedy)
    last = page.features[..., -head.shape[1] :].to(head.dtype)
    agreed: Tensor | None = None
    for step, guesses in enumerate(student.guesses(page, steps)):
        width = guesses.states.shape[1]
        answers = page.answers[:, guesses.place : guesses.place + width]
        wanted = last[:, guesses.place - 1 : guesses.place - 1 + width]
        logits = linear(guesses.states.to(head.dtype), guesses.rows.to(head.dtype)).float()
        ids = logits.argmax(-1)
        ids = ids if student.vocabulary is None else student.vocabulary[ids]
        truth = linear(wanted, head).float()
        same = ids == truth.argmax(-1)
        agreed = torch.ones_like(same) if agreed is None else agreed
        greedy = answers & agreed & (page.warmths == 0)[:, None]
        counts.greedy[step][0] += float((same & greedy).sum())
        counts.greedy[step][1] += float(greedy.sum())
        law = torch.softmax(truth, dim=-1)
        overlap = torch.minimum(
            law if student.vocabulary is None else law[..., student.vocabulary], logits.softmax(-1)
        ).sum(-1)
        drawn = answers & (page.warmths == 1)[:, None]
        counts.drawn[step][0] += float(overlap[drawn].sum())
        counts.drawn[step][1] += float(drawn.sum())
        agreed = agreed & same
