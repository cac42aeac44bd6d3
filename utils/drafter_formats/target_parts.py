"""What drafters share with their target: its embedding and its output head; and the vocabulary of their drafts."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from utils.decode.model_info import vocabulary_size
from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.errors import UserError

DRAFT_TO_TARGET = "d2t"  # target id = draft id + d2t[draft id]


class DraftHead(nn.Module):
    """An output head over a draft vocabulary of target ids.

    rows: the head, (V', H). vocabulary: the target id of each row (V',); None if they are all of the V ids in order.
    """

    def __init__(self, rows: nn.Linear, vocabulary: Tensor | None, size: int) -> None:
        super().__init__()
        self.rows, self.size = rows, size
        self.vocabulary: Tensor | None
        self.register_buffer("vocabulary", vocabulary)

    def forward(self, state: Tensor) -> Tensor:
        """Return logits (..., V) for states (..., H). Tokens that are never drafted have minus infinity."""
        drafted: Tensor = self.rows(state)
        if self.vocabulary is None and drafted.shape[-1] == self.size:
            return drafted
        logits = drafted.new_full((*drafted.shape[:-1], self.size), float("-inf"))
        if self.vocabulary is None:  # a vocabulary of the same family with less padding
            logits[..., : drafted.shape[-1]] = drafted
            return logits
        return logits.index_copy_(-1, self.vocabulary, drafted)


def load_head(checkpoint: DrafterCheckpoint, target: PreTrainedModel, hidden: int) -> DraftHead:
    """Return the drafter's output head, or the target's where the checkpoint has none. hidden: its input size.

    Raises UserError if sizes or ids do not fit the target.
    """
    size = vocabulary_size(target)
    if checkpoint.has("lm_head.weight"):
        weight = checkpoint.tensors(["lm_head.weight"])["lm_head.weight"]
    else:
        weight = target.get_output_embeddings().weight.detach()
    vocabulary = _vocabulary(checkpoint, size)
    if vocabulary is not None and not checkpoint.has("lm_head.weight"):
        weight = weight[vocabulary.to(weight.device)]
    if weight.shape[1] != hidden or (vocabulary is None and len(weight) > size):
        raise misfit(checkpoint, f"its output head is {tuple(weight.shape)}, and the target has {size} tokens")
    if vocabulary is not None and len(vocabulary) != len(weight):
        raise misfit(checkpoint, f"it has {len(weight)} output rows for {len(vocabulary)} draft tokens")
    rows = nn.Linear(hidden, len(weight), bias=False, device="meta")
    rows.weight = nn.Parameter(weight, requires_grad=False)
    return DraftHead(rows, vocabulary, size)


def load_embedding(checkpoint: DrafterCheckpoint, target: PreTrainedModel, hidden: int) -> nn.Embedding:
    """Return the drafter's input embedding, or the target's, which also takes the place of an equal copy.

    Raises UserError if sizes do not fit.
    """
    shared = cast(nn.Embedding, target.get_input_embeddings())
    if not checkpoint.has("embed_tokens.weight"):
        if shared.weight.shape[1] != hidden:
            raise misfit(checkpoint, f"it has no embedding, and needs one of size {hidden}")
        return shared
    weight = checkpoint.tensors(["embed_tokens.weight"])["embed_tokens.weight"]
    if weight.shape[1] != hidden or len(weight) < vocabulary_size(target):
        raise misfit(checkpoint, f"its embedding is {tuple(weight.shape)}")
    own = shared.weight.detach()
    if weight.shape == own.shape and torch.equal(weight.to(own.device, own.dtype), own):
        return shared
    embedding = nn.Embedding(len(weight), hidden, device="meta")
    embedding.weight = nn.Parameter(weight, requires_grad=False)
    return embedding


def misfit(checkpoint: DrafterCheckpoint, reason: str) -> UserError:
    """An error for a drafter of a different target."""
    return UserError(f"'{checkpoint.name}' was not made for this target: {reason}. Name a drafter of this target.")


def _vocabulary(checkpoint: DrafterCheckpoint, size: int) -> Tensor | None:
    """The target ids (V',) of the draft vocabulary, or None if it is the whole one."""
    if not checkpoint.has(DRAFT_TO_TARGET) or checkpoint.shapes[DRAFT_TO_TARGET][0] >= size:
        return None
    offsets = checkpoint.tensors([DRAFT_TO_TARGET])[DRAFT_TO_TARGET].long()
    ids = torch.arange(len(offsets)) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= size or len(ids.unique()) != len(ids):
        raise misfit(checkpoint, f"its draft vocabulary has ids outside 0..{size - 1}, or ids that occur twice")
    return ids
