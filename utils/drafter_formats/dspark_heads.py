"""The heads that DSpark adds to a block drafter: a bias for the token before a draft, and a confidence.

Both depend on nothing but the block's states and the tokens before the draft, so drafts drawn from left to right have
the distribution that they are drawn from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from utils.drafter_formats.checkpoint import DrafterCheckpoint

MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
CONFIDENCE = "confidence_head.proj.weight"
VANILLA, GATED, RECURRENT = "vanilla", "gated", "rnn"
MARKOV_KINDS = (VANILLA, GATED, RECURRENT)


@dataclass(frozen=True, slots=True)
class MarkovShape:
    """tokens: that may come before. drafted: draft tokens. rank: of the bias. state: size of a draft's state."""

    kind: str
    tokens: int
    drafted: int
    rank: int
    state: int


class MarkovHead(nn.Module):
    """A bias of draft logits of low rank. vanilla: w2 . w1[token before]. gated: with a gate that reads the draft's
    state. rnn: with a memory of the drafts before it.
    """

    def __init__(self, shape: MarkovShape) -> None:
        super().__init__()
        self.kind, rank = shape.kind, shape.rank
        self.markov_w1 = nn.Embedding(shape.tokens, rank)
        self.markov_w2 = nn.Linear(rank, shape.drafted, bias=False)
        if self.kind == GATED:
            self.gate_proj = nn.Linear(shape.state + rank, rank)
        elif self.kind == RECURRENT:
            self.joint_proj = nn.Linear(2 * rank + shape.state, 3 * rank)

    def before(self, token: int) -> Tensor:
        """What is known of a token: (1, R)."""
        row: Tensor = self.markov_w1.weight[token : token + 1]
        return row

    def bias(self, token: int, state: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the bias (1, V') of a draft after a token, and the memory (1, R) for the next draft.

        state: of the draft (1, H). memory: after the draft before it; None for the first one.
        """
        known = self.before(token)
        if self.kind == GATED:
            known = known * torch.sigmoid(self.gate_proj(torch.cat([state, known], dim=-1)))
        elif self.kind == RECURRENT:
            memory = torch.zeros_like(known) if memory is None else memory
            gate, candidate, output = self.joint_proj(torch.cat([memory, known, state], dim=-1)).chunk(3, dim=-1)
            memory = torch.lerp(torch.tanh(candidate), memory, torch.sigmoid(gate))
            known = torch.tanh(output)
        bias: Tensor = self.markov_w2(known)
        return bias, memory


class ConfidenceHead(nn.Module):
    """The logit of the probability that a draft is accepted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    @property
    def size(self) -> int:
        """How many numbers it reads."""
        return self.proj.in_features

    def forward(self, known: Tensor) -> float:
        """Return the probability for what is known of a draft: (1, size)."""
        return float(torch.sigmoid(self.proj(known).float()).item())


def markov_shape(checkpoint: DrafterCheckpoint, kind: str | None) -> MarkovShape | None:
    """The shape of a checkpoint's Markov head; None if it has none. kind: as declared, or None for that of its
    tensors.
    """
    first, second = (checkpoint.shapes.get(name, ()) for name in MARKOV)
    if not len(first) == len(second) == 2:
        return None
    found = GATED if checkpoint.has("markov_head.gate_proj.weight") else VANILLA
    found = RECURRENT if checkpoint.has("markov_head.joint_proj.weight") else found
    return MarkovShape(kind or found, first[0], second[0], first[1], checkpoint.shapes["hidden_norm.weight"][0])


def confidence_size(checkpoint: DrafterCheckpoint) -> int | None:
    """How many numbers a checkpoint's confidence head reads; None if it has none."""
    shape = checkpoint.shapes.get(CONFIDENCE, ())
    return shape[1] if len(shape) == 2 else None
