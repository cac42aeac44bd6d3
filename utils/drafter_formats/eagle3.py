"""EAGLE-3, EAGLE-3.1 and P-EAGLE drafters in the layouts of SafeAILab, SGLang and SpecForge, of speculators, and of
NeMo and DeepSpec (Li et al. 2025, arXiv 2503.01840; arXiv 2605.09992).

The first layer attends with the embedding of a token and a state side by side; further layers are ordinary ones, except
that in DeepSpec all layers are like the first.

P-EAGLE trains the same network to draft a whole block in one pass (arXiv 2602.01469). Each draft after the first has a
place of its own in the pass, with the mask token instead of the token before it and `mask_hidden` instead of features.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from utils.bounds import MAX_GAMMA
from utils.decode.engine_forward import MAX_WIDTH, CompiledEntries
from utils.decode.features import layer_count
from utils.decode.model_info import vocabulary_size
from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.layer_config import decoder_layers, layer_config, sliding_sizes
from utils.drafter_formats.target_parts import (
    DraftHead,
    check_target_file,
    feature_layers,
    load_embedding,
    load_head,
    misfit,
    share_parts,
)
from utils.engine.decoder_spec import ACTIVATIONS, DecoderSpec, DraftSpec, JoinedInput, LayerSpec, Linear, Norm
from utils.engine.read_decoder import STATIC_ROPES, rotary_table
from utils.errors import UserError
from utils.logits_processor import one_thread
from utils.models.feature_drafter import BlockDrafter, Conventions, StepwiseDrafter

JOINED = ".hidden_norm.weight"  # in layers that read the embedding and the state: the first one, and in DeepSpec all
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MASK_STATE = "mask_hidden"
MASK_TOKEN = ("pard_token", "ptd_token_id", "mask_token_id")  # names in configs
NOTHING = torch.empty(0)  # in place of weights
USUAL_BLOCK = 8  # of speculators' training; exports for vLLM name no number


class Eagle3(StepwiseDrafter):
    """An EAGLE-3 drafter. `config` is that of its layers, with the target's vocabulary size."""

    lm_head: DraftHead
    compiled: CompiledEntries | None = None  # of an engine

    def __init__(
        self,
        config: Any,
        conventions: Conventions,
        target: PreTrainedModel,
        *,
        fc_norm: bool = False,
        norm_before_fc: bool = False,
        head_norms: bool = False,
        windows: Sequence[int | None] = (),
        joining: int = 1,
    ) -> None:
        """`windows` are as in `decoder_layers`. The first `joining` layers read the embedding beside the state."""
        super().__init__()
        self.config, self.conventions, self.target_layers = config, conventions, layer_count(target)
        self.doubtful = ("norm_output", "norm_before_residual")
        hidden, eps, count = config.hidden_size, config.rms_norm_eps, len(conventions.feature_layers)
        size = int(target.config.get_text_config(decoder=True).hidden_size)
        self.input_norm = LlamaRMSNorm(count * size, eps) if norm_before_fc else None
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(size, eps) for _ in range(count * fc_norm))
        self.fc = nn.Linear(count * size, hidden, bias=False)
        self.layers, self.joining = decoder_layers(config, windows, head_norms=head_norms), joining
        for layer in cast(Any, self.layers[: self.joining]):
            for name in ("q_proj", "k_proj", "v_proj"):
                outputs = getattr(layer.self_attn, name).out_features
                setattr(layer.self_attn, name, nn.Linear(2 * hidden, outputs, bias=False))
            layer.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.norm = LlamaRMSNorm(hidden, eps)
        self.rotary = LlamaRotaryEmbedding(config)

    def new_cache(self) -> Any:
        own = None if self.compiled is None else self.compiled.new_cache()
        return super().new_cache() if own is None else own

    def fuse_features(self, features: Tensor) -> Tensor:
        if self.compiled is not None and features.ndim == 2:
            return self.compiled.fused(features, self._fused)
        return self._fused(features)

    def _fused(self, features: Tensor) -> Tensor:
        if self.input_norm is not None:
            features = self.input_norm(features)
        if len(self.fc_norm):
            chunks = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return cast(Tensor, self.fc(features))

    def next_states(
        self, states: Tensor, tokens: Tensor, positions: Tensor, cache: Any, *, keeps_last: bool = False
    ) -> Tensor:
        return cast(Tensor, self(states, self.embed_tokens(tokens), positions, cache=cache, keeps_last=keeps_last))

    def forward(
        self, states: Tensor, embedded: Tensor, positions: Tensor, *, cache: Any = None, keeps_last: bool = False
    ) -> Tensor:
        """Return the next states (B, T, H) at `positions` (1, T).

        `states` (B, T, H) are those before, and `embedded` (B, T, H) the embeddings of the tokens that follow them.
        With `keeps_last` only the last state may be returned.
        """
        tables = self.rotary(states, positions)
        arguments = {"position_ids": positions, "past_key_values": cache, "attention_mask": None}
        arguments["position_embeddings"] = tables
        for layer in cast(Any, self.layers[: self.joining]):
            normed = layer.hidden_norm(states)
            residual = normed if self.conventions.norm_before_residual else states
            joined = torch.cat([layer.input_layernorm(embedded.to(states.dtype)), normed], dim=-1)
            states = residual + layer.self_attn(joined, **arguments)[0]
            if layer.mlp is not None:
                states = states + layer.mlp(layer.post_attention_layernorm(states))
        for layer in self.layers[self.joining :]:
            if keeps_last and layer is self.layers[-1]:
                self._cache_keys(layer, states[:, :-1], positions[:, :-1], cache)
                states, arguments["position_ids"] = states[:, -1:], positions[:, -1:]
                arguments["position_embeddings"] = self.rotary(states, positions[:, -1:])
            states = layer(states, use_cache=True, **arguments)
        return states

    def _cache_keys(self, layer: Any, states: Tensor, positions: Tensor, cache: Any) -> None:
        """Cache the keys and values of entries whose own states nothing reads."""
        attends, normed = layer.self_attn, layer.input_layernorm(states)
        key, value = (
            part(normed).unflatten(-1, (-1, attends.head_dim)) for part in (attends.k_proj, attends.v_proj)
        )  # (B, T, groups, D)
        key = attends.k_norm(key).transpose(1, 2)
        key = apply_rotary_pos_emb(key, key, *self.rotary(states, positions))[1]
        cache.update(key, value.transpose(1, 2), attends.layer_idx)

    def add_entries(self, states: Tensor, tokens: Tensor, first: int, cache: Any) -> tuple[Tensor, Tensor]:
        if len(tokens) > MAX_WIDTH:  # a text is read: only its last state is used
            positions = torch.arange(first, first + len(tokens), device=tokens.device)[None]
            state = self.next_states(states[None], tokens[None], positions, cache, keeps_last=True)[0, -1:]
            return state, self.logits(state)
        if self.compiled is None:
            return super().add_entries(states, tokens, first, cache)
        state, drafted = self.compiled(states, tokens, first, cache)
        with one_thread():
            return state, self.lm_head.over_target(drafted)

    def logits(self, state: Tensor) -> Tensor:
        return self.lm_head.over_target(self.drafted_logits(state))

    def drafted_logits(self, state: Tensor) -> Tensor:
        """Logits (T, V') of the draft vocabulary."""
        state = self.norm(state) if self.conventions.norm_before_head else state
        return cast(Tensor, self.lm_head.rows(state))

    def draft_spec(self) -> DraftSpec | None:
        """What an entry computes, for engines with programs of their own. None if it cannot be described."""
        layers = list(cast(Any, self.layers))
        inputs, mixtures, attending = [], [], []
        for index, layer in enumerate(layers):
            is_mixture = isinstance(layer.self_attn, OwnPosition)
            norms = (_norm(layer.input_layernorm), _norm(layer.hidden_norm)) if index < self.joining else None
            inputs.append(None if norms is None else JoinedInput(*norms, self.conventions.norm_before_residual))
            mixtures.append(Linear(f"layers.{index}.self_attn.linear", NOTHING) if is_mixture else None)
            if not is_mixture:
                attending.append((index, layer))
        shapes = {(layer.self_attn.head_dim, layer.self_attn.num_key_value_groups) for _, layer in attending}
        if len(shapes) != 1 or self.rotary.rope_type not in STATIC_ROPES or self.config.hidden_act not in ACTIVATIONS:
            return None
        size, shared = shapes.pop()
        decoder = DecoderSpec(
            hidden_size=self.config.hidden_size,
            heads=self.config.num_attention_heads,
            kv_heads=self.config.num_attention_heads // shared,
            head_dim=size,
            rotary_dim=size,
            vocabulary=self.lm_head.rows.out_features,
            embedding=self.embed_tokens.weight,
            embedding_scale=1.0,
            layers=tuple(self._layer_spec(index, layer) for index, layer in attending),
            ropes=(partial(rotary_table, self.rotary, None),),
            final_norm=_norm(self.norm),
            head=Linear("lm_head.rows", NOTHING),
        )
        return DraftSpec(decoder, tuple(inputs), tuple(mixtures), self.conventions.norm_before_head)

    def _layer_spec(self, index: int, layer: Any) -> LayerSpec:
        attends = layer.self_attn
        q, k, v, o = (Linear(f"layers.{index}.self_attn.{name}_proj", NOTHING) for name in "qkvo")
        gate, up, down = (Linear(f"layers.{index}.mlp.{name}_proj", NOTHING) for name in ("gate", "up", "down"))
        has_norms = not isinstance(attends.q_norm, nn.Identity)
        return LayerSpec(
            input_norm=None if index < self.joining else _norm(layer.input_layernorm),
            query=q,
            key=k,
            value=v,
            query_norm=_norm(attends.q_norm) if has_norms else None,
            key_norm=_norm(attends.k_norm) if has_norms else None,
            output=o,
            attention_output_norm=None,
            mlp_norm=_norm(layer.post_attention_layernorm),
            gate=gate,
            up=up,
            down=down,
            mlp_output_norm=None,
            activation=self.config.hidden_act,
            window=attends.sliding_window,
            rope=0,
            scaling=float(attends.scaling),
        )


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight.detach().float().contiguous(), float(norm.variance_epsilon))


class OwnPosition(nn.Module):
    """Attention of a layer whose window is one position. The weight of a single key is 1, so only values count."""

    sliding_window = 1

    def __init__(self, attends: Any) -> None:
        super().__init__()
        output, values = attends.o_proj.weight, attends.v_proj.weight.unflatten(0, (-1, attends.head_dim))
        values = values.repeat_interleave(attends.num_key_value_groups, 0).flatten(0, 1)
        own = (output.float() @ values.float()).to(values.dtype)
        self.linear = nn.Linear(own.shape[1], len(own), bias=False, device="meta")
        self.linear.weight = nn.Parameter(own, requires_grad=False)

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
        return self.linear(hidden_states), None


@torch.no_grad()
def leave_out_idle_parts(drafter: Eagle3) -> None:
    """Replace layers that read their own position and have an MLP of zeros, and equal heads, by less with the same
    output. Drafters with biases have none of these.
    """
    if any(name.endswith(".bias") for name in drafter.state_dict()):
        return
    attending = 0
    for index, layer in enumerate(cast(Any, drafter.layers)):
        reads_own = index < drafter.joining and layer.self_attn.sliding_window == 1
        if reads_own and not layer.mlp.down_proj.weight.any():
            layer.self_attn, layer.mlp = OwnPosition(layer.self_attn), None  # it needs no cache
        else:
            layer.self_attn.layer_idx = attending
            attending += 1
            _share_equal_heads(layer.self_attn)
    drafter.config.num_hidden_layers = attending


def _share_equal_heads(attends: Any) -> None:
    """Keep one of neighbouring heads of keys and values that are equal."""
    parts = [attends.k_proj, attends.v_proj]
    heads = [part.weight.unflatten(0, (-1, attends.head_dim)) for part in parts]  # (groups, D, inputs)
    count = len(heads[0])
    for size in range(count, 1, -1):
        if count % size == 0 and all(torch.equal(own, own[::size].repeat_interleave(size, 0)) for own in heads):
            for part, own in zip(parts, heads, strict=True):
                part.weight = nn.Parameter(own[::size].flatten(0, 1).contiguous(), requires_grad=False)
                part.out_features = len(part.weight)
            attends.num_key_value_groups *= size
            return


def is_eagle3(checkpoint: DrafterCheckpoint) -> bool:
    """Whether the first layer reads an embedding and a state side by side, and features enter through `fc`."""
    query, output = (checkpoint.shapes.get(f"layers.0.self_attn.{name}.weight", ()) for name in ("q_proj", "o_proj"))
    return checkpoint.has("fc.weight") and len(query) == len(output) == 2 and query[1] == 2 * output[0]


def load_eagle3(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> Eagle3:
    """Build the drafter. Raises UserError if its tensors do not fit its config or the target."""
    window = check_target_file(checkpoint, target)
    head_norms = checkpoint.has("layers.0.self_attn.q_norm.weight")
    config = layer_config(checkpoint.layer_keys, checkpoint, head_norms=head_norms)
    config.vocab_size = vocabulary_size(target)
    with torch.device("meta"):  # random weights would take time and memory
        drafter = Eagle3(
            config,
            conventions(checkpoint, target),
            target,
            # If the config alone has a norm, its tensor is missing.
            fc_norm=checkpoint.has("fc_norm.0.weight") or bool(checkpoint.config.get("fc_norm")),
            norm_before_fc=checkpoint.has("input_norm.weight") or bool(checkpoint.config.get("norm_before_fc")),
            head_norms=head_norms,
            windows=[size or window for size in sliding_sizes(checkpoint)],  # `window`: of layers with full attention
            joining=max(1, sum(name.endswith(JOINED) for name in checkpoint.stored)),
        )
    # To SpecForge 0.2, `norm_output` false means that the output head reads states before the final norm. In SGLang it
    # is about the states that are fed back.
    if checkpoint.config.get("norm_output") is False and "speculators_model_type" not in checkpoint.config:
        drafter.doubtful += ("norm_before_head",)
    drafter.is_ambiguous = is_ambiguous(checkpoint)
    load_exactly(drafter, checkpoint, besides=("embed_tokens.weight", "lm_head.weight", "d2t", "t2d"))
    leave_out_idle_parts(drafter)
    embedding = load_embedding(checkpoint, target, config.hidden_size)
    head = load_head(checkpoint, target, config.hidden_size)
    share_parts(drafter, embedding, head, target)
    return drafter


def load_exactly(module: nn.Module, checkpoint: DrafterCheckpoint, *, besides: tuple[str, ...]) -> None:
    """Fill a module with the tensors of a checkpoint, which decide about biases. Raises UserError if other names or
    shapes differ.
    """
    # Configs name biases in several ways, some by default. Equal parts of all layers and heads have one or have none.
    biased = {_kind(name) for name in checkpoint.stored if name.endswith(".bias")}
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            bias = nn.Parameter(torch.empty(part.out_features)) if _kind(f"{name}.bias") in biased else None
            part.register_parameter("bias", bias)
    expected = {name: tuple(part.shape) for name, part in module.state_dict().items()}
    # Old exports store the frequencies of rotary embeddings, which follow from the config.
    ignored = {name for name in checkpoint.stored if name in besides or name.endswith("rotary_emb.inv_freq")}
    stored = {name: shape for name, shape in checkpoint.shapes.items() if name not in ignored}
    if odd := next(iter(sorted(expected.items() ^ stored.items())), None):
        name, shape = odd[0], stored.get(odd[0], "missing")
        raise UserError(
            f"'{checkpoint.name}' has weights that differ from its config.json: "
            f"{getattr(checkpoint.stored.get(name), 'name', name)} is {shape} and should be "
            f"{expected.get(name, 'absent')}."
        )
    on_meta = any(part.is_meta for part in module.parameters())  # then the read tensors take the place of its own
    module.load_state_dict(checkpoint.tensors(stored), assign=on_meta)


def _kind(name: str) -> str:
    """The name of a tensor without the numbers of its layer and head."""
    return re.sub(r"\b\d+\b", "*", name)


def conventions(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> Conventions:
    """The conventions that the checkpoint declares, or the usual ones. Raises UserError for unusable layers."""
    config = checkpoint.config
    before_residual = config.get("norm_before_residual")
    if before_residual is None:  # speculators files without the key are read so by vLLM
        before_residual = "speculators_model_type" in config
    return Conventions(_feature_layers(checkpoint, target), bool(before_residual), bool(config.get("norm_output")))


def _feature_layers(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> tuple[int, ...]:
    """The hidden states that the drafter reads. Programs number them as inputs or as outputs of layers."""
    config, count = checkpoint.config, layer_count(target)
    nested, outputs = (config.get("eagle_config") or {}).get(LAYER_IDS), config.get("target_layer_ids")
    ids = config.get(LAYER_IDS)  # speculators, vLLM: hidden states
    if not ids and nested:  # SGLang: outputs of layers if the first one is 1
        ids = [layer + (nested[0] == 1) for layer in nested]
    elif not ids and outputs:  # DeepSpec: outputs of layers
        ids = [layer + 1 for layer in outputs]
    elif not ids:
        ids = [2, count // 2, count - 3]
    return feature_layers(checkpoint, target, ids)


def is_ambiguous(checkpoint: DrafterCheckpoint) -> bool:
    """Whether programs read the config of such an EAGLE-3 checkpoint in different ways."""
    config = checkpoint.config
    nested = (config.get("eagle_config") or {}).get(LAYER_IDS)
    counts_unsaid = bool(nested) and not config.get(LAYER_IDS)  # as inputs or as outputs of layers
    is_speculators = "speculators_model_type" in config
    residual_unsaid = is_speculators and config.get("norm_before_residual") is None
    # SpecForge until September 2026 wrote true for drafters that were trained with false, and false for others.
    output_doubtful = "norm_output" in config and not is_speculators
    return counts_unsaid or residual_unsaid or output_doubtful


class PEagle(BlockDrafter):
    """A P-EAGLE drafter.

    `network` is an EAGLE-3 drafter with its embedding and head. `mask` has the features (1, F) and the token id in the
    places of unknown tokens.
    """

    mask_hidden: Tensor

    def __init__(self, network: Eagle3, mask: tuple[Tensor, int], block_size: int) -> None:
        super().__init__()
        self.network, self.mask_token, self.block_size = network, mask[1], block_size
        self.register_buffer("mask_hidden", mask[0].to(network.device, network.dtype))
        self.config, self.device, self.dtype = network.config, network.device, network.dtype
        self.conventions = network.conventions
        self.target_layers, self.is_ambiguous = network.target_layers, network.is_ambiguous
        # No state is fed back, so where it would be taken from makes no difference.
        self.doubtful = tuple(flag for flag in network.doubtful if flag != "norm_output")

    def block_logits(self, features: Tensor, tokens: Tensor, first: int, cache: Any) -> Tensor:
        self.network.conventions = self.conventions  # which may have been corrected
        unknown = self.block_size - 1
        features = torch.cat([features, self.mask_hidden.expand(unknown, -1)])
        tokens = torch.cat([tokens, tokens.new_full((unknown,), self.mask_token)])
        positions = torch.arange(first, first + len(tokens), device=tokens.device)
        states = self.network.fuse_features(features)
        states = self.network.next_states(states[None], tokens[None], positions[None], cache)[0]
        if unknown:  # a crop by 0 positions would empty the cache
            cache.crop(-unknown)
        return self.network.logits(states[-self.block_size :])


def is_peagle(checkpoint: DrafterCheckpoint) -> bool:
    """Whether it is an EAGLE-3 checkpoint with features for unknown tokens, or is named as if it had them."""
    is_named = checkpoint.config.get("speculators_model_type") == "peagle"
    return (is_named or checkpoint.has(MASK_STATE)) and is_eagle3(checkpoint)


def load_peagle(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> PEagle:
    """Build the drafter. Raises UserError if its tensors do not fit its config or the target."""
    stored = {name: part for name, part in checkpoint.stored.items() if name != MASK_STATE}
    block_size, token = _block_size(checkpoint), _mask_token(checkpoint)
    network = load_eagle3(replace(checkpoint, stored=stored), target)
    hidden = checkpoint.tensors([MASK_STATE])[MASK_STATE].reshape(1, -1)
    if hidden.shape[1] != network.fc.in_features:
        raise misfit(checkpoint, f"its {MASK_STATE} has {hidden.shape[1]} numbers, not {network.fc.in_features}")
    size = network.embed_tokens.num_embeddings
    if not 0 <= token < size:
        raise misfit(checkpoint, f"its mask token is {token}, and its embedding has {size} tokens")
    return PEagle(network, (hidden, token), block_size)


def _mask_token(checkpoint: DrafterCheckpoint) -> int:
    given = next((checkpoint.config[name] for name in MASK_TOKEN if checkpoint.config.get(name) is not None), None)
    if given is None:
        raise UserError(
            f"'{checkpoint.name}' names no mask token in its config.json: add mask_token_id, or fetch it again."
        )
    return int(given)  # some exports write it as text


def _block_size(checkpoint: DrafterCheckpoint) -> int:
    """The number of drafts that the config declares, or the usual one."""
    proposals = (checkpoint.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    size = checkpoint.config.get("num_depths") or proposals[0].get("speculative_tokens") or USUAL_BLOCK
    if type(size) is not int or not 1 <= size <= MAX_GAMMA:
        raise UserError(f"'{checkpoint.name}' drafts {size} tokens, and a block may have 1 to {MAX_GAMMA}.")
    return size
