"""The CUDA graph engine on the CPU, with a graph that repeats recorded operations, and models for it."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from fake_graph import FakeRecorder
from tiny import build, tiny_llama, tiny_sliding
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from utils.decode.logit_drift import LogitDrift, max_rounding
from utils.engine.cuda_graph import CudaGraphEngine, GraphForward
from utils.engine.weight_format import EngineWeights

VOCABULARY = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": partial(tiny_llama, vocab_size=VOCABULARY, max_position_embeddings=2048),
    "sliding window": partial(tiny_sliding, vocab_size=VOCABULARY, max_position_embeddings=2048),
    "two kinds of layers": lambda: build(Gemma2ForCausalLM, Gemma2Config(**SHAPE, sliding_window=8), 0),
    "norms of heads": lambda: build(Qwen3ForCausalLM, Qwen3Config(**SHAPE), 0),
    "learned positions": lambda: build(GPT2LMHeadModel, GPT2Config(**GPT2), 0),
    "eager attention": partial(
        tiny_llama, vocab_size=VOCABULARY, max_position_embeddings=2048, attn_implementation="eager"
    ),
}


class OnCpu(CudaGraphEngine):
    """The engine with the graph of these tests."""

    recorder = FakeRecorder


def installed(model: Any) -> CudaGraphEngine:
    engine = OnCpu([model], [], EngineWeights())
    assert engine.unsupported() == ""
    assert engine.install() == ""
    return engine


def attached(model: Any) -> Any:
    """The model with the engine's forward pass, without a self-test."""
    model.forward = GraphForward(model, FakeRecorder(model.device))
    return model


def replays(model: Any) -> int:
    """How often graphs of the model were replayed."""
    return sum(graph.replays for graph in model.forward._record.graphs)


def equal(logits: Tensor, expected: Tensor) -> bool:
    return LogitDrift.of([logits, expected]).difference <= max_rounding(expected) / 16


def ids(count: int, random: Random) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(count)]
