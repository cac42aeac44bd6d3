"""The model types of transformers that can be read as a DecoderSpec, and how each differs from Llama.

A row states facts about the classes of transformers that the objects of a loaded model do not show.
"""

from dataclasses import dataclass
from enum import Enum


class Windows(Enum):
    """Which layers have a sliding window."""

    NONE = 0
    ALL = 1  # if the config has a sliding_window
    BY_TYPE = 2  # those that config.layer_types calls "sliding_attention"


class HeadNorms(Enum):
    """What the norms of the queries and keys, q_norm and k_norm, are computed over."""

    NONE = 0
    EACH_HEAD = 1
    ALL_HEADS = 2


@dataclass(frozen=True, slots=True)
class NormNames:
    """The names of a layer's norms; None for a norm that the layer does not have."""

    input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


PRE_NORMS = NormNames()
POST_NORMS = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
SANDWICH_NORMS = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


@dataclass(frozen=True, slots=True)
class Family:
    """How a model type differs from Llama.

    norm_offset: norms multiply by weight + norm_offset. fused: q, k, v are one parameter, gate and up another.
    partial_rotary: rotary positions may rotate a part of each head. multipliers: the embedding, the residual branches
    and the logits are scaled as in Granite. softcap: the logits are capped by config.final_logit_softcapping.
    """

    norms: NormNames = PRE_NORMS
    head_norms: HeadNorms = HeadNorms.NONE
    windows: Windows = Windows.NONE
    norm_offset: float = 0.0
    fused: bool = False
    partial_rotary: bool = False
    multipliers: bool = False
    softcap: bool = False


FAMILIES = {
    "gemma": Family(norm_offset=1.0),
    "gemma2": Family(SANDWICH_NORMS, windows=Windows.BY_TYPE, norm_offset=1.0, softcap=True),
    "gemma3_text": Family(SANDWICH_NORMS, HeadNorms.EACH_HEAD, Windows.BY_TYPE, norm_offset=1.0, softcap=True),
    "granite": Family(multipliers=True),
    "llama": Family(),
    "ministral": Family(windows=Windows.BY_TYPE),
    "mistral": Family(windows=Windows.ALL),
    "olmo2": Family(POST_NORMS, HeadNorms.ALL_HEADS),
    "olmo3": Family(POST_NORMS, HeadNorms.ALL_HEADS, Windows.BY_TYPE),
    "phi3": Family(windows=Windows.ALL, fused=True, partial_rotary=True),
    "qwen2": Family(windows=Windows.BY_TYPE),
    "qwen3": Family(head_norms=HeadNorms.EACH_HEAD, windows=Windows.BY_TYPE),
    "smollm3": Family(windows=Windows.BY_TYPE),
}
