"""How a student's predictions on a page compare with the target's distributions: the training loss, and the acceptance.

The loss is the cross entropy over all steps of a draft. The acceptance is counted without decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from sampling.distill.pages import Corpus, TextPage
from sampling.distill.progress import Rates
from sampling.distill.students import Student

STEP_DECAY = 0.8  # weight of a step's loss relative to the step before it
CHUNK = 128  # rows of logits at a time, few enough for the CPU cache
MEASURED_TOKENS = 2048  # at a time


class _SoftCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of softmax(states @ rows.T) to softmax(target_states @ target_rows.T), with its gradient.

    Only the states have a gradient: the rows are the target's. It is computed in the forward pass, in chunks, so that
    each logit is visited once, and few exist at a time.
    """

    @staticmethod
    def forward(context: Any, states: Tensor, rows: Tensor, target_states: Tensor, target_rows: Tensor) -> Tensor:
        gradient = torch.empty_like(states)
        total = torch.zeros((), device=states.device)
        student_rows = rows.to(target_rows.dtype)
        for begin in range(0, len(states), CHUNK):
            chunk = slice(begin, begin + CHUNK)
            p = torch.softmax(linear(target_states[chunk], target_rows).float(), dim=-1)  # (chunk, V')
            log_q = torch.log_softmax(linear(states[chunk].to(target_rows.dtype), student_rows).float(), dim=-1)
            total -= torch.dot(p.flatten(), log_q.flatten())
            difference = log_q.exp_().sub_(p).to(target_rows.dtype)  # q - p, the gradient of the logits
            gradient[chunk] = difference @ student_rows
        count = max(1, len(states))
        # The gradient itself instead of the logits, which would be (N, V').
        context.save_for_backward(gradient.div_(count))
        return total / count

    @staticmethod
    def backward(context: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        return context.saved_tensors[0] * output_gradients[0], None, None, None


_soft_cross_entropy: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _SoftCrossEntropy.apply


def distillation_loss(student: Student, page: TextPage, lm_head: Tensor, steps: int) -> Tensor:
    """Weighted mean over steps of the cross entropy to the target, at the tokens that the target generated.

    lm_head: the target's output weight (V, H). Only the student's vocabulary is compared.
    """
    last_hidden = page.features[..., -lm_head.shape[1] :].to(lm_head.dtype)  # (B, T, H)
    # Both softmaxes then run over V', so the target is renormalised to what the student can draft.
    target_rows = lm_head[student.vocabulary]
    losses = []
    for predictions in student.predictions(page, steps):
        begin, count = predictions.position, predictions.states.shape[1]
        generated = page.generated[:, begin : begin + count]
        # The hidden state at a token predicts the next token.
        target_states = last_hidden[:, begin - 1 : begin - 1 + count][generated]
        states = predictions.states[generated]
        losses.append(_soft_cross_entropy(states, predictions.rows, target_states, target_rows))
    weights = [STEP_DECAY**step for step in range(steps)]
    weighted = (weight * loss for weight, loss in zip(weights, losses, strict=True))
    return sum(weighted, start=lm_head.new_zeros((), dtype=torch.float32)) / sum(weights)


def autocast_for(lm_head: Tensor) -> AbstractContextManager[Any]:
    """Autocast to the target's number format if it has 16 bits."""
    short = lm_head.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(lm_head.device.type, lm_head.dtype) if short else nullcontext()


def measure_acceptance(
    student: Student, pages: Corpus, lm_head: Tensor, steps: int, *, tokens: int | None = None
) -> dict[int, Tensor]:
    """Counts (2, steps, 2) of accepted drafts, see count_acceptance, by the length of the conversations of a page.

    lm_head: the target's output weight (V, H). tokens: how many of each page, at least one row; None for all.
    """
    counts: dict[int, Tensor] = {}
    for page in map(pages.page, range(len(pages))):
        rows, length = page.tokens.shape
        rows = rows if tokens is None else min(rows, max(1, tokens // length))
        by_position = counts.setdefault(length, torch.zeros(2, steps, 2, dtype=torch.float64))
        for index in torch.arange(rows).split(max(1, MEASURED_TOKENS // length)):
            with autocast_for(lm_head):
                count_acceptance(student, page.rows(index, lm_head.device), lm_head, by_position)
    return counts


def rates_of(counts: Iterable[Tensor]) -> Rates:
    """The acceptance by position in the round, from all these counts. A rate is None if nothing was counted."""
    return {
        name: [accepted / count if count else None for accepted, count in by_position]
        for name, by_position in zip(("greedy", "drawn"), torch.stack([*counts]).sum(0).tolist(), strict=True)
    }


@torch.no_grad()
def count_acceptance(student: Student, page: TextPage, lm_head: Tensor, counts: Tensor) -> None:
    """Add the acceptance on a page to `counts` (2, steps, 2). Tokens outside the student's vocabulary are rejected.

    The first rows are for greedy answers, [accepted, counted]; a draft is counted if all earlier drafts of its round
    match. The others are for answers at temperature 1, [summed probability, count], where a draft is accepted with
    probability sum_x min(p(x), q(x)).
    """
    steps = counts.shape[1]
    # Rounds (M,) whose drafts are at least partly answers; most of a long page is documents.
    row, entry = page.answers[:, 2:].unfold(1, steps, 1).any(-1).nonzero(as_tuple=True)
    matching_prefix = torch.ones_like(row, dtype=torch.bool)
    temperatures = page.temperatures[row]
    for step, predictions in enumerate(student.predictions(page, steps)):
        position = entry + predictions.position
        answers = page.answers[row, position]
        # The last feature is the input of the output head, so the target's logits need no forward pass.
        last_hidden = page.features[row, position - 1, -lm_head.shape[1] :].to(lm_head.dtype)
        states, rows = (part.to(lm_head.dtype) for part in (predictions.states[row, entry], predictions.rows))
        matches, overlap = _compare((states, rows), (last_hidden, lm_head), student.vocabulary)
        greedy, sampled = answers & matching_prefix & (temperatures == 0), answers & (temperatures == 1)
        accepted = (matches & greedy).sum(), overlap[sampled].sum()
        for kind, (summed, counted) in enumerate(zip(accepted, (greedy, sampled), strict=True)):
            counts[kind, step] += torch.tensor([summed.item(), counted.sum().item()], dtype=torch.float64)
        matching_prefix = matching_prefix & matches


def _compare(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], vocabulary: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the likeliest tokens match (M,), and the overlap sum_x min(p(x), q(x)) (M,).

    ours, theirs: states (M, H) and output rows of the student and of the target.
    """
    matches, overlaps = [], []
    for pair in zip(ours[0].split(CHUNK), theirs[0].split(CHUNK), strict=True):
        logits, target_logits = (linear(x, rows).float() for x, rows in zip(pair, (ours[1], theirs[1]), strict=True))
        matches.append(vocabulary[logits.argmax(-1)] == target_logits.argmax(-1))
        # p is not renormalised: what the student cannot draft is lost acceptance.
        overlaps.append(torch.minimum(target_logits.softmax(-1)[:, vocabulary], logits.softmax(-1)).sum(-1))
    return torch.cat(matches), torch.cat(overlaps)
