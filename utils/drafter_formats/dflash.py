"""DFlash, DFlash2, DSpark and JetSpec drafters in the layouts of z-lab, SpecForge, DeepSpec, speculators and JetSpec:
all drafts of a round from one pass over a block of mask tokens (arXiv 2602.06036; arXiv 2607.05147; arXiv 2606.18394).

Keys of the config stand at the top level or under `dflash_config`. Layer ids are outputs of layers in
`target_layer_ids` (z-lab, SpecForge, DeepSpec), and hidden states in `aux_hidden_state_layer_ids` (speculators).

The queries of a layer are the slots of a block, and its keys are those of the context and of the block. The states of
the context enter every layer as they are, so a prompt of T tokens needs no mask of T x T. DSpark adds heads: a bias for
the token before a draft, and a confidence. Both depend on nothing but the block's states and the tokens before the
draft, so drafts drawn from left to right have the distribution that they are drawn from.

DFlash2 (z-lab/dflash, vLLM and SGLang since August 2026, speculators 0.9) adds short causal convolutions over the slots
of a block, before and after the attention and the MLP of each layer. A selector keeps the best candidates of a draft
and adds a score that depends on the token before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, rotate_half
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from utils.decode.features import layer_count
from utils.decode.kv_cache import GrowingLayer
from utils.decode.model_info import vocabulary_size
from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.eagle3 import load_exactly
from utils.drafter_formats.layer_config import layer_config, sliding_sizes
from utils.drafter_formats.target_parts import (
    DraftHead,
    check_target_file,
    feature_layers,
    load_embedding,
    load_head,
    misfit,
    share_parts,
)
from utils.errors import UserError
from utils.models.feature_drafter import BlockDrafter, Conventions

# Tensors that are not those of the module: shared parts, and the target's own, which training keeps beside them.
BESIDES = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
SPECULATORS = "speculators_model_type"
TYPES = ("dflash", "dspark")
CAUSAL = ("is_causal", "causal", "causal_head")  # of z-lab, of vLLM and NeMo, and of JetSpec, in the order of vLLM
UNLIMITED = 2**31  # positions of a window without an end
MOST_SLOTS = 1024  # published blocks have 7 to 16
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
CONFIDENCE = "confidence_head.proj.weight"
# Of DFlash2: factors of the embedding and of the logits, and the limit of a soft cap.
SCALES = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}
SELECTOR, CONVOLUTIONS = "candidate_selector", ("attention_conv", "mlp_conv")
PREDECESSORS = f"{SELECTOR}.predecessor_codebook"
VANILLA, GATED, RECURRENT = "vanilla", "gated", "rnn"


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding attention of a block.

    A slot attends to `size` positions of the context. If the window `moves`, these end at the slot, and include it and
    the earlier ones of the block (SpecForge); otherwise they end before the block for all slots (speculators). With
    `causal`, a slot attends to no later slot.
    """

    size: int
    moves: bool
    causal: bool

    def mask(self, context: int, slots: int, device: Any) -> Tensor:
        """Which of `context` + `slots` keys each slot attends to: (slots, context + slots)."""
        key = torch.arange(-context, slots, device=device)  # relative to the first slot
        slot = torch.arange(slots, device=device)[:, None]
        begin = slot - self.size + 1 if self.moves else slot.new_full((slots, 1), -self.size)
        own = key <= slot if self.causal else key < slots
        return ((key >= begin) | (key >= 0)) & own


def _rotated(heads: Tensor, tables: Tensor) -> Tensor:
    """Heads (..., T, heads, D) at the positions of these cosines and sines (2, T, D)."""
    cos, sin = tables[:, :, None]
    return cast(Tensor, heads * cos + rotate_half(heads) * sin)


def layer_pass(
    layer: Any, states: Tensor, context: Tensor, tables: Tensor, *, kept: GrowingLayer, window: Window | None
) -> Tensor:
    """Return states (B, H) of the slots after a layer with Qwen3's modules.

    `context` has states (T, H) of new positions before the block, whose keys and values are added to `kept`. `tables`
    (2, T + B, D) are the cosines and sines of these positions and of the block.
    """
    attention, new = layer.self_attn, len(context)
    normed, leaving = entering(layer, "attention_conv", layer.input_layernorm(states))
    _remember(attention, context, tables[:, :new], kept)
    keys, values = _remember(attention, normed, tables[:, new:], kept)
    attended = _attend(queries_of(attention, normed, tables[:, new:]), keys, values, window)
    kept.crop(-len(states))
    states = states + leaving(attention.o_proj(attended))
    normed, leaving = entering(layer, "mlp_conv", layer.post_attention_layernorm(states))
    return states + leaving(layer.mlp(normed))


def queries_of(attention: Any, states: Tensor, tables: Tensor) -> Tensor:
    """The queries (..., T, heads, D) of states (..., T, H) at the positions of these cosines and sines (2, T, D)."""
    return _rotated(attention.q_norm(_heads(attention.q_proj(states), attention)), tables)


def keys_and_values(attention: Any, states: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Those of states (..., T, H), as queries_of: (..., T, groups, D)."""
    keys = _rotated(attention.k_norm(_heads(attention.k_proj(states), attention)), tables)
    return keys, _heads(attention.v_proj(states), attention)


def _heads(projected: Tensor, attention: Any) -> Tensor:
    """(..., T, heads x D) as (..., T, heads, D)."""
    return projected.view(*projected.shape[:-1], -1, attention.head_dim)


def _remember(attention: Any, states: Tensor, tables: Tensor, kept: GrowingLayer) -> tuple[Tensor, Tensor]:
    """Append keys and values of states (T, H), and return all of them: (1, groups, K, D)."""
    keys, values = (part.transpose(0, 1)[None] for part in keys_and_values(attention, states, tables))
    return kept.update(keys, values)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, window: Window | None) -> Tensor:
    """Attention of the slots (B, heads, D) to all keys (1, groups, K, D), or to those in the window: (B, heads x D)."""
    slots, heads, size = queries.shape
    mask = None
    if window is not None:
        context = min(keys.shape[2] - slots, window.size)  # no slot sees more of it
        keys, values = keys[:, :, -context - slots :], values[:, :, -context - slots :]
        # The query heads of a group share its keys and take the place of further query rows.
        mask = window.mask(context, slots, queries.device).repeat(heads // keys.shape[1], 1)
    packed = queries.transpose(0, 1).reshape(1, keys.shape[1], -1, size)
    attended = scaled_dot_product_attention(packed, keys, values, attn_mask=mask)
    return attended.view(heads, slots, size).transpose(0, 1).reshape(slots, -1)


class MarkovHead(nn.Module):
    """A low-rank bias of draft logits: vanilla, w2 . w1[token before]; gated, with a gate that reads the draft's state;
    or rnn, with a memory of the drafts before it.
    """

    def __init__(self, checkpoint: DrafterCheckpoint, state: int) -> None:
        """`state` is the size of a draft's state."""
        super().__init__()
        (tokens, rank), (drafted, _) = (checkpoint.shapes[name] for name in MARKOV)
        found = GATED if checkpoint.has("markov_head.gate_proj.weight") else VANILLA
        found = RECURRENT if checkpoint.has("markov_head.joint_proj.weight") else found
        self.kind = markov_kind(checkpoint) or found
        self.markov_w1 = nn.Embedding(tokens, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        if self.kind == GATED:
            self.gate_proj = nn.Linear(state + rank, rank)
        elif self.kind == RECURRENT:
            self.joint_proj = nn.Linear(2 * rank + state, 3 * rank)

    def before(self, token: int) -> Tensor:
        """What is known of a token: (1, R)."""
        return self.markov_w1.weight[token : token + 1]

    def bias(self, token: int, state: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the bias (1, V') of a draft after a token, and the memory (1, R) for the next draft.

        `state` (1, H) is the draft's. `memory` follows the draft before it; None for the first one.
        """
        known = self.before(token)
        if self.kind == GATED:
            known = known * torch.sigmoid(self.gate_proj(torch.cat([state, known], dim=-1)))
        elif self.kind == RECURRENT:
            memory = torch.zeros_like(known) if memory is None else memory
            gate, candidate, output = self.joint_proj(torch.cat([memory, known, state], dim=-1)).chunk(3, dim=-1)
            memory = torch.lerp(torch.tanh(candidate), memory, torch.sigmoid(gate))
            known = torch.tanh(output)
        return self.markov_w2(known), memory


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


@dataclass(slots=True)
class BlockCache:
    """Keys and values of the context. Of the last block: its states (K, H), and what its Markov head remembers after
    each draft.
    """

    layers: list[GrowingLayer]
    states: Tensor = field(default_factory=lambda: torch.empty(0))
    memories: list[Tensor | None] = field(default_factory=list)


class DFlash(BlockDrafter):
    """A DFlash drafter, with a Markov head or a confidence head a DSpark drafter, or with a selector a DFlash2 drafter.

    `config` is that of its layers, with the target's vocabulary size. A block has `slots` tokens: the last known one
    and mask tokens. `windows` has the sliding or causal attention of each layer, or None. `stored` are the keys of
    config.json. A confidence head gives the logit of the probability that a draft is accepted.
    """

    embed_tokens: nn.Module
    lm_head: DraftHead
    rotary: nn.Module

    def __init__(self, config: Any, checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> None:
        """Raises UserError for keys of the block that are missing or not usable."""
        super().__init__()
        self.config, self.target_layers, self.stored = config, layer_count(target), checkpoint.config
        declared = setting(checkpoint, "sample_from_anchor")
        from_anchor = is_dspark(checkpoint) if declared is None else bool(declared)
        self.slots = _number(checkpoint, "block_size", 1 if from_anchor else 2, MOST_SLOTS)
        self.mask_token = _number(checkpoint, "mask_token_id", 0, config.vocab_size - 1)
        self.windows, self.doubtful = _windows(checkpoint), ("from_anchor",) if self.slots > 1 else ()
        self.conventions = Conventions(_feature_layers(checkpoint, target), from_anchor=from_anchor)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(checkpoint.shapes["fc.weight"][1], hidden, bias=False)
        self.hidden_norm, self.norm = LlamaRMSNorm(hidden, eps), LlamaRMSNorm(hidden, eps)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.markov_head = MarkovHead(checkpoint, hidden) if checkpoint.has(*MARKOV) else None
        self.confidence_head: Any = None
        if checkpoint.has(CONFIDENCE):
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(checkpoint.shapes[CONFIDENCE][1], 1)})
        self.candidate_selector, self.embedding_scale = None, 1.0
        if is_dflash2(checkpoint):
            add_convolutions(self.layers, checkpoint)
            scale, *logits = (float(setting(checkpoint, key) or usual) for key, usual in SCALES.items())
            count = _number(checkpoint, "selector_top_k", 1, config.vocab_size)
            self.candidate_selector = CandidateSelector(checkpoint, hidden, count, (logits[0], logits[1]))
            self.embedding_scale = scale

    @property
    def block_size(self) -> int:  # type: ignore[override]  # it depends on a convention that can be corrected
        return self.slots - (not self.conventions.from_anchor)

    def new_cache(self) -> BlockCache:
        return BlockCache([GrowingLayer() for _ in self.layers])

    def block_logits(self, features: Tensor, tokens: Tensor, first: int, cache: BlockCache) -> Tensor:
        context = self.hidden_norm(self.fc(features))
        slots = tokens.new_full((self.slots,), self.mask_token)
        slots[0] = tokens[-1]
        states = self.embed_tokens(slots).to(context.dtype) * self.embedding_scale
        positions = torch.arange(first, first + len(features) + len(slots), device=features.device)
        tables = torch.cat(self.rotary(states, positions[None]))
        for layer, kept, window in zip(self.layers, cache.layers, self.windows, strict=True):
            states = layer_pass(layer, states, context, tables, kept=kept, window=window)
        cache.states, cache.memories = self.norm(states)[-self.block_size :], []
        return cast(Tensor, self.lm_head(cache.states))

    def conditioned(self, logits: Tensor, index: int, previous: int, cache: BlockCache) -> Tensor:
        if self.candidate_selector is not None:
            return cast(Tensor, self.candidate_selector(logits, cache.states[index : index + 1], previous))
        if self.markov_head is None:
            return logits
        memory = cache.memories[index - 1] if index else None
        bias, memory = self.markov_head.bias(previous, cache.states[index : index + 1], memory)
        cache.memories[index:] = [memory]
        return logits + self.lm_head.over_target(bias)

    def confidence(self, index: int, previous: int, cache: BlockCache) -> float | None:
        if self.confidence_head is None:
            return None
        known, head = cache.states[index : index + 1], self.confidence_head["proj"]
        if head.in_features > known.shape[-1]:
            assert self.markov_head is not None
            known = torch.cat([known, self.markov_head.before(previous)], dim=-1)
        return float(torch.sigmoid(head(known).float()).item())


def is_dflash(checkpoint: DrafterCheckpoint) -> bool:
    """Whether it belongs to the family: features enter through `fc` and a norm of their own, before plain layers."""
    has_parts = checkpoint.has("fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight")
    return has_parts and len(checkpoint.shapes["fc.weight"]) == 2


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


def load_dflash(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> DFlash:
    """Build the drafter. Raises UserError if its tensors do not fit its config or the target."""
    check_target_file(checkpoint, target)
    check_supported(checkpoint)
    config = layer_config(checkpoint.layer_keys, checkpoint, head_norms=True)
    config.vocab_size = vocabulary_size(target)
    with torch.device("meta"):  # random weights would take time and memory
        drafter = DFlash(config, checkpoint, target)
    load_exactly(drafter, checkpoint, besides=BESIDES)
    # As z-lab's program, which has a factor of its own for DFlash2.
    embedding = load_embedding(checkpoint, target, config.hidden_size, scaled=not is_dflash2(checkpoint))
    head = load_head(checkpoint, target, config.hidden_size)
    _check_heads(checkpoint, drafter, head)
    share_parts(drafter, embedding, head, target)
    return drafter


def _check_heads(checkpoint: DrafterCheckpoint, drafter: DFlash, head: DraftHead) -> None:
    """Raise UserError unless the heads of DSpark or the selector fit the vocabularies and the states."""
    if (selector := drafter.candidate_selector) is not None:
        codes = len(selector.predecessor_codebook)
        if codes < head.size or head.rows.out_features > head.size or head.vocabulary is not None:
            raise misfit(checkpoint, f"its selector knows {codes} tokens, not {head.size}, or drafts a part of them")
    inputs = [drafter.config.hidden_size]
    if (markov := drafter.markov_head) is not None:
        tokens, drafts = markov.markov_w1.num_embeddings, markov.markov_w2.out_features
        inputs.append(inputs[0] + markov.markov_w1.embedding_dim)
        if tokens < head.size or drafts != head.rows.out_features:
            known = f"{tokens} tokens and drafts {drafts}, not {head.size} and {head.rows.out_features}"
            raise misfit(checkpoint, f"its Markov head knows {known}")
    if checkpoint.has(CONFIDENCE) and (read := checkpoint.shapes[CONFIDENCE][1]) not in inputs:
        raise misfit(checkpoint, f"its confidence head reads {read} numbers, not {inputs[-1]}")


def setting(checkpoint: DrafterCheckpoint, key: str) -> Any:
    """A key of the config, at the top level or under `dflash_config`; None if it is in neither."""
    found, nested = checkpoint.config.get(key), checkpoint.config.get("dflash_config")
    return nested.get(key) if found is None and isinstance(nested, dict) else found


def is_dspark(checkpoint: DrafterCheckpoint) -> bool:
    """Whether it belongs to the family and has, or is named as if it had, heads of DSpark."""
    names = [checkpoint.config.get(name) for name in (SPECULATORS, "architectures")]
    names.append(setting(checkpoint, "projector_type"))
    has_head = any(name.startswith(("markov_head.", "confidence_head.")) for name in checkpoint.stored)
    return is_dflash(checkpoint) and (has_head or any("dspark" in str(name).lower() for name in names))


def check_supported(checkpoint: DrafterCheckpoint) -> None:
    """Raise UserError for relatives of DFlash that compute something else."""
    declared = [checkpoint.config.get(SPECULATORS), setting(checkpoint, "projector_type")]
    types = (*TYPES, "dflash2") if is_dflash2(checkpoint) else TYPES
    if found := next((str(name) for name in declared if name and str(name).lower() not in types), None):
        raise _unsupported(checkpoint, f"is a drafter of the kind {found}")
    if checkpoint.has("layers.0.pre_feedforward_layernorm.weight"):
        raise _unsupported(checkpoint, "has layers of Gemma")


def markov_kind(checkpoint: DrafterCheckpoint) -> str:
    """The declared kind of the Markov head, or empty. Raises UserError for an unknown one."""
    kind = str(setting(checkpoint, "markov_head_type") or "").lower()
    if kind not in ("", VANILLA, GATED, RECURRENT):
        raise _unsupported(checkpoint, f"has a Markov head of the kind {kind}")
    return kind


def _unsupported(checkpoint: DrafterCheckpoint, what: str) -> UserError:
    return UserError(
        f"'{checkpoint.name}' {what}, which is not supported: name a DFlash or DSpark drafter with Qwen3 layers."
    )


def _number(checkpoint: DrafterCheckpoint, key: str, lowest: int, highest: int) -> int:
    value = setting(checkpoint, key)
    if type(value) is not int or not lowest <= value <= highest:
        raise UserError(
            f"'{checkpoint.name}' has {value!r:.40} as {key} in its config.json, and a block needs a whole number from "
            f"{lowest} to {highest}."
        )
    return value


def _feature_layers(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> tuple[int, ...]:
    count, states = layer_count(target), setting(checkpoint, "aux_hidden_state_layer_ids")
    outputs = setting(checkpoint, "target_layer_ids")
    if states:
        ids = states
    elif outputs:
        ids = [layer + 1 for layer in outputs]
    else:
        made_for = setting(checkpoint, "num_target_layers")
        ids = _default_ids(made_for if isinstance(made_for, int) else count, checkpoint.layer_count())
    # As their own programs read the last layer: vLLM before the final norm, transformers after it.
    return feature_layers(checkpoint, target, ids, before_norm=bool(states))


def _default_ids(layers: int, drafter_layers: int) -> list[int]:
    """As z-lab spreads them: as many as the drafter has layers, from the output of layer 1 to that of n - 3."""
    if drafter_layers == 1:
        return [layers // 2 + 1]
    return [round(1 + index * (layers - 4) / (drafter_layers - 1)) + 1 for index in range(drafter_layers)]


def _windows(checkpoint: DrafterCheckpoint) -> tuple[Window | None, ...]:
    moves = SPECULATORS not in checkpoint.config
    # The default of speculators depends on its type.
    usual = moves or not checkpoint.config.get("sliding_window_non_causal", is_dflash2(checkpoint))
    declared = next((value for key in CAUSAL if (value := setting(checkpoint, key)) is not None), None)
    if declared not in (None, True, False):
        raise _unsupported(checkpoint, f"declares causal attention as {declared!r:.40}")
    causal = usual if declared is None else bool(declared)
    # What is declared holds for all layers; otherwise only sliding ones are causal.
    windows = (size or (UNLIMITED if declared else None) for size in sliding_sizes(checkpoint))
    return tuple(None if size is None else Window(size, moves=moves, causal=causal) for size in windows)
