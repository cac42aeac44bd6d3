"""Device, random models and engines of `make gpu-check`. Modules of the project are imported when they are needed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from gpu_guard import NotRun

TESTS = Path(__file__).parent.parent
TEXT_FIELDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2 0.5B": (
        "Qwen2",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2 1.5B": (
        "Qwen2",
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
        },
    ),
    "Llama 135M": (
        "Llama",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49_152,
            "tie_word_embeddings": True,
        },
    ),
    # Untied: a random model with a tied head repeats its input for ever.
    "Llama, 6 layers": (
        "Llama",
        {
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "vocab_size": 32_000,
            "tie_word_embeddings": False,
        },
    ),
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "initializer_range": 0.3,
}


class Setup:
    """Where models are computed. tiny: replaces every model by a tiny one, to exercise the check on any machine."""

    def __init__(self, device: str, *, tiny: bool) -> None:
        self.device, self.tiny = torch.device(device), tiny
        self.is_cuda = self.device.type == "cuda"
        if self.is_cuda and not torch.cuda.is_available():
            raise NotRun("torch finds no CUDA device")

    def model(self, name: str, dtype: torch.dtype) -> Any:
        """A random model in eval mode."""
        self.reset_peak()  # models before it are in reference cycles
        family, fields = CONFIGS[name]
        fields = {"max_position_embeddings": 4096} | fields | TEXT_FIELDS | (TINY if self.tiny else {})
        config = getattr(transformers, f"{family}Config")(**fields)
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(self.device):
                model = getattr(transformers, f"{family}ForCausalLM")(config)
        finally:
            torch.set_default_dtype(before)
        return model.eval().requires_grad_(False)

    def installed(self, engine: str, model: Any) -> Any:
        """Install an engine, if it is not "plain". Returns it. Raises NotRun if it does not support the model."""
        if engine == "plain":
            return None
        from utils.engine.weight_format import EngineWeights

        made = self._engine_class(engine)([model], [], EngineWeights())
        if reason := made.unsupported():
            raise NotRun(reason)
        count = torch.get_num_threads()
        if reason := made.install(lambda text: None) or made.self_test(count, lambda text: None):
            made.remove()
            raise RuntimeError(f"self-test: {reason}")
        return made

    def _engine_class(self, engine: str) -> Any:
        if engine == "invariant":
            from utils.engine.invariant import InvariantEngine

            return InvariantEngine
        from utils.engine.cuda_graph import CudaGraphEngine

        if self.is_cuda:
            return CudaGraphEngine
        sys.path.append(str(TESTS))
        from fake_graph import FakeRecorder

        return type("CudaGraphEngine", (CudaGraphEngine,), {"recorder": FakeRecorder})

    def wait(self) -> None:
        """Wait until the device has finished, which operations on a GPU do not."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(
        self, work: Callable[[], Any], *, repeats: int = 15, warm_ups: int = 3, after: Callable[[], Any] | None = None
    ) -> float:
        """Median seconds of `work`, after `warm_ups` runs that are not counted. after: runs outside the timed
        section.
        """
        times = []
        for _ in range(warm_ups + (2 if self.tiny else repeats)):
            self.wait()
            started = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - started)
            if after is not None:
                after()
        return median(times[warm_ups:])

    def reset_peak(self) -> None:
        """Free memory that is not used, and forget the peak."""
        with suppress(ImportError):
            from utils.freed_memory import release_memory

            release_memory()
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_mb(self) -> float | None:
        """The most memory in MB that tensors took since `reset_peak`. None without CUDA."""
        return torch.cuda.max_memory_allocated(self.device) / 1e6 if self.is_cuda else None


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a decode step reads: all but an embedding that is not the output head as well."""
    head = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    total = sum(part.numel() * part.element_size() for part in model.parameters())
    return total if embedding is head else total - embedding.numel() * embedding.element_size()
