"""Read a loaded transformers model as a DecoderSpec, or say why it cannot be read.

A variation that is not known must not be computed wrongly. Therefore only the model types of a table are read, every
module must be of a class that the type is known to have, and every parameter must have found its place in the spec.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from utils.engine.decoder_families import FAMILIES, HeadNorms, Windows
from utils.engine.decoder_spec import DecoderSpec, LayerSpec, Linear, Norm, RopeTable
from utils.engine.known_modules import ACTIVATION_NAMES, Unreadable, check_modules, check_parameters
from utils.engine.stored_weights import rows_of

STATIC_ROPES = ("default", "linear", "llama3", "yarn")
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


def read_decoder(model: PreTrainedModel) -> DecoderSpec | str:
    """Return what the model computes, or a clause that says why it cannot be read: "its family opt is not known".

    The spec shares the model's weights. Only norms that store weight - 1 are copied, in float32.
    """
    try:
        if model.config.model_type not in FAMILIES:
            return f"its family {model.config.model_type} is not known"
        check_modules(model)
        check_parameters(model)
        return _Reader(model).read()
    except Unreadable as reason:
        return str(reason)
    # Another version of transformers may spell a known family differently.
    except (AttributeError, LookupError, TypeError) as error:
        return f"its structure is not known ({error})"


class _Reader:
    """Reads one model and remembers which of its parameters have been read."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.config = model, model.config
        self.family = FAMILIES[model.config.model_type]
        self.heads, self.kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        self.hidden = self.config.hidden_size
        self.head_dim: int = model.model.layers[0].self_attn.head_dim
        self.rope_types: list[str | None] = []  # of the tables, in the order of DecoderSpec.ropes
        self._read: set[str] = set()

    def read(self) -> DecoderSpec:
        """Return the spec. Raises Unreadable if something of the model has no place in it."""
        if len(self.model.model.layers) != self.config.num_hidden_layers:
            raise Unreadable("its config gives another number of layers")
        head = self.linear("lm_head", self.model.lm_head.out_features, self.hidden)
        layers = tuple(self.layer(index) for index in range(self.config.num_hidden_layers))
        ropes = tuple(self.rope(layer_type) for layer_type in self.rope_types)
        spec = DecoderSpec(
            hidden_size=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim(ropes),
            vocabulary=len(head.weight),
            embedding=self.embedding("model.embed_tokens"),
            embedding_scale=self.embedding_scale(),
            layers=layers,
            ropes=ropes,
            final_norm=self.norm("model.norm", self.hidden),
            head=head,
            logit_scale=1.0 / self.config.logits_scaling if self.family.multipliers else 1.0,
            logit_softcap=self.config.final_logit_softcapping if self.family.softcap else None,
        )
        if unread := sorted({name for name, _ in self.model.named_parameters()} - self._read):
            raise Unreadable(f"its parameter {unread[0]} is not known")
        return spec

    def layer(self, index: int) -> LayerSpec:
        """Return layer `index`."""
        name = f"model.layers.{index}"
        layer, norms = self.model.get_submodule(name), self.family.norms
        self.check_attention(layer.self_attn)
        query, key, value = self.projections(f"{name}.self_attn")
        gate, up = self.gate_and_up(f"{name}.mlp")
        query_norm, key_norm = self.head_norms(f"{name}.self_attn")
        return LayerSpec(
            input_norm=self.layer_norm(name, norms.input),
            query=query,
            key=key,
            value=value,
            query_norm=query_norm,
            key_norm=key_norm,
            output=self.linear(f"{name}.self_attn.o_proj", self.hidden, self.heads * self.head_dim),
            attention_output_norm=self.layer_norm(name, norms.attention_output),
            mlp_norm=self.layer_norm(name, norms.mlp),
            gate=gate,
            up=up,
            down=self.linear(f"{name}.mlp.down_proj", self.hidden, self.config.intermediate_size),
            mlp_output_norm=self.layer_norm(name, norms.mlp_output),
            activation=self.activation(layer.mlp),
            window=self.window(index),
            rope=self.rope_index(index),
            scaling=float(layer.self_attn.scaling),
            residual_scale=float(layer.residual_multiplier) if self.family.multipliers else 1.0,
        )

    def check_attention(self, attention: Any) -> None:
        """Raise Unreadable if the attention scores are computed in a way that LayerSpec does not describe."""
        if self.family.softcap and attention.attn_logit_softcapping is not None:
            raise Unreadable("its attention scores are capped")
        if not attention.is_causal:
            raise Unreadable("its attention is not causal")
        if (attention.head_dim, attention.num_key_value_groups) != (self.head_dim, self.heads // self.kv_heads):
            raise Unreadable("its layers have different numbers of heads")

    def projections(self, name: str) -> list[Linear]:
        """Return the projections of the queries, keys and values of an attention module."""
        sizes = [count * self.head_dim for count in (self.heads, self.kv_heads, self.kv_heads)]
        if self.family.fused:
            return self.parts(f"{name}.qkv_proj", sizes)
        parts = zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True)
        return [self.linear(f"{name}.{part}", size, self.hidden) for part, size in parts]

    def gate_and_up(self, name: str) -> list[Linear]:
        """Return the projections that enter an MLP."""
        size = self.config.intermediate_size
        if self.family.fused:
            return self.parts(f"{name}.gate_up_proj", [size, size])
        return [self.linear(f"{name}.{part}", size, self.hidden) for part in ("gate_proj", "up_proj")]

    def linear(self, name: str, rows: int, columns: int) -> Linear:
        """Return a linear layer. Raises Unreadable if its weight is not (rows, columns)."""
        module = self.model.get_submodule(name)
        weight, bias = self.tensor(f"{name}.weight", rows, columns), None
        if module.bias is not None:
            bias = self.tensor(f"{name}.bias", rows)
        return Linear(name, weight, bias)

    def parts(self, name: str, sizes: list[int]) -> list[Linear]:
        """Return the row ranges of a linear layer that computes several, as views."""
        whole, parts, first = self.linear(name, sum(sizes), self.hidden), [], 0
        for size in sizes:
            rows = slice(first, first := first + size)
            bias = None if whole.bias is None else whole.bias.detach()[rows]
            parts.append(Linear(f"{name}[{rows.start}:{rows.stop}]", rows_of(whole.weight, rows), bias))
        return parts

    def norm(self, name: str, size: int) -> Norm:
        """Return an RMS norm over `size` values."""
        module = self.model.get_submodule(name)
        weight = self.tensor(f"{name}.weight", size)
        if self.family.norm_offset:
            weight = weight.detach().float() + self.family.norm_offset
        return Norm(weight, float(module.eps if hasattr(module, "eps") else module.variance_epsilon))

    def layer_norm(self, layer: str, name: str | None) -> Norm | None:
        """Return a norm over the hidden size, if the family has it."""
        return None if name is None else self.norm(f"{layer}.{name}", self.hidden)

    def head_norms(self, name: str) -> tuple[Norm | None, Norm | None]:
        """Return the norms of the queries and keys of an attention module."""
        if self.family.head_norms is HeadNorms.NONE:
            return None, None
        each = self.family.head_norms is HeadNorms.EACH_HEAD
        heads, kv_heads = (1, 1) if each else (self.heads, self.kv_heads)
        query = self.norm(f"{name}.q_norm", heads * self.head_dim)
        return query, self.norm(f"{name}.k_norm", kv_heads * self.head_dim)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a parameter and remember that it was read. Raises Unreadable if its shape differs."""
        tensor: Tensor = self.model.get_parameter(name)
        if tensor.shape != shape:
            raise Unreadable(f"its parameter {name} has the shape {tuple(tensor.shape)}, not {shape}")
        self._read.add(name)
        return tensor

    def embedding(self, name: str) -> nn.Embedding:
        """Return the embedding, without a scale of its own."""
        module = self.model.get_submodule(name)
        self.tensor(f"{name}.weight", len(module.weight), self.hidden)
        if module.max_norm is not None:
            raise Unreadable("its embedding limits the norm of its rows")
        if type(module) is nn.Embedding:
            return module
        plain = nn.Embedding(len(module.weight), self.hidden, device="meta")
        plain.weight = module.weight
        return plain

    def embedding_scale(self) -> float:
        """Return the factor of the embedded tokens, rounded to the format in which the model multiplies."""
        embedding = self.model.model.embed_tokens
        if type(embedding) is not nn.Embedding:
            return float(embedding.embed_scale.to(embedding.weight.dtype))
        return float(self.model.model.embedding_multiplier) if self.family.multipliers else 1.0

    def activation(self, mlp: Any) -> str:
        """Return the name of the function between the projections of an MLP."""
        return ACTIVATION_NAMES[type(mlp.activation_fn if self.family.fused else mlp.act_fn)]

    def window(self, index: int) -> int | None:
        """Return the sliding window of a layer. Raises Unreadable if the model contradicts itself."""
        size, family = getattr(self.config, "sliding_window", None), self.family.windows
        kind = self.config.layer_types[index] if family is Windows.BY_TYPE else ""
        if kind not in ("", "full_attention", "sliding_attention"):
            raise Unreadable(f"its layer {index} is of the unknown type {kind}")
        slides = family is Windows.ALL or kind == "sliding_attention"
        if slides and family is Windows.BY_TYPE and size is None:
            raise Unreadable(f"its layer {index} has a sliding window of unknown size")
        if family is Windows.NONE and size is not None:
            raise Unreadable("its config has a sliding window, which its layers do not use")
        return size if slides else None

    def rope_index(self, index: int) -> int | None:
        """Return which of the rotary tables a layer uses."""
        if not getattr(self.model.model.layers[index].self_attn, "use_rope", True):
            return None
        typed = isinstance(self.model.model.rotary_emb.rope_type, dict)
        layer_type = self.config.layer_types[index] if typed else None
        if layer_type not in self.rope_types:
            self.rope_types.append(layer_type)
        return self.rope_types.index(layer_type)

    def rope(self, layer_type: str | None) -> RopeTable:
        """Return a rotary table. Raises Unreadable if its frequencies are not fixed."""
        rotary = self.model.model.rotary_emb
        kind = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]
        if kind in LENGTH_DEPENDENT_ROPES:
            raise Unreadable(f"its rotary positions of type {kind} depend on the length of the text")
        if kind not in STATIC_ROPES:
            raise Unreadable(f"its rotary positions of type {kind} are not known")
        return partial(_rotary_table, rotary, layer_type)

    def rotary_dim(self, ropes: tuple[RopeTable, ...]) -> int:
        """Return how many values of each head are rotated: the same number in every layer."""
        position = torch.zeros(1, dtype=torch.long, device=self.model.device)
        sizes = {rope(position)[0].shape[-1] for rope in ropes} or {self.head_dim}
        if len(sizes) > 1 or (sizes != {self.head_dim} and not self.family.partial_rotary):
            raise Unreadable("its rotary positions rotate a part of each head")
        return int(sizes.pop())


def _rotary_table(rotary: nn.Module, layer_type: str | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin (T, rotary_dim) in float32 of the positions (T,), by the model's own module."""
    # The module takes the format and the device of its result from its first argument.
    like = torch.empty(0, dtype=torch.float32, device=positions.device)
    cos, sin = rotary(like, positions[None]) if layer_type is None else rotary(like, positions[None], layer_type)
    return cos[0], sin[0]
