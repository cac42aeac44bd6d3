"""Writes random DFlash and DSpark drafters with the package speculators, and the logits that it computes for them.

    PYTHONPATH=PACKAGES python tests/speculators_block_oracle.py FOLDER

with PACKAGES as in tests/speculators_oracle.py. Each drafter becomes a folder as the package saves it, with one more
file, run.safetensors: embedding and lm_head of the target, features (T, F) of positions 0 .. T - 1, the tokens (T,)
after them, draft logits (K, R, V'), where [k, r] is the draft k + 1 after the features of positions 0 .. r are known,
and after k more of the tokens, and, if the drafter has such a head, confidence (K, R).
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators_oracle import BLOCK, DRAFTED, HIDDEN, MASK, READ, SHAPE, TOKENS, VOCABULARY, Unused
from torch import Tensor
from transformers import Qwen3Config

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 2}
# Kind, keys of the layers' config, keys of the drafter's config.
BLOCKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash": ("dflash", {}, {"draft_vocab_size": VOCABULARY}),
    "dflash-anchor": ("dflash", {}, {"sample_from_anchor": True}),
    "dflash-sliding": ("dflash", SLIDING, {}),
    "dflash-sliding-both-ways": ("dflash", SLIDING, {"sliding_window_non_causal": True}),
    "dspark": ("dspark", {}, {}),
    "dspark-full": ("dspark", SLIDING, {"draft_vocab_size": VOCABULARY, "confidence_head_with_markov": False}),
    "dspark-gated": ("dspark", {}, {"markov_head_type": "gated", "draft_vocab_size": VOCABULARY}),
    "dspark-rnn": ("dspark", {}, {"markov_head_type": "rnn"}),
    "dspark-not-from-anchor": ("dspark", {}, {"sample_from_anchor": False, "enable_confidence_head": False}),
}


def random_block_model(kind: str, layer_keys: dict[str, Any], keys: dict[str, Any]) -> Any:
    """A drafter of the package with random weights and a random draft vocabulary."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models import dflash, dspark
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    config_class, model_class = {
        "dflash": (dflash.DFlashSpeculatorConfig, dflash.DFlashDraftModel),
        "dspark": (dspark.DSparkSpeculatorConfig, dspark.DSparkDraftModel),
    }[kind]
    layer_config = Qwen3Config(**SHAPE | layer_keys, num_hidden_layers=2)
    layer_config._attn_implementation = "eager"
    speculation = SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    own = {"block_size": BLOCK, "mask_token_id": MASK, "aux_hidden_state_layer_ids": READ, "draft_vocab_size": DRAFTED}
    own |= {"markov_rank": 6} if kind == "dspark" else {}
    config = config_class(transformer_layer_config=layer_config, speculators_config=speculation, **own | keys)
    model = model_class(config).eval()
    for name, part in model.named_parameters():
        part.detach().copy_(torch.randn_like(part) * 0.4 + (1.0 if "norm" in name else 0.0))
    if config.draft_vocab_size < VOCABULARY:
        chosen = torch.randperm(VOCABULARY)[:DRAFTED].sort().values
        member = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, chosen, True)
        model.load_vocab_mappings(member, chosen - torch.arange(DRAFTED))
    return model


def run_of(kind: str, model: Any, features: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """Logits and confidence of the blocks after all positions. In training the package draws where blocks begin."""
    from speculators.models.dflash import core as dflash_core
    from speculators.models.dspark import core as dspark_core

    seen: list[Any] = []
    block = model.config.block_size
    anchors = torch.arange(1, len(tokens) - block + 2)
    dflash_core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    for core in (dflash_core, dspark_core):  # the loss
        core.compute_metrics = lambda *given, **_: (seen.extend(given), (torch.tensor(0.0), {}))[1]
    ids = torch.cat([torch.zeros(1, dtype=torch.long), tokens])[None]
    known = torch.cat([features, torch.zeros_like(features[:1])])[None]  # no block reads the last position
    inputs = {"hidden_states": known, "input_ids": ids, "loss_mask": torch.ones_like(ids)}
    inputs |= {"verifier_last_hidden_states": known[..., : features.shape[-1] // len(READ)]}
    inputs |= {"document_ids": torch.zeros_like(ids)}
    with torch.no_grad():
        model(**inputs, max_anchors=len(anchors))
    first = 0 if model.config.sample_from_anchor else 1
    run = {"logits": seen[0].view(len(anchors), block, -1).transpose(0, 1)[first:]}
    if kind == "dspark" and model.confidence_head is not None:
        run["confidence"] = seen[2].view(len(anchors), block).T[first:].sigmoid()
    return {name: part.contiguous() for name, part in run.items()}


def write(folder: Path) -> None:
    for seed, (name, (kind, layer_keys, keys)) in enumerate(BLOCKS.items()):
        torch.manual_seed(seed)
        with torch.no_grad():
            model = random_block_model(kind, layer_keys, keys)
        features, tokens = torch.randn(TOKENS, len(READ) * HIDDEN), torch.randint(0, VOCABULARY, (TOKENS,))
        run = run_of(kind, model, features, tokens) | {"features": features, "tokens": tokens}
        run |= {"embedding": model.embed_tokens.weight.detach(), "lm_head": model.lm_head.weight.detach()}
        model.save_pretrained(folder / name)
        (folder / name / "config.py").unlink()  # a copy of the package's code
        save_file({key: part.clone() for key, part in run.items()}, folder / name / "run.safetensors")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.meta_path.append(Unused())
    write(Path(sys.argv[1]))
