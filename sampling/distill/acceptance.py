"""Acceptance of a student's drafts on a page, by position in the round, computed without decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from sampling.distill.generate import Page
from sampling.distill.loss import autocast_for
from sampling.distill.progress import Rates
from sampling.distill.students import Student


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts by position in the round.

    greedy: [accepted, counted] in greedy answers; a draft is counted if all earlier drafts of its round match.
    sampled: [summed probability, count] in answers at temperature 1, where a draft is accepted with probability
    sum_x min(p(x), q(x)).
    """

    greedy: list[list[float]]
    sampled: list[list[float]]

    @classmethod
    def empty(cls, steps: int) -> Acceptance:
        return cls([[0.0, 0.0] for _ in range(steps)], [[0.0, 0.0] for _ in range(steps)])

    def rates(self) -> Rates:
        """A rate per position, or None if nothing was counted. The keys are those of progress.json."""
        return {
            name: [accepted / count if count else None for accepted, count in counts]
            for name, counts in (("greedy", self.greedy), ("drawn", self.sampled))
        }


def measure_acceptance(student: Student, page: Page, lm_head: Tensor, *, steps: int, batch: int) -> Acceptance:
    """The acceptance on a page, `batch` rows at a time. lm_head: the target's output weight (V, H)."""
    counts = Acceptance.empty(steps)
    for rows in torch.arange(page.tokens.shape[0]).split(batch):
        with autocast_for(lm_head):
            count_acceptance(student, page.rows(rows, lm_head.device), lm_head, counts)
    return counts


@torch.no_grad()
def count_acceptance(student: Student, page: Page, lm_head: Tensor, counts: Acceptance) -> None:
    """Add the acceptance on a page to `counts`. Tokens outside the student's vocabulary count as rejected."""
    steps = len(counts.greedy)
    # The last feature is the input of the output head, so the target's logits need no forward pass: (B, T, H).
    last_hidden = page.features[..., -lm_head.shape[1] :].to(lm_head.dtype)
    matching_prefix: Tensor | None = None
    for step, predictions in enumerate(student.predictions(page, steps)):
        begin, count = predictions.position, predictions.states.shape[1]
        answers = page.answers[:, begin : begin + count]
        target_logits = linear(last_hidden[:, begin - 1 : begin - 1 + count], lm_head).float()  # (B, N, V)
        logits = linear(predictions.states.to(lm_head.dtype), predictions.rows.to(lm_head.dtype)).float()  # (B, N, V')
        matches, overlap = _compare(logits, target_logits, student.vocabulary)
        matching_prefix = torch.ones_like(matches) if matching_prefix is None else matching_prefix
        # (B, N): a draft counts only if the drafts before it in the same round match.
        greedy = answers & matching_prefix & (page.temperatures == 0)[:, None]
        counts.greedy[step][0] += float((matches & greedy).sum())
        counts.greedy[step][1] += float(greedy.sum())
        sampled = answers & (page.temperatures == 1)[:, None]
        counts.sampled[step][0] += float(overlap[sampled].sum())
        counts.sampled[step][1] += float(sampled.sum())
        matching_prefix = matching_prefix & matches


def _compare(logits: Tensor, target_logits: Tensor, vocabulary: Tensor | None) -> tuple[Tensor, Tensor]:
    """Whether the likeliest tokens match (B, N), and the overlap sum_x min(p(x), q(x)) (B, N)."""
    p, q = target_logits.softmax(-1), logits.softmax(-1)
    likeliest = logits.argmax(-1)
    if vocabulary is not None:
        # p is not renormalised: what the student cannot draft is lost acceptance.
        p, likeliest = p[..., vocabulary], vocabulary[likeliest]
    return likeliest == target_logits.argmax(-1), torch.minimum(p, q).sum(-1)
