"""Writes random MTP drafters with the package speculators, and the logits that it computes. Run it as
tests/speculators_oracle.py.

Each folder has one more file, run.safetensors: features (T, H), tokens (T,), the target's embedding and output head
(V, H), and logits (T - 2, V) of the first draft after the features of positions 0 .. r are known. While it trains, the
package computes further drafts from other entries than programs that draft do.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators_oracle import HIDDEN, SHAPE, TOKENS, VOCABULARY, Unused
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3NextConfig

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
HYBRID: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8}
HYBRID |= {"linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
MTP: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {}),
    "qwen3-next": (Qwen3NextConfig, HYBRID | EXPERTS),
    "qwen3.5": (Qwen3_5TextConfig, HYBRID),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, HYBRID | EXPERTS),
}


def target_config(name: str) -> Any:
    """The config of the target of a drafter."""
    config_class, own = MTP[name]
    fields = SHAPE | {"num_hidden_layers": 2, "tie_word_embeddings": False} | own
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    if name == "qwen3":
        del fields["rope_parameters"]["partial_rotary_factor"]
    return config_class(**fields)


def random_model(name: str) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer_config = target_config(name)
    layer_config._attn_implementation = "eager"
    model = MTPDraftModel(
        MTPSpeculatorConfig(
            transformer_layer_config=layer_config,
            speculators_config=SpeculatorsConfig(
                algorithm="mtp",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=1)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
            ),
        )
    ).eval()
    for name, part in model.named_parameters():
        part.detach().copy_(torch.randn_like(part) * 0.4 + (1.0 if "norm" in name else 0.0))
    return model


def write(folder: Path) -> None:
    for seed, name in enumerate(MTP):
        torch.manual_seed(seed)
        with torch.no_grad():
            model = random_model(name)
            features, tokens = torch.randn(TOKENS, HIDDEN), torch.randint(0, VOCABULARY, (TOKENS,))
            logits = model(input_ids=tokens[None], hidden_states=features[None])[0][0][0]
        model.save_pretrained(folder / name)
        for path in (folder / name).glob("*.py"):
            path.unlink()  # a copy of the package's code
        run = {"features": features, "tokens": tokens, "logits": logits}
        run |= {"embedding": model.embed_tokens.weight.detach(), "lm_head": model.lm_head.weight.detach()}
        save_file({key: part.contiguous() for key, part in run.items()}, folder / name / "run.safetensors")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.meta_path.append(Unused())
    write(Path(sys.argv[1]))
