"""The layer cut: the logits of a truncated copy, the weights of the target, and no change to the target."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from tiny import DECODER, build, tiny_bart, tiny_llama, tiny_mamba, tiny_sliding, tiny_t5
from torch import nn

from utils.decode.layer_cut import default_depth, first_layers
from utils.errors import UserError

FOUR = DECODER | {"num_hidden_layers": 4}
IDS = torch.tensor([[5, 9, 33, 12, 7, 41, 2, 60, 18, 3, 3, 25]])


def small(model_class: Any, config_class: Any, **extra: Any) -> Any:
    return build(model_class, config_class(**FOUR | extra), 3)


def gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return small(tf.Gemma3ForCausalLM, tf.Gemma3TextConfig, head_dim=8, sliding_window=4, layer_types=kinds)


def gpt2() -> Any:
    config = tf.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=256,
        initializer_range=0.4,
        scale_attn_by_inverse_layer_idx=True,
    )
    return build(tf.GPT2LMHeadModel, config, 3)


def gemma3_multimodal() -> Any:
    text = FOUR | {"head_dim": 8, "sliding_window": 4}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = tf.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=63,
        boi_token_index=62,
        eoi_token_index=61,
    )
    return build(tf.Gemma3ForConditionalGeneration, config, 3)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny_llama(num_hidden_layers=4),
    "llama, tied": lambda: tiny_llama(num_hidden_layers=4, tie_word_embeddings=True),
    "mistral": lambda: tiny_sliding(num_hidden_layers=4),
    "qwen2": lambda: small(
        tf.Qwen2ForCausalLM, tf.Qwen2Config, use_sliding_window=True, sliding_window=4, max_window_layers=2
    ),
    "qwen3": lambda: small(tf.Qwen3ForCausalLM, tf.Qwen3Config, head_dim=8),
    "gemma3": gemma3,
    "gemma3, multimodal": gemma3_multimodal,
    "phi3": lambda: small(tf.Phi3ForCausalLM, tf.Phi3Config),
    "gpt2": gpt2,
    "gpt_neox": lambda: small(tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig),
    "opt": lambda: build(
        tf.OPTForCausalLM,
        tf.OPTConfig(
            vocab_size=64,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            word_embed_proj_dim=32,
            init_std=0.4,
            pad_token_id=0,
        ),
        3,
    ),
}


def stack(model: Any) -> tuple[nn.Module, str]:
    """The module that holds the list of blocks, and the name of that list."""
    inner = model.base_model
    inner = getattr(inner, "language_model", getattr(inner, "decoder", inner))
    return inner, "h" if hasattr(inner, "h") else "layers"


def truncated_copy(model: Any, depth: int) -> Any:
    """The reference: a deep copy with a shorter list of blocks."""
    other = copy.deepcopy(model)
    parent, name = stack(other)
    setattr(parent, name, getattr(parent, name)[:depth])
    config = other.config.get_text_config()
    config.num_hidden_layers = depth
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:depth]
    return other


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


@torch.no_grad()
def greedy(model: Any, count: int = 3) -> list[int]:
    return model.generate(IDS, max_new_tokens=count, do_sample=False)[0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("depth", [1, 3])
def test_a_cut_equals_a_truncated_copy(family: str, depth: int) -> None:
    model = FAMILIES[family]()
    before = logits(model)
    cut, reference = first_layers(model, depth), truncated_copy(model, depth)
    assert torch.equal(logits(cut), logits(reference))
    assert greedy(cut) == greedy(reference)
    assert not torch.equal(logits(cut), before)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_shares_every_tensor_with_the_target(family: str) -> None:
    model = FAMILIES[family]()
    owned = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    cut = first_layers(model, 2)
    shared = [*cut.parameters(), *cut.buffers()]
    assert shared and all(tensor.data_ptr() in owned for tensor in shared)


@pytest.mark.parametrize("family", ["gemma3", "gemma3, multimodal", "qwen2"])
def test_a_cache_for_the_cut_has_its_number_of_layers(family: str) -> None:
    cut = first_layers(FAMILIES[family](), 3)
    assert len(cut.config.get_text_config().layer_types) == 3
    assert len(tf.DynamicCache(config=cut.config).layers) == 3


def test_the_target_keeps_its_config_layers_and_generation_config() -> None:
    model = tiny_llama(num_hidden_layers=4)
    config, names, modules = model.config.to_dict(), list(model.state_dict()), list(model.modules())
    cut = first_layers(model, 2)
    cut.config.vocab_size = 1
    cut.generation_config.eos_token_id = 7
    cut.set_attn_implementation("eager")
    assert model.config.to_dict() == config and list(model.state_dict()) == names and list(model.modules()) == modules
    assert model.generation_config.eos_token_id is None
    assert model.model.layers[0].self_attn.config is model.config and model.config._attn_implementation == "sdpa"


@torch.no_grad()
@pytest.mark.parametrize("cut_first", [True, False])
def test_target_and_cut_return_their_own_hidden_states(cut_first: bool) -> None:
    model = tiny_llama(num_hidden_layers=4)
    if cut_first:
        cut = first_layers(model, 2)
        assert len(cut(input_ids=IDS, output_hidden_states=True).hidden_states) == 3
    assert len(model(input_ids=IDS, output_hidden_states=True).hidden_states) == 5
    cut = first_layers(model, 2)
    assert len(cut(input_ids=IDS, output_hidden_states=True).hidden_states) == 3
    assert len(model(input_ids=IDS, output_hidden_states=True).hidden_states) == 5


@torch.no_grad()
def test_hooks_of_the_cut_are_not_called_by_the_target() -> None:
    model = tiny_llama(num_hidden_layers=4)
    cut = first_layers(model, 2)
    calls: list[str] = []
    cut.model.layers[0].register_forward_hook(lambda *_: calls.append("cut"))
    model.model.layers[0].register_forward_hook(lambda *_: calls.append("target"))
    model(input_ids=IDS)
    assert calls == ["target"]


@pytest.mark.parametrize("depth", [0, 4, 5, -1])
def test_an_invalid_depth_is_refused_with_the_allowed_range(depth: int) -> None:
    with pytest.raises(UserError, match=r"1\.\.3"):
        first_layers(tiny_llama(num_hidden_layers=4), depth)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (tiny_t5, "encoder-decoder"),
        (tiny_bart, "encoder-decoder"),
        (tiny_mamba, "recurrent"),
        (lambda: tiny_llama(num_hidden_layers=1), "layer"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_with_the_reason(model: Callable[[], Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        first_layers(model(), 1)
    assert default_depth(model()) is None


def test_a_model_without_one_list_of_blocks_is_refused() -> None:
    model = tiny_llama(num_hidden_layers=4)
    model.model.extra = nn.ModuleList(nn.Identity() for _ in range(4))
    with pytest.raises(UserError):
        first_layers(model, 2)


def test_a_cut_that_does_not_run_is_refused() -> None:
    class Counting(tf.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if self.config.num_hidden_layers != 4:
                raise RuntimeError("shape mismatch")
            return super().forward(*args, **kwargs)

    with pytest.raises(UserError):
        first_layers(build(Counting, tf.LlamaConfig(**FOUR), 0), 2)


@pytest.mark.parametrize(("layers", "depth"), [(2, 1), (3, 1), (4, 1), (6, 2), (30, 10)])
def test_default_depth_is_a_third(layers: int, depth: int) -> None:
    assert default_depth(tiny_llama(num_hidden_layers=layers)) == depth
