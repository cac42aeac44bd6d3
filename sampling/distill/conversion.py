"""A drafter in the EAGLE-3 format that begins with the weights of a trained head, which shortens its training.

A head mixes embedding and state before its layer. In EAGLE-3 the attention reads them side by side, and the residual is
the state alone. So the converted drafter only resembles the head, unless the head's mixture leaves the state unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from sampling.distill.dataset import Corpus
from sampling.distill.students import LAST, HeadStudent
from sampling.distill.target import Target
from utils.decode.features import final_norm, layer_count
from utils.drafter_formats.eagle3 import Eagle3
from utils.drafter_formats.eagle3_file import new_eagle3
from utils.errors import UserError
from utils.models.draft_head import Head

MEASURED_ROWS = 16  # of a page, for the usual size of hidden states


def converted_layers(head: Head | Eagle3, count: int) -> tuple[int, ...]:
    """The hidden states that the converted drafter reads: those of the head, the last one before the final norm.

    count: of the target's layers.
    """
    return tuple(count + 1 if layer == LAST else layer for layer in head.feature_layers)


@torch.no_grad()
def eagle3_from_head(student: HeadStudent, target: Target, corpus: Corpus) -> Eagle3:
    """The drafter, in float32. student: the head. corpus: pages of its hidden states and the last one before the norm.

    Without pages the sizes of hidden states are taken as 1.
    """
    head = cast(Head, student.head)
    layers = converted_layers(head, layer_count(target.model))
    drafter = new_eagle3(target.model, layers).to(target.model.device)
    drafter.conventions = replace(drafter.conventions, norm_before_residual=True)
    sizes, mixed = _sizes(student, corpus, len(layers)) if len(corpus) else ([1.0] * len(layers), 1.0)
    for layer, size, norm in zip(head.feature_layers, sizes, cast(Any, drafter.fc_norm), strict=True):
        norm.weight.copy_(_final_scale(target.model, norm.weight) if layer == LAST else torch.tensor(size))
    first, own = cast(Any, drafter.layers[0]), cast(Any, head.layer)
    drafter.fc.weight.copy_(head.read.weight)
    first.hidden_norm.weight.copy_(head.norm_feature.weight)
    first.input_layernorm.weight.copy_(head.norm_token.weight)
    # (H, 2H): the head's mixture of embedding and state, divided by its usual size instead of its own.
    mixture = own.input_layernorm.weight[:, None] * head.mix.weight / mixed
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(first.self_attn, name).weight.copy_(getattr(own.self_attn, name).weight @ mixture)
    first.self_attn.o_proj.load_state_dict(own.self_attn.o_proj.state_dict())
    first.post_attention_layernorm.load_state_dict(own.post_attention_layernorm.state_dict())
    first.mlp.load_state_dict(own.mlp.state_dict())
    drafter.norm.load_state_dict(head.norm.state_dict())
    return drafter


def _sizes(student: HeadStudent, corpus: Corpus, count: int) -> tuple[list[float], float]:
    """The usual root mean squares of the hidden states that the head reads, and of its mixtures."""
    head = cast(Head, student.head)
    page = corpus.page(0).rows(slice(MEASURED_ROWS), student.rows.device)
    hidden = page.features.float().chunk(count + 1, dim=-1)  # the last one, after the norm, comes besides
    read = [hidden[-1] if layer == LAST else part for layer, part in zip(head.feature_layers, hidden, strict=False)]
    states = head.fuse_features(torch.cat(read, dim=-1))[:, :-1]
    embedded = student.embed(page.tokens[:, 1:].long()).float()
    mixed = head.mix(torch.cat([head.norm_token(embedded), head.norm_feature(states)], dim=-1))
    return [_size(part) for part in read], _size(mixed)


def _size(states: Tensor) -> float:
    """The median root mean square: a few positions have huge states."""
    return float(states.float().square().mean(-1).sqrt().median())


def _final_scale(model: Any, like: Tensor) -> Tensor:
    try:
        scale = getattr(final_norm(model), "weight", None)
    except UserError:  # it is not found
        scale = None
    return torch.ones_like(like) if scale is None or scale.shape != like.shape else scale.to(like)
