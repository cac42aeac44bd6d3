"""Writes random drafters with the package speculators, and the logits that it computes for them.

    pip install --target PACKAGES loguru pydantic-settings
    pip install --target PACKAGES --no-deps speculators==0.9.0
    PYTHONPATH=PACKAGES python tests/speculators_oracle.py FOLDER

Each drafter becomes a folder as the package saves it, with one more file, run.safetensors: features (T, F) of
positions 0 .. T - 1, the tokens (T,) after them, and draft logits (K, R, V'), where [k, r] is the draft k + 1 after
the features of positions 0 .. r are known, and after k more of the tokens. The package declares versions of
transformers below the one used here; its EAGLE-3 code runs with it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

# Packages that speculators imports for training and for serving, but not for what is computed here.
UNUSED = {
    "hs_connectors",
    "openai",
    "datasets",
    "torchaudio",
    "torchvision",
    "aiohttp",
    "mooncake",
    "pandas",
    "pyarrow",
}
HIDDEN, VOCABULARY, DRAFTED, READ = 12, 24, 12, [1, 2, 4]
TOKENS, STEPS, BLOCK, MASK = 9, 3, 4, 23
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
BEFORE_RESIDUAL, BEFORE_FC = {"norm_before_residual": True}, {"norm_before_fc": True}
FC_NORM, OUTPUT = {"fc_norm": True}, {"norm_output": True}
EAGLE3: dict[str, tuple[str, int, dict[str, bool]]] = {
    "llama": ("llama", 1, {}),
    "llama-before-residual": ("llama", 1, BEFORE_RESIDUAL),
    "llama-fc-norm": ("llama", 1, FC_NORM),
    "llama-before-fc": ("llama", 1, BEFORE_FC),
    "llama-output": ("llama", 1, OUTPUT | FC_NORM),
    "llama-2-layers": ("llama", 2, OUTPUT | BEFORE_FC),
    "qwen3": ("qwen3", 1, BEFORE_RESIDUAL | OUTPUT),
    "qwen3-2-layers": ("qwen3", 2, BEFORE_RESIDUAL | FC_NORM),
}
PEAGLE: dict[str, tuple[str, int, dict[str, bool]]] = {
    "peagle": ("llama", 4, BEFORE_RESIDUAL | FC_NORM),
    "peagle-qwen3": ("qwen3", 2, BEFORE_FC),
}
# With sliding attention in the first layer.
SLIDING: dict[str, tuple[str, int, dict[str, bool]]] = {
    "llama-sliding": ("llama", 1, BEFORE_RESIDUAL | BEFORE_FC | OUTPUT),
    "qwen3-sliding": ("qwen3", 2, OUTPUT),
    "peagle-sliding": ("llama", 2, BEFORE_RESIDUAL),
}
WINDOW = 4


class Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports an empty module for each package in UNUSED."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        unused = name.split(".")[0] in UNUSED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if unused else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: MagicMock(name=name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def random_model(name: str, family: str, layers: int, flags: dict[str, bool]) -> Any:
    """A drafter of the package with random weights and a random draft vocabulary. name: of its folder."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models import eagle3, peagle
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    algorithm = "peagle" if name.startswith("peagle") else "eagle3"
    config_class, model_class = {
        "eagle3": (eagle3.Eagle3SpeculatorConfig, eagle3.Eagle3DraftModel),
        "peagle": (peagle.PEagleSpeculatorConfig, peagle.PEagleDraftModel),
    }[algorithm]
    shape = SHAPE | {"num_hidden_layers": layers}
    if name in SLIDING:
        types = ["sliding_attention", *["full_attention"] * (layers - 1)]
        shape |= {"layer_types": types, "sliding_window": WINDOW, "use_sliding_window": True}
    layer_config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family](**shape)
    layer_config._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=BLOCK)
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    model = model_class(
        config_class(
            transformer_layer_config=layer_config,
            draft_vocab_size=DRAFTED,
            eagle_aux_hidden_state_layer_ids=READ,
            speculators_config=SpeculatorsConfig(
                algorithm=algorithm,
                proposal_methods=[proposal],
                default_proposal_method="greedy",
                verifier=verifier,
            ),
            **flags | ({"mask_token_id": MASK} if algorithm == "peagle" else {}),
        )
    ).eval()
    for name, part in model.named_parameters():
        part.detach().copy_(torch.randn_like(part) * 0.4 + (1.0 if "norm" in name else 0.0))
    chosen = torch.randperm(VOCABULARY)[:DRAFTED].sort().values
    member = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, chosen, True)
    model.load_vocab_mappings(member, chosen - torch.arange(DRAFTED))
    return model


def logits_of(model: Any, features: Tensor, tokens: Tensor) -> Tensor:
    """Draft logits (K, R, V') of an EAGLE-3 drafter or of a P-EAGLE drafter."""
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0].detach()))
    inputs = {
        "hidden_states": features[None],
        "input_ids": tokens[None],
        "document_ids": torch.zeros_like(tokens)[None],
    }
    with torch.no_grad():
        if "mask_hidden" not in model.state_dict():
            model(**inputs, ttt_steps=STEPS)
            rows = torch.stack(seen)[:, : TOKENS - STEPS + 1]
        else:
            rows = block_logits(model, inputs, seen)
    hook.remove()
    return rows.contiguous()


def block_logits(model: Any, inputs: dict[str, Tensor], seen: list[Tensor]) -> Tensor:
    """Logits of all depths after all positions. In training the package draws which of them it computes."""
    from speculators.models.peagle import core

    starts = torch.arange(TOKENS - BLOCK + 1)
    first, depths = torch.cat([torch.arange(TOKENS), starts.repeat(BLOCK - 1)]), torch.zeros(TOKENS, dtype=torch.long)
    depths = torch.cat([depths, torch.arange(1, BLOCK).repeat_interleave(len(starts))])
    core.generate_cod_sample_indices = lambda **_: (first, depths)
    core.compute_metrics = lambda **_: (torch.tensor(0.0), {})  # the loss, whose kernel needs a GPU
    model(**inputs, verifier_last_hidden_states=torch.randn(1, TOKENS, HIDDEN), num_depths=BLOCK)
    return torch.stack([seen[0][depths == depth][: len(starts)] for depth in range(BLOCK)])


def write(folder: Path) -> None:
    for seed, (name, (family, layers, flags)) in enumerate((EAGLE3 | PEAGLE | SLIDING).items()):
        torch.manual_seed(seed)
        with torch.no_grad():
            model = random_model(name, family, layers, flags)
        features, tokens = torch.randn(TOKENS, len(READ) * HIDDEN), torch.randint(0, VOCABULARY, (TOKENS,))
        logits = logits_of(model, features, tokens)
        model.save_pretrained(folder / name)
        (folder / name / "config.py").unlink()  # a copy of the package's code
        save_file({"features": features, "tokens": tokens, "logits": logits}, folder / name / "run.safetensors")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.meta_path.append(Unused())
    write(Path(sys.argv[1]))
