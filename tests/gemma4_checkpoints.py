"""Tiny random Gemma 4 targets, and assistants for them as transformers writes them."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import DECODER, build
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
)

LAYERS, HIDDEN, VOCABULARY, WINDOW = 4, 32, 64, 5
COMMON: dict[str, Any] = DECODER | {
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "sliding_window": WINDOW,
    "initializer_range": 0.3,
}
TARGET = COMMON | {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "num_kv_shared_layers": 2,
}
INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
ASSISTANT = COMMON | {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 3,
}
NO_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}


def tiny_gemma4(seed: int = 0, **overrides: Any) -> Gemma4ForCausalLM:
    """A target whose last layers share the keys of earlier ones, with sliding and full attention."""
    return build(Gemma4ForCausalLM, Gemma4TextConfig(**TARGET | INPUTS | overrides), seed)


def tiny_unified(seed: int = 0, **overrides: Any) -> Gemma4UnifiedForCausalLM:
    return build(Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig(**TARGET | overrides), seed)


def tiny_with_images(seed: int = 0, **overrides: Any) -> Gemma4ForConditionalGeneration:
    """A target that could read images as well, as Google publishes it."""
    config = Gemma4Config(text_config=TARGET | INPUTS | overrides, vision_config=None, audio_config=None)
    return build(Gemma4ForConditionalGeneration, config, seed)


def tiny_assistant(monkeypatch: pytest.MonkeyPatch, seed: int = 1, **overrides: Any) -> Gemma4AssistantForCausalLM:
    """transformers' own module, with random weights."""
    repair(monkeypatch)
    own = {name: overrides.pop(name) for name in list(overrides) if name in Gemma4AssistantConfig.__annotations__}
    text = Gemma4TextConfig(**ASSISTANT | NO_INPUTS | overrides)
    config = Gemma4AssistantConfig(text_config=text, **{"backbone_hidden_size": HIDDEN} | own)
    made = build(Gemma4AssistantForCausalLM, config, seed)
    if made.masked_embedding is not None:
        order = made.masked_embedding.token_ordering
        order.copy_(order.new_tensor([(7 * token + 3) % len(order) for token in range(len(order))]))
    return made


def tiny_unified_assistant(
    monkeypatch: pytest.MonkeyPatch, seed: int = 1, **overrides: Any
) -> Gemma4UnifiedAssistantForCausalLM:
    repair(monkeypatch)
    text = Gemma4UnifiedTextConfig(**ASSISTANT | overrides)
    config = Gemma4UnifiedAssistantConfig(text_config=text, backbone_hidden_size=HIDDEN)
    return build(Gemma4UnifiedAssistantForCausalLM, config, seed)


def repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.23 refuses layers of which all read keys from elsewhere, which its assistants consist of."""
    for config in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
        original = config.kv_sharing_modes.fget

        def modes(self: Any, original: Any = original) -> list[str | None]:
            count = self.num_hidden_layers
            return ["reuse"] * count if self.num_kv_shared_layers == count else original(self)

        monkeypatch.setattr(config, "kv_sharing_modes", property(modes))
