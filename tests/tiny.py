"""Tiny random models and an in-memory tokenizer, so that no test needs a hub.

The weights have a larger spread than by default: with default weights the logits of a random model are nearly uniform,
and greedy tests would depend on rounding. No generation config has an end token; a test that needs one sets it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from utils.drafter_formats.eagle3 import Eagle3
from utils.drafter_formats.eagle3_file import new_eagle3
from utils.drafter_formats.target_parts import DraftHead, share_parts

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a tiny model<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

DECODER: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def build(model_class: type[PreTrainedModel], config: Any, seed: int) -> Any:
    """A random model in eval mode and float32. The caller's random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would look for other devices first
        model = model_class(config)
    return model.eval().float()


def unstick(model: Any, embedding: torch.Tensor, *, seed: int, crosses: list[torch.nn.Linear]) -> Any:
    """Keep a random encoder-decoder model from repeating one token for ever.

    Its constant cross-attention and tied head make nearly every token its own successor. Therefore the head becomes a
    shuffled copy of the embedding (which is not saved with the model), and the cross-attention is scaled down.
    """
    order = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(seed))
    model.lm_head.weight = torch.nn.Parameter(embedding.detach()[order])
    for cross in crosses:
        cross.weight.data.mul_(0.2)
    return model


def tiny_llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A decoder-only model with full attention."""
    return build(LlamaForCausalLM, LlamaConfig(**DECODER | overrides), seed)


def tiny_sliding(seed: int = 0, **overrides: Any) -> MistralForCausalLM:
    """A decoder-only model whose layers attend to the last eight tokens."""
    return build(MistralForCausalLM, MistralConfig(**DECODER | {"sliding_window": 8} | overrides), seed)


def tiny_t5(seed: int = 0, **overrides: Any) -> T5ForConditionalGeneration:
    """An encoder-decoder model with relative positions."""
    fields: dict[str, Any] = {
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "pad_token_id": 0,
        "eos_token_id": None,
        "decoder_start_token_id": 0,
    }
    model = build(T5ForConditionalGeneration, T5Config(**fields | overrides), seed)
    crosses = [block.layer[1].EncDecAttention.o for block in model.decoder.block]
    return unstick(model, model.shared.weight, seed=seed, crosses=crosses)


def tiny_bart(seed: int = 0, **overrides: Any) -> BartForConditionalGeneration:
    """An encoder-decoder model with learned positions, so that its context length is limited."""
    fields: dict[str, Any] = {
        "vocab_size": 64,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 256,
        "init_std": 0.3,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "forced_eos_token_id": None,
        "decoder_start_token_id": 0,
    }
    model = build(BartForConditionalGeneration, BartConfig(**fields | overrides), seed)
    crosses = [layer.encoder_attn.out_proj for layer in model.model.decoder.layers]
    return unstick(model, model.model.decoder.embed_tokens.weight, seed=seed, crosses=crosses)


def tiny_marian(seed: int = 3, **overrides: Any) -> MarianMTModel:
    """A translation model: sinusoidal positions, and output that begins with the padding token, forbidden elsewhere."""
    fields = tiny_bart().config.to_dict() | {
        "pad_token_id": 63,
        "decoder_start_token_id": 63,
        "init_std": 0.1,
        "scale_embedding": True,
    }
    model = build(MarianMTModel, MarianConfig(**fields | overrides), seed)
    model.generation_config.bad_words_ids = [[63]]
    crosses = [layer.encoder_attn.out_proj for layer in model.model.decoder.layers]
    return unstick(model, model.model.decoder.embed_tokens.weight, seed=seed, crosses=crosses)


def tiny_mamba(seed: int = 0, **overrides: Any) -> MambaForCausalLM:
    """A recurrent model, whose state cannot be rewound."""
    fields: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "state_size": 8,
        "num_hidden_layers": 2,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return build(MambaForCausalLM, MambaConfig(**fields | overrides), seed)


def tiny_tokenizer(vocab_size: int = 300, chat: bool = True, shift: int = 0) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: one token per byte, special tokens, and filler tokens up to `vocab_size` ids.

    shift: tokenizers with different shifts have different ids for the same bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(
        models.BPE(vocab={symbol: (index + shift) % len(alphabet) for index, symbol in enumerate(alphabet)}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    names += [f"<|filler_{index}|>" for index in range(vocab_size - len(alphabet) - len(names))]
    inner.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHATML if chat else None,
        clean_up_tokenization_spaces=False,
    )


# Where the number of layers does not matter.
SHALLOW: dict[str, Callable[..., Any]] = {
    "llama": partial(tiny_llama, num_hidden_layers=1),
    "sliding": partial(tiny_sliding, num_hidden_layers=1),
    "t5": partial(tiny_t5, num_layers=1),
    "bart": partial(tiny_bart, encoder_layers=1, decoder_layers=1),
}


def save_folder(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None) -> Path:
    """Write a checkpoint folder. Without a tokenizer only the model's files are written."""
    model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


def next_logits(model: Any, prompt: list[int], made: list[int]) -> torch.Tensor:
    """Logits (V,) of the token after `made`, by one forward pass without cache or session. For reference texts."""
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            start = model.generation_config.decoder_start_token_id or 0
            return model(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([[start, *made]])).logits[
                0, -1
            ]
        return model(input_ids=torch.tensor([[*prompt, *made]])).logits[0, -1]


def hidden_features(output: Any, layers: tuple[int, ...]) -> torch.Tensor:
    """The hidden states after each of these layers, concatenated to (B, T, F). Layer -1 is after the final norm."""
    return torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)


def tiny_head(target: Any, seed: int = 0, *, layers: tuple[int, ...] = (1, -1), vocabulary: Any = None) -> Eagle3:
    """A random EAGLE-3 drafter of a target. vocabulary: the ids that it drafts, by default every second one."""
    size = target.config.vocab_size
    ids = torch.tensor(list(range(0, size, 2) if vocabulary is None else vocabulary))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = new_eagle3(target, layers)
        for part in drafter.parameters():
            torch.nn.init.normal_(part, std=0.3)
    rows = torch.nn.Linear(drafter.config.hidden_size, len(ids), bias=False)
    rows.weight = torch.nn.Parameter(target.get_output_embeddings().weight.detach()[ids], requires_grad=False)
    embedding = torch.nn.Embedding.from_pretrained(target.get_input_embeddings().weight.detach())
    share_parts(drafter, embedding, DraftHead(rows, ids, size), target)
    drafter.name_or_path = "head"
    return drafter
