"""Config and tokenizer of a checkpoint, with what transformers leaves out of the header of a GGUF file.

Without the scaling of rotary positions, a Llama 3.1 or a Qwen with YaRN would turn its queries and keys by the angles
of an unscaled model. The meaning of the keys is that of llama.cpp (https://github.com/ggml-org/llama.cpp).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gguf
import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import read_field
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from utils.errors import UserError
from utils.models.sources import Source

TENSORS = QUOTIENTS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
UNREAD = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier")
UNKNOWN = "'{}' scales its rotary positions in a way that is not read from GGUF files: use its safetensors files."
# Of Llama 3.1 and later, whose files have the quotients of frequencies instead.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SAME = 1e-4  # the largest relative difference of frequencies that are rounded to float32
# Layers of Gemma 2 and 3 27B, whose query_pre_attn_scalar is hidden_size / num_attention_heads.
LARGEST = {"gemma2": 46, "gemma3_text": 62}
# Types of tokenizers that split text into single digits first, and then as GPT-2 does.
SINGLE_DIGITS = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
# Types that look up a whole word in the vocabulary before they apply merges.
WHOLE_WORDS = ("falcon-h1", "falcon3", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral", "tekken")


def read_config(source: Source) -> PreTrainedConfig:
    """Read the config of a checkpoint.

    Raises UserError for a part of a GGUF file, and if its rotary positions cannot be read.
    """
    reader = _reader(source) if source.gguf else None
    if reader is not None and (parts := sum(read_field(reader, "split.count"))) > 1:
        raise UserError(
            f"'{source.name}' is one of {parts} files of a model: join them by llama.cpp's `llama-gguf-split --merge`."
        )
    config = AutoConfig.from_pretrained(source.location, **source.arguments)
    if reader is not None:
        text = config.get_text_config(decoder=True)
        _read_rotary(text, reader, source.name)
        if text.model_type in LARGEST and text.num_hidden_layers == LARGEST[text.model_type]:
            text.query_pre_attn_scalar = text.hidden_size // text.num_attention_heads
    return config


def read_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a checkpoint that has one."""
    tokenizer: Any = AutoTokenizer.from_pretrained(source.location, **source.arguments)
    if not source.gguf:
        return cast(PreTrainedTokenizerBase, tokenizer)
    reader, backend = _reader(source), tokenizer.backend_tokenizer
    kind = next(iter(read_field(reader, "tokenizer.ggml.pre")), "")
    if kind in SINGLE_DIGITS:
        digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    elif kind in WHOLE_WORDS:
        backend.model.ignore_merges = True
        if not read_field(reader, "tokenizer.ggml.add_bos_token"):  # llama.cpp's default for these types
            tokenizer.add_bos_token = True
    return cast(PreTrainedTokenizerBase, tokenizer)


def _reader(source: Source) -> GGUFReader:
    return gguf.GGUFReader(Path(source.location, str(source.gguf)))  # within `shared_reader` read once


def _read_rotary(config: Any, reader: GGUFReader, name: str) -> None:
    """Add the rotary positions to the config of a decoder."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    own = parameters.get("full_attention", parameters)  # local layers, such as Gemma's, are not scaled
    if own.get("rope_type") != "default":  # no rotary positions, or a scaling that transformers reads
        return
    architecture = read_field(reader, "general.architecture")[0]

    def field(key: str) -> Any:
        return next(iter(read_field(reader, f"{architecture}.rope.{key}")), None)

    own["rope_theta"] = field("freq_base") or own["rope_theta"]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if "partial_rotary_factor" in own and (rotated := field("dimension_count")):
        own["partial_rotary_factor"] = rotated / size
    own |= _scaling(field, name)
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors if tensor.name in TENSORS}
    if QUOTIENTS in tensors:
        own |= _llama3(config, own, tensors[QUOTIENTS], name)
    elif tensors:
        own |= {
            "rope_type": "longrope",
            "short_factor": tensors[SHORT].tolist(),
            "long_factor": tensors[LONG].tolist(),
            "original_max_position_embeddings": field("scaling.original_context_length"),
            "attention_factor": field("scaling.attn_factor"),
        }


def _scaling(field: Callable[[str], Any], name: str) -> dict[str, Any]:
    """The keys of a scaling in the header. Without its type it is linear. Raises UserError if it is of another kind."""
    kind, factor = field("scaling.type") or "linear", field("scaling.factor") or field("scale_linear") or 1.0
    if kind == "none" or factor == 1.0:
        return {}
    if kind not in ("linear", "yarn") or any(field(f"scaling.{key}") is not None for key in UNREAD):
        raise UserError(UNKNOWN.format(name))
    found = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        further = {"original_max_position_embeddings": field("scaling.original_context_length")}
        further |= {key: field(f"scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
        found |= {key: value for key, value in further.items() if value is not None}
    return found


def _llama3(config: Any, own: dict[str, Any], quotients: torch.Tensor, name: str) -> dict[str, Any]:
    """The keys of frequencies that are divided by these quotients. Raises UserError if they are not Llama 3's."""
    found = own | LLAMA3 | {"rope_type": "llama3", "factor": float(quotients.max())}
    plain, scaled = (
        ROPE_INIT_FUNCTIONS["llama3"](type(config)(**config.to_dict() | {"rope_parameters": keys}), "cpu")[0]
        for keys in (found | {"factor": 1.0}, found)
    )
    if len(plain) != len(quotients) or not torch.allclose(plain / quotients, scaled, rtol=SAME, atol=0.0):
        raise UserError(UNKNOWN.format(name))
    return found
