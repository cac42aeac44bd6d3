"""The training loss: cross entropy between the target's distributions and a student's, over all steps of a draft."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from sampling.distill.generate import Page
from sampling.distill.students import Student

STEP_DECAY = 0.8  # weight of a step's loss relative to the step before it
CHUNK = 128  # rows of logits at a time, few enough for the CPU cache


class _SoftCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of softmax(states @ rows.T) to softmax(target_states @ target_rows.T), with its gradient.

    The gradient is computed in the forward pass, in chunks: each logit is visited once, and few exist at a time.
    """

    @staticmethod
    def forward(context: Any, states: Tensor, rows: Tensor, target_states: Tensor, target_rows: Tensor) -> Tensor:
        states_gradient = torch.empty_like(states)
        # Only a small model trains its output rows; a head drafts with the target's. Summed over chunks, hence float32.
        rows_gradient = torch.zeros_like(rows, dtype=torch.float32) if context.needs_input_grad[1] else None
        total = torch.zeros((), device=states.device)
        student_rows = rows.to(target_rows.dtype)
        for begin in range(0, len(states), CHUNK):
            chunk = slice(begin, begin + CHUNK)
            student_states = states[chunk].to(target_rows.dtype)
            p = torch.softmax(linear(target_states[chunk], target_rows).float(), dim=-1)  # (chunk, V')
            log_q = torch.log_softmax(linear(student_states, student_rows).float(), dim=-1)
            total -= torch.dot(p.flatten(), log_q.flatten())
            difference = log_q.exp_().sub_(p).to(target_rows.dtype)  # q - p, the gradient of the logits
            states_gradient[chunk] = difference @ student_rows
            if rows_gradient is not None:
                rows_gradient += difference.T @ student_states
        count = max(1, len(states))
        gradients = [states_gradient.div_(count)]
        if rows_gradient is not None:
            gradients.append(rows_gradient.div_(count).to(rows.dtype))
        # The gradients themselves instead of the logits, which would be (N, V').
        context.save_for_backward(*gradients)
        return total / count

    @staticmethod
    def backward(context: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [gradient * output_gradients[0] for gradient in context.saved_tensors]
        return gradients[0], gradients[1] if len(gradients) > 1 else None, None, None


_soft_cross_entropy: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _SoftCrossEntropy.apply


def distillation_loss(student: Student, page: Page, lm_head: Tensor, steps: int) -> Tensor:
    """Weighted mean over steps of the cross entropy to the target, at the tokens that the target generated.

    lm_head: the target's output weight (V, H). Only the student's vocabulary is compared.
    """
    last_hidden = page.features[..., -lm_head.shape[1] :].to(lm_head.dtype)  # (B, T, H)
    # Both softmaxes then run over V', so the target is renormalised to what the student can draft.
    target_rows = lm_head if student.vocabulary is None else lm_head[student.vocabulary]
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
