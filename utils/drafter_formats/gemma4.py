"""Google's assistants for Gemma 4 (google/gemma-4-*-it-assistant): a few layers without keys and values of their own,
which attend to those of the target's last layers.

transformers hands the target's keys and values over. Here they are computed once more, from the inputs of the layers
that they belong to. These are hidden states of the target, so every engine and every kind of cache will do.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Gemma4AssistantConfig, Gemma4TextConfig, PreTrainedModel
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantMaskedEmbedder

from utils.decode.features import layer_count
from utils.decode.kv_cache import GrowingLayer
from utils.decode.model_info import vocabulary_size
from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.eagle3 import load_exactly
from utils.drafter_formats.layer_config import FULL, SLIDING
from utils.drafter_formats.target_parts import misfit, share_parts
from utils.errors import UserError
from utils.models.feature_drafter import Conventions, StepwiseDrafter

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # model types of drafters
TARGETS = ("gemma4_text", "gemma4_unified_text")  # whose text layers are equal
# What the layers of an assistant cannot have, so that keys of other model types and defaults do not turn it on.
PLAIN = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "enable_moe_block": False}


class SharingConfig(Gemma4TextConfig):
    """The config of layers that all read keys and values from elsewhere. transformers 5.23 refuses to describe them."""

    @property
    def kv_sharing_modes(self) -> list[str | None]:
        return ["reuse"] * self.num_hidden_layers


class SharedKeys:
    """A cache: the target's keys and values by layer type, and how many entries were drafted after them."""

    def __init__(self) -> None:
        self.layers = {kind: GrowingLayer() for kind in (SLIDING, FULL)}
        self.known = self.drafted = 0

    def crop(self, count: int) -> None:
        """Forget the last `-count` entries. Those that were drafted have neither keys nor values."""
        drafted = min(self.drafted, -count)
        self.drafted -= drafted
        if rest := -count - drafted:
            for layer in self.layers.values():
                layer.crop(-rest)
            self.known -= rest


class TargetKeys(nn.Module):
    """A copy of what computes the keys and values of a target's layer. A copy, because engines replace the original."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attends = layer.self_attn
        self.norm, self.size = copy.deepcopy(layer.input_layernorm), attends.head_dim
        self.keys, self.values = copy.deepcopy(attends.k_proj), copy.deepcopy(attends.v_proj)
        self.key_norm, self.value_norm = copy.deepcopy(attends.k_norm), copy.deepcopy(attends.v_norm)

    def forward(self, states: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, G, T, D) of the layer's inputs (B, T, H). `tables` are cosines and sines."""
        states, shape = self.norm(states), (*states.shape[:-1], -1, self.size)
        keys = self.keys(states).view(shape)
        values = keys if self.values is None else self.values(states).view(shape)
        keys = apply_rotary_pos_emb(self.key_norm(keys), *tables, unsqueeze_dim=2)
        return keys.transpose(1, 2), self.value_norm(values).transpose(1, 2)


class Gemma4Assistant(StepwiseDrafter):
    """An assistant. `config` is that of its layers, `own` the whole one. `target_size` is the target's hidden size."""

    shared: nn.ModuleDict
    target_rotary: nn.Module

    def __init__(self, config: Any, own: Gemma4AssistantConfig) -> None:
        super().__init__()
        self.config, self.target_size = config, own.backbone_hidden_size
        hidden, size = config.hidden_size, config.vocab_size
        with torch.device("meta"):  # without memory: the tensors of the checkpoint take the place of these
            self.layers = nn.ModuleList(
                Gemma4TextDecoderLayer(config, index) for index in range(config.num_hidden_layers)
            )
            self.norm = Gemma4RMSNorm(hidden, eps=config.rms_norm_eps)
            self.pre_projection = nn.Linear(2 * self.target_size, hidden, bias=False)
            self.post_projection = nn.Linear(hidden, self.target_size, bias=False)
            self.lm_head = nn.Linear(hidden, size, bias=False)
            self.masked_embedding = Gemma4AssistantMaskedEmbedder(own) if own.use_ordered_embeddings else None

    def new_cache(self) -> SharedKeys:
        return SharedKeys()

    def next_states(self, states: Tensor, tokens: Tensor, positions: Tensor, cache: SharedKeys) -> Tensor:
        """A known position has the inputs of two layers besides its hidden state. One that was drafted has only the
        assistant's own state: it attends to what was known before the first draft, from the same position.
        """
        *inputs, hidden = states.split(self.target_size, dim=-1)
        if inputs:
            for kind, given in zip(self.shared, inputs, strict=True):
                cache.layers[kind].update(*self.shared[kind](given, self.target_rotary(given, positions, kind)))
            cache.known += tokens.shape[1]
        else:
            cache.drafted += tokens.shape[1]
        # Only the last state is returned: positions do not read each other.
        embedded = self.embed_tokens(tokens[:, -1:]).to(hidden.dtype)
        return self._attended(torch.cat([embedded, hidden[:, -1:]], dim=-1), cache)

    def _attended(self, joined: Tensor, cache: SharedKeys) -> Tensor:
        """The state (1, 1, H) of a token and the state before it (1, 1, 2 H'), with a query one position after the
        known keys.
        """
        x, position = self.pre_projection(joined), torch.tensor([[cache.known]], device=joined.device)
        # The window ends at the last key, and not at the query's position after it.
        lengths = {FULL: cache.known, SLIDING: self.config.sliding_window + 1}
        shared = {
            kind: (layer.keys[:, :, -lengths[kind] :], layer.values[:, :, -lengths[kind] :])
            for kind, layer in cache.layers.items()
        }
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            x = layer(x, shared_kv_states=shared, position_embeddings=self.rotary(x, position, kind))
        return cast(Tensor, self.norm(x))

    def logits(self, state: Tensor) -> Tensor:
        if self.masked_embedding is None:
            return cast(Tensor, self.lm_head(state))
        return torch.cat([self.masked_embedding(row[None, None], self.lm_head.weight)[0] for row in state])

    def feedback(self, state: Tensor) -> Tensor:
        return cast(Tensor, self.post_projection(state))


def is_gemma4_assistant(checkpoint: DrafterCheckpoint) -> bool:
    return checkpoint.config.get("model_type") in ASSISTANTS


def load_gemma4_assistant(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> Gemma4Assistant:
    """Build the drafter. Raises UserError if its tensors do not fit its config or the target."""
    text = target.config.get_text_config(decoder=True)
    if text.model_type not in TARGETS:
        raise misfit(checkpoint, f"it needs a target of one of the types {', '.join(TARGETS)}, not {text.model_type}")
    config, own = _configs(checkpoint)
    if own.backbone_hidden_size != text.hidden_size:
        raise misfit(checkpoint, f"it reads hidden states of size {own.backbone_hidden_size}, not {text.hidden_size}")
    if config.vocab_size != vocabulary_size(target):
        raise misfit(checkpoint, f"it drafts {config.vocab_size} tokens, and the target has {vocabulary_size(target)}")
    sources = _sources(checkpoint, config, text)
    drafter = Gemma4Assistant(config, own)
    # The output head is tied to an embedding that nothing else reads.
    head = "lm_head." if checkpoint.has("lm_head.weight") else "embed_tokens."
    load_exactly(drafter, checkpoint.renamed({head: "lm_head."}), besides=("embed_tokens.weight",))
    if drafter.masked_embedding is not None:
        ordering = drafter.masked_embedding.token_ordering.long().sort().values
        if not torch.equal(ordering, torch.arange(len(ordering))):
            raise UserError(
                f"'{checkpoint.name}' has a token_ordering that is not an order of its tokens: fetch it again."
            )
    decoder: Any = target.get_decoder()
    drafter.conventions = Conventions((*sources.values(), layer_count(target)))
    drafter.shared = nn.ModuleDict({kind: TargetKeys(decoder.layers[index]) for kind, index in sources.items()})
    rotary, embedding = Gemma4TextRotaryEmbedding(config), target.get_input_embeddings()
    share_parts(drafter, embedding, drafter.lm_head, target, rotary=rotary)
    drafter.target_rotary = copy.deepcopy(decoder.rotary_emb)  # after the move: its frequencies stay float32
    return drafter


def _configs(checkpoint: DrafterCheckpoint) -> tuple[Any, Gemma4AssistantConfig]:
    text = dict(checkpoint.config["text_config"])
    for key in ("model_type", "num_kv_shared_layers"):
        text.pop(key, None)
    config = SharingConfig(**text | PLAIN, num_kv_shared_layers=text["num_hidden_layers"])
    keys = ("backbone_hidden_size", "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k")
    chosen = {name: checkpoint.config[name] for name in keys if checkpoint.config.get(name) is not None}
    own = Gemma4AssistantConfig(text_config=config, **chosen)
    config._attn_implementation = "sdpa"  # which the line above resets
    return config, own


def _sources(checkpoint: DrafterCheckpoint, config: Any, text: Any) -> dict[str, int]:
    """The target's layer whose keys and values each type of layer reads: the last one of the type that computes its
    own. Raises UserError if there is none, or if they have different sizes.
    """
    own = text.num_hidden_layers - text.num_kv_shared_layers
    found = {}
    for kind in (SLIDING, FULL):
        if kind not in text.layer_types[:own]:
            raise misfit(checkpoint, f"the target has no layer of the type {kind} with keys of its own")
        found[kind] = own - 1 - text.layer_types[:own][::-1].index(kind)
        if kind in config.layer_types:
            read, made = _key_sizes(config, config.layer_types.index(kind)), _key_sizes(text, found[kind])
            if read != made:
                raise misfit(checkpoint, f"layers of the type {kind} read keys of the sizes {read}, not {made}")
    return found


def _key_sizes(config: Any, layer: int) -> tuple[int, int]:
    """The number of key heads of a layer, and their size."""
    part = config.per_layer_config[layer]
    return part.num_key_value_heads, part.head_dim
