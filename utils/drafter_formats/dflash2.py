"""What DFlash2 adds to DFlash (z-lab/dflash, vLLM and SGLang since August 2026, speculators 0.9).

Short causal convolutions over the slots of a block stand before and after the attention and the MLP of each layer. A
selector keeps the best candidates of a draft and adds a score that depends on the token before it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.target_parts import misfit

SELECTOR, CONVOLUTIONS = "candidate_selector", ("attention_conv", "mlp_conv")
PREDECESSORS = f"{SELECTOR}.predecessor_codebook"


class SlotConvolution(nn.Module):
    """Two convolutions over the slots: of what enters a part of a layer, and of what leaves it.

    Slot i becomes the sum over taps t of (base[t] + delta[i, t]) * slot i - t. The input of the part decides about both
    deltas, each number of which belongs to a group of channels.
    """

    def __init__(self, taps: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.taps, self.groups = taps, groups
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * groups, bias=False)

    def forward(self, states: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the input (B, H) of the part, and the function for its output (B, H)."""
        delta = self.kernel_projection(states).view(len(states), 2, self.taps, self.groups)
        delta = delta.repeat_interleave(states.shape[-1] // self.groups, dim=-1)
        entering, leaving = (self.base_kernel + delta).unbind(1)  # (B, taps, H)
        return _convolved(entering, states), partial(_convolved, leaving)


def _convolved(kernel: Tensor, states: Tensor) -> Tensor:
    slots, taps = len(states), kernel.shape[1]
    shifted = [pad(states, (0, 0, tap, 0))[:slots] for tap in range(taps)]  # nothing is before the block
    return (kernel * torch.stack(shifted, dim=1)).sum(1)


def entering(layer: Any, name: str, states: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What enters a part of a layer, and the function for what leaves it. Both are unchanged without a convolution."""
    convolution = getattr(layer, name, None)
    return (states, lambda output: output) if convolution is None else convolution(states)


class CandidateSelector(nn.Module):
    """Scores of the `count` best candidates: their logits, and a product of rank R of what is known of the candidate,
    of the token before it and of the draft's state.
    """

    def __init__(self, checkpoint: DrafterCheckpoint, hidden: int, count: int, logits: tuple[float, float]) -> None:
        """`logits` are the factor of the logits, and the limit of a soft cap, or 0."""
        super().__init__()
        tokens, rank = checkpoint.shapes[PREDECESSORS]
        self.count, (self.factor, self.cap) = count, logits
        self.predecessor_codebook = nn.Parameter(torch.empty(tokens, rank))
        self.successor_codebook = nn.Parameter(torch.empty(tokens, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(self, logits: Tensor, state: Tensor, previous: int) -> Tensor:
        """Return the logits (1, V) of a draft with a state (1, H) after a token; minus infinity for the others."""
        best, ids = logits.topk(self.count)
        best = best * self.factor
        best = torch.tanh(best / self.cap) * self.cap if self.cap else best
        known = self.predecessor_codebook[previous] * self.hidden_projection(state)  # (1, R)
        scores = best + known @ self.successor_codebook[ids[0]].T
        return torch.full_like(logits, float("-inf")).scatter(-1, ids, scores)


def is_dflash2(checkpoint: DrafterCheckpoint) -> bool:
    return checkpoint.has("fc.weight", "hidden_norm.weight", PREDECESSORS, f"layers.0.{CONVOLUTIONS[0]}.base_kernel")


def add_convolutions(layers: nn.ModuleList, checkpoint: DrafterCheckpoint) -> None:
    """Give each layer its convolutions. Raises UserError if their sizes do not fit together."""
    for index, layer in enumerate(layers):
        for name in CONVOLUTIONS:
            prefix = f"layers.{index}.{name}"
            base = checkpoint.shapes.get(f"{prefix}.base_kernel", ())
            rows = (checkpoint.shapes.get(f"{prefix}.kernel_projection.weight") or (0,))[0]
            groups = rows // (2 * base[1]) if len(base) == 3 and base[1] else 0
            if not groups or base[2] % groups:
                raise misfit(checkpoint, f"its convolution {prefix} has a kernel {base} and {rows} rows of changes")
            layer.add_module(name, SlotConvolution(base[1], groups, base[2]))
