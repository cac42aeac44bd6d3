"""Writes random EAGLE drafters in the layout of speculators 0.3, and the logits that this version computes for them.

    pip install --target PACKAGES loguru pydantic-settings
    pip install --target PACKAGES --no-deps speculators==0.3.0 transformers==4.56.2 huggingface-hub==0.36.2 \
        tokenizers==0.22.2
    PYTHONPATH=PACKAGES python tests/speculators_eagle_oracle.py FOLDER

Each drafter becomes a folder as the package saves it, with one more file, run.safetensors: embedding and lm_head of
the target, features (T, H) of positions 0 .. T - 1, the tokens (T,) after them, and logits (T, V), where row t is the
first draft after the features of positions 0 .. t are known.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, VOCABULARY, TOKENS = 12, 24, 9
FLAGS: dict[str, dict[str, bool]] = {
    "eagle": {},
    "eagle-norms": {"fusion_bias": True, "layernorms": True},
}


def write(folder: Path, flags: dict[str, bool]) -> None:
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle import EagleSpeculator, EagleSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_theta=500.0,
    )
    layer._attn_implementation = "eager"
    target = LlamaForCausalLM(layer)
    speculation = SpeculatorsConfig(
        algorithm="eagle",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    config = EagleSpeculatorConfig(transformer_layer_config=layer, speculators_config=speculation, **flags)
    model = EagleSpeculator(config, verifier=target, verifier_attachment_mode="train_only").eval()
    for name, part in model.named_parameters():
        part.detach().copy_(torch.randn_like(part) * 0.4 + (1.0 if "norm" in name else 0.0))
    features, tokens = torch.randn(TOKENS, HIDDEN), torch.randint(0, VOCABULARY, (TOKENS,))
    mask = torch.ones(1, TOKENS, dtype=torch.long)
    logits = model(tokens[None], features[None], attention_mask=mask, return_dict=False).view(TOKENS, VOCABULARY)
    model.save_pretrained(folder)
    for name in ("eagle.py", "generation_config.json"):  # a copy of the package's code, and an empty file
        (folder / name).unlink()
    shared = {"embedding": model.embed_tokens.weight, "lm_head": model.lm_head.weight}
    run = shared | {"features": features, "tokens": tokens, "logits": logits}
    save_file({name: part.detach().clone() for name, part in run.items()}, folder / "run.safetensors")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for seed, name in enumerate(FLAGS):
        torch.manual_seed(seed)
        with torch.no_grad():
            write(Path(sys.argv[1]) / name, FLAGS[name])
