"""A tiny model as a GGUF file, written with the `gguf` package: what it takes to test `--target FILE.gguf` without a
download.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def write_gguf(
    path: Path, model: PreTrainedModel, tokenizer: Any, *, kind: str = "Q8_0", parts: tuple[str, ...] = (".mlp.",)
) -> Path:
    """Write a model of a type that has the same name in GGUF files, and a tokenizer.

    Matrices with one of `parts` in their names are quantized to `kind`.
    """
    architecture = model.config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    add_sizes(writer, model.config)
    add_rotary(writer, model.config)
    add_tokens(writer, tokenizer)
    [kind_of_model] = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind_of_model, model.config.num_hidden_layers)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    heads = heads if architecture == "llama" else {}
    for name, tensor in model.named_parameters():  # a tied output head is the embedding
        tensor = tensor.detach()
        count = next((heads[kind] for kind in heads if kind in name), None)
        weight, stored = _interleaved(tensor.numpy(), count), gguf.GGMLQuantizationType.F32
        if tensor.dim() == 2 and any(part in name for part in parts):
            stored = gguf.GGMLQuantizationType[kind]
            weight = gguf.quants.quantize(weight, stored)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), weight, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_sizes(writer: Any, config: Any) -> None:
    """Write the sizes of a decoder."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    names = ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps")
    epsilon = next(getattr(config, name) for name in names if hasattr(config, name))
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_layer_norm_eps(epsilon)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def add_rotary(writer: Any, config: Any) -> None:
    """Write scaled rotary positions as llama.cpp's converter does."""
    keys = config.rope_parameters
    if (kind := keys["rope_type"]) in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(keys["factor"])
    if "beta_fast" in keys:
        writer.add_rope_scaling_yarn_beta_fast(keys["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(keys["beta_slow"])
    if "original_max_position_embeddings" in keys and kind != "llama3":
        writer.add_rope_scaling_orig_ctx_len(keys["original_max_position_embeddings"])
    if kind == "longrope":
        writer.add_rope_scaling_attn_factors(keys["attention_factor"])
        for name in ("short", "long"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(keys[f"{name}_factor"], dtype=np.float32))
    if kind == "llama3":
        plain, scaled = (
            ROPE_INIT_FUNCTIONS[kind](config.__class__(**config.to_dict() | {"rope_parameters": own}), "cpu")[0]
            for own in (keys | {"factor": 1.0}, keys)
        )
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())


def add_tokens(writer: Any, tokenizer: Any, merges: Sequence[str] = ()) -> None:
    """Write the tokenizer. Without merges, the last token becomes the one merge that the format insists on."""
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    tokens = tokens if merges else [*tokens[:-1], "ab"]
    special = set(tokenizer.all_special_tokens)
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(merges) or ["a b"])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def _interleaved(weight: Any, heads: int | None) -> Any:
    """The order of rotary dimensions in a GGUF file: pairs side by side, not halves."""
    if heads is None:
        return weight
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
