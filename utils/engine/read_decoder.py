"""Read a loaded transformers model as a DecoderSpec, or say why it cannot be read.

A variation that is not known must not be computed wrongly. Therefore only the model types of a table are read, every
module must be of a class that the type is known to have, and every parameter must have found its place in the spec.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, activations

from utils.engine.decoder_spec import DecoderSpec, LayerSpec, Linear, Norm, RopeTable
from utils.engine.stored_weights import RowTable, rows_of, source_of


class Windows(Enum):
    """Which layers have a sliding window."""

    NONE = 0
    ALL = 1  # if the config has a sliding_window
    BY_TYPE = 2  # those that config.layer_types calls "sliding_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """What the modules of a model type do not show. norm_offset: norms multiply by weight + norm_offset.
    partial_rotary: rotary positions may rotate a part of each head.
    """

    windows: Windows = Windows.NONE
    norm_offset: float = 0.0
    partial_rotary: bool = False


FAMILIES = {
    "gemma": Family(norm_offset=1.0),
    "gemma2": Family(Windows.BY_TYPE, norm_offset=1.0),
    "gemma3_text": Family(Windows.BY_TYPE, norm_offset=1.0),
    "granite": Family(),
    "llama": Family(),
    "ministral": Family(Windows.BY_TYPE),
    "mistral": Family(Windows.ALL),
    "olmo2": Family(),
    "olmo3": Family(Windows.BY_TYPE),
    "phi3": Family(Windows.ALL, partial_rotary=True),
    "qwen2": Family(Windows.BY_TYPE),
    "qwen3": Family(Windows.BY_TYPE),
    "smollm3": Family(Windows.BY_TYPE),
}
# The names of a layer's norms before and after attention, before and after the MLP, by a norm that only some have.
NORM_NAMES: dict[str, tuple[str | None, ...]] = {
    "pre_feedforward_layernorm": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "post_feedforward_layernorm": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "input_layernorm": ("input_layernorm", None, "post_attention_layernorm", None),
}
# The classes of a family, after its own name: LlamaAttention, Gemma3TextModel.
OWN_CLASSES = (
    *("ForCausalLM", "Model", "TextModel", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding"),
    "TextScaledWordEmbedding",
)
# Dropout does nothing outside training.
SHARED_CLASSES = (nn.ModuleList, nn.Linear, nn.Embedding, nn.Dropout)
# The modules that compute a function of ACTIVATIONS. NewGELU is the same formula as the tanh approximation of GELU.
ACTIVATION_NAMES: dict[type[nn.Module], str] = {
    activations.SiLUActivation: "silu",
    nn.SiLU: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_pytorch_tanh",
    activations.NewGELUActivation: "gelu_pytorch_tanh",
    nn.ReLU: "relu",
}
# Transformers reads hidden states with hooks that do not change them.
HARMLESS_HOOKS = "transformers.utils.output_capturing"


class Unreadable(Exception):
    """Why a model cannot be read, as a clause."""


def check_modules(model: PreTrainedModel) -> None:
    """Raise Unreadable if a module is of an unknown class, or if something may change what it computes."""
    source, family = type(model).__module__, type(model).__name__.removesuffix("ForCausalLM")
    if not source.startswith("transformers.models."):
        raise Unreadable(f"its class {type(model).__name__} is not one of transformers")
    own = {f"{family}{name}" for name in OWN_CLASSES}
    for name, module in model.named_modules():
        kind = type(module)
        known = kind.__module__ == source and kind.__name__ in own
        if not known and kind not in SHARED_CLASSES and kind not in ACTIVATION_NAMES:
            raise Unreadable(f"its module {name or 'itself'} is of the unknown class {kind.__name__}")
        if module.training and kind is not nn.ModuleList:  # a layer cut has a new list, which computes nothing
            raise Unreadable("it is in training mode")
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if "forward" in vars(module) or any(map(_changes_outputs, hooks)):
            raise Unreadable(f"a hook changes its module {name}" if name else "a hook changes its forward pass")


def _changes_outputs(hook: object) -> bool:
    return getattr(hook, "__module__", "") != HARMLESS_HOOKS and not getattr(hook, "keeps_outputs", False)


def check_parameters(model: PreTrainedModel) -> None:
    """Raise Unreadable unless all parameters are ordinary tensors of one floating-point format on one device."""
    formats, devices = set(), set()
    for name, parameter in model.named_parameters():
        # Quantized tensors are of other classes.
        if type(parameter) not in (nn.Parameter, RowTable) or not parameter.is_floating_point():
            raise Unreadable(f"its parameter {name} is not an ordinary floating-point tensor")
        formats.add(parameter.dtype)
        if source_of(parameter) is None:  # engines read weights that are in files
            devices.add(parameter.device)
    if len(formats) != 1:
        raise Unreadable("its parameters have several number formats")
    if len(devices) > 1:
        raise Unreadable("its layers are spread over several devices")
    if devices == {torch.device("meta")}:
        raise Unreadable("its parameters are not in memory")


STATIC_ROPES = ("default", "linear", "llama3", "yarn")


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
        first: Any = model.model.layers[0]
        self.head_dim: int = first.self_attn.head_dim
        self.norm_names = next(names for own, names in NORM_NAMES.items() if hasattr(first, own))
        self.has_softcap = hasattr(first.self_attn, "attn_logit_softcapping")
        self.has_multipliers = hasattr(first, "residual_multiplier")
        self.rope_types: list[str | None] = []  # of the tables, in the order of DecoderSpec.ropes
        self._read: set[str] = set()

    def read(self) -> DecoderSpec:
        """Return the spec. Raises Unreadable if something of the model has no place in it."""
        embedded: nn.Embedding = self.model.model.embed_tokens
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
            embedding=self.tensor("model.embed_tokens.weight", embedded.num_embeddings, self.hidden),
            embedding_scale=self.embedding_scale(),
            layers=layers,
            ropes=ropes,
            final_norm=self.norm("model.norm", self.hidden),
            head=head,
            logit_scale=1.0 / self.config.logits_scaling if self.has_multipliers else 1.0,
            logit_softcap=self.config.final_logit_softcapping if self.has_softcap else None,
        )
        if unread := sorted({name for name, _ in self.model.named_parameters()} - self._read):
            raise Unreadable(f"its parameter {unread[0]} is not known")
        return spec

    def layer(self, index: int) -> LayerSpec:
        """Return layer `index`."""
        name = f"model.layers.{index}"
        layer: Any = self.model.get_submodule(name)
        self.check_attention(layer.self_attn)
        heads = [count * self.head_dim for count in (self.heads, self.kv_heads, self.kv_heads)]
        query, key, value = self.joined(f"{name}.self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj"), heads)
        inner = [self.config.intermediate_size] * 2
        gate, up = self.joined(f"{name}.mlp", "gate_up_proj", ("gate_proj", "up_proj"), inner)
        norms = [None if own is None else self.norm(f"{name}.{own}", self.hidden) for own in self.norm_names]
        return LayerSpec(
            input_norm=norms[0],
            query=query,
            key=key,
            value=value,
            query_norm=self.head_norm(f"{name}.self_attn.q_norm", self.heads),
            key_norm=self.head_norm(f"{name}.self_attn.k_norm", self.kv_heads),
            output=self.linear(f"{name}.self_attn.o_proj", self.hidden, heads[0]),
            attention_output_norm=norms[1],
            mlp_norm=norms[2],
            gate=gate,
            up=up,
            down=self.linear(f"{name}.mlp.down_proj", self.hidden, inner[0]),
            mlp_output_norm=norms[3],
            activation=ACTIVATION_NAMES[type(getattr(layer.mlp, "act_fn", None) or layer.mlp.activation_fn)],
            window=self.window(index),
            rope=self.rope_index(index),
            scaling=float(layer.self_attn.scaling),
            residual_scale=float(layer.residual_multiplier) if self.has_multipliers else 1.0,
        )

    def check_attention(self, attention: Any) -> None:
        """Raise Unreadable if the attention scores are computed in a way that LayerSpec does not describe."""
        if self.has_softcap and attention.attn_logit_softcapping is not None:
            raise Unreadable("its attention scores are capped")
        if not attention.is_causal:
            raise Unreadable("its attention is not causal")

    def joined(self, parent: str, fused: str, names: Sequence[str], sizes: Sequence[int]) -> list[Linear]:
        """Return linear layers that read the same input: those of these names, or row ranges of the one that is called
        `fused`, as views.
        """
        if not hasattr(self.model.get_submodule(parent), fused):
            parts = zip(names, sizes, strict=True)
            return [self.linear(f"{parent}.{name}", size, self.hidden) for name, size in parts]
        name, found, first = f"{parent}.{fused}", list[Linear](), 0
        whole = self.linear(name, sum(sizes), self.hidden)
        for size in sizes:
            rows = slice(first, first := first + size)
            bias = None if whole.bias is None else whole.bias.detach()[rows]
            found.append(Linear(f"{name}[{rows.start}:{rows.stop}]", rows_of(whole.weight, rows), bias))
        return found

    def linear(self, name: str, rows: int, columns: int) -> Linear:
        """Return a linear layer. Raises Unreadable if its weight is not (rows, columns)."""
        module = self.model.get_submodule(name)
        weight, bias = self.tensor(f"{name}.weight", rows, columns), None
        if module.bias is not None:
            bias = self.tensor(f"{name}.bias", rows)
        return Linear(name, weight, bias)

    def norm(self, name: str, size: int) -> Norm:
        """Return an RMS norm over `size` values."""
        module = self.model.get_submodule(name)
        weight = self.tensor(f"{name}.weight", size).detach().float().contiguous()
        if self.family.norm_offset:
            weight = weight + self.family.norm_offset
        return Norm(weight, float(module.eps if hasattr(module, "eps") else module.variance_epsilon))

    def head_norm(self, name: str, heads: int) -> Norm | None:
        """Return a norm of queries or keys, if there is one, over each head or over all heads together."""
        parent, _, own = name.rpartition(".")
        norm: Any = getattr(self.model.get_submodule(parent), own, None)
        if norm is None:
            return None
        return self.norm(name, self.head_dim if len(norm.weight) == self.head_dim else heads * self.head_dim)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a parameter and remember that it was read. Raises Unreadable if its shape differs."""
        tensor: Tensor = self.model.get_parameter(name)
        if tensor.shape != shape:
            raise Unreadable(f"its parameter {name} has the shape {tuple(tensor.shape)}, not {shape}")
        self._read.add(name)
        return tensor

    def embedding_scale(self) -> float:
        """Return the factor of the embedded tokens, rounded to the format in which the model multiplies."""
        embedding = self.model.model.embed_tokens
        if type(embedding) is not nn.Embedding:
            return float(embedding.embed_scale.to(embedding.weight.dtype))
        return float(self.model.model.embedding_multiplier) if self.has_multipliers else 1.0

    def window(self, index: int) -> int | None:
        """Return the sliding window of a layer."""
        size, family = getattr(self.config, "sliding_window", None), self.family.windows
        if family is Windows.NONE and size is not None:
            raise Unreadable("its config has a sliding window, which its layers do not use")
        is_full = family is Windows.BY_TYPE and self.config.layer_types[index] != "sliding_attention"
        return None if is_full else size

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
        if kind not in STATIC_ROPES:
            raise Unreadable(f"its rotary positions of type {kind} depend on the length of the text, or are not known")
        return partial(rotary_table, rotary, layer_type)

    def rotary_dim(self, ropes: tuple[RopeTable, ...]) -> int:
        """Return how many values of each head are rotated: the same number in every layer."""
        position = torch.zeros(1, dtype=torch.long, device=self.model.device)
        sizes = {rope(position)[0].shape[-1] for rope in ropes} or {self.head_dim}
        if len(sizes) > 1 or (sizes != {self.head_dim} and not self.family.partial_rotary):
            raise Unreadable("its rotary positions rotate a part of each head")
        return int(sizes.pop())


def rotary_table(rotary: nn.Module, layer_type: str | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin (T, rotary_dim) in float32 of the positions (T,), by the model's own module."""
    # The module takes the format and the device of its result from its first argument.
    like = torch.empty(0, dtype=torch.float32, device=positions.device)
    cos, sin = rotary(like, positions[None]) if layer_type is None else rotary(like, positions[None], layer_type)
    return cos[0], sin[0]
