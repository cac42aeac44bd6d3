"""DFlash2 drafters and causal blocks (JetSpec) compute what the equations say, and misfits are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dflash_checkpoints import (
    BLOCK,
    MASK,
    VOCABULARY,
    built,
    dflash2_tensors,
    speculators_config,
    target_model,
    tensors_of,
    zlab_config,
)
from dflash_reference import DFlashReference
from drafter_checkpoints import HIDDEN, layer_keys, write_checkpoint
from drafter_runs import check_texts

from sampling.drafters.feature_sessions import BlockSession
from utils.engine import Engine
from utils.errors import UserError

TOKENS, CANDIDATES = [7, 11, 2, 29, 31, 5, 17, 40, 8, 1, 22, 13], 5
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}


def zlab(**others: Any) -> dict[str, Any]:
    config = zlab_config(2, selector_top_k=CANDIDATES, conv_kernel_size=2, conv_group_size=8, **others)
    return config | {"architectures": ["DFlash2DraftModel"]}


def speculators(**others: Any) -> dict[str, Any]:
    return speculators_config(2, kind="dflash2", selector_top_k=CANDIDATES, sample_from_anchor=False, **others)


def check_rounds(drafter: Any, reference: DFlashReference, embedding: torch.Tensor, count: int = CANDIDATES) -> None:
    """Compare the logits of rounds that bring different numbers of features. count: of candidates, 0 for all tokens."""
    features = torch.randn(len(TOKENS), 3 * HIDDEN, generator=torch.Generator().manual_seed(5))
    session, known = BlockSession(drafter), 0
    session.begin(TOKENS[:4])
    for end in (3, 4, 10):
        session.rewind(end)
        session.add_features(features[known:end], known, end)
        known, slots = end, torch.tensor([TOKENS[end]] + [MASK] * (BLOCK - 1))
        states, drafted = reference.states(features[:end], embedding[slots])[1:], [50, 9, 33]
        for index, state in enumerate(states):
            context = TOKENS[: end + 1] + drafted[:index]
            logits = session.feed(context, keep=1)[0]
            expected = state @ reference.weights["lm_head.weight"].T
            if count:
                scores = reference.selected(expected, state, context[-1], count)
                expected = torch.full((VOCABULARY,), float("-inf"))
                expected[list(scores)] = torch.tensor(list(scores.values()))
            assert torch.allclose(logits, expected, atol=2e-4, rtol=1e-4)
        session.rewind(end)


CONFIGS = [
    (zlab(), ("full", "full"), 0),
    (zlab() | SLIDING, ("specforge", "full"), 3),
    (zlab() | SLIDING | {"is_causal": False}, ("zlab, not causal", "full"), 3),
    (speculators(), ("full", "full"), 0),
]


@pytest.mark.parametrize(
    ("config", "rules", "window", "taps"),
    [
        pytest.param(*config, taps, marks=() if row % 3 == column else pytest.mark.full)
        for row, config in enumerate(CONFIGS)
        for column, taps in enumerate((1, 2, 6))
    ],
)
def test_drafts_of_dflash2_are_those_of_the_equations(tmp_path, taps, config, rules, window):
    target, tensors = target_model(), dflash2_tensors(2, taps=taps)
    drafter = built(write_checkpoint(tmp_path, config, tensors), target, "DFlash2")
    assert drafter.block_size == BLOCK - 1
    reference = DFlashReference(tensors | {"lm_head.weight": target.lm_head.weight}, layer_keys(), rules, window)
    check_rounds(drafter, reference, target.model.embed_tokens.weight)


@pytest.mark.parametrize("flags", [{}, {"sliding_window_non_causal": True}, {"sliding_window_non_causal": False}])
def test_sliding_layers_of_speculators_have_its_default(tmp_path, flags):
    """It is not causal for DFlash2, and causal for DFlash."""
    target, tensors, config = target_model(), dflash2_tensors(2), speculators(**flags)
    config["transformer_layer_config"] |= SLIDING
    drafter = built(write_checkpoint(tmp_path, config, tensors), target, "DFlash2")
    rule = "speculators, not causal" if flags.get("sliding_window_non_causal", True) else "speculators"
    reference = DFlashReference(
        tensors | {"lm_head.weight": target.lm_head.weight}, layer_keys(), (rule, "full"), SLIDING["sliding_window"]
    )
    check_rounds(drafter, reference, target.model.embed_tokens.weight)


def test_logits_are_scaled_and_capped_before_they_are_selected(tmp_path):
    scales = {"input_embedding_scale": 1.5, "output_multiplier": 0.25, "final_logit_softcapping": 2.0}
    target, tensors = target_model(), dflash2_tensors(2)
    drafter = built(write_checkpoint(tmp_path, zlab(**scales), tensors), target, "DFlash2")

    class Scaled(DFlashReference):
        def selected(self, logits: torch.Tensor, *others: Any) -> dict[int, float]:
            return super().selected(torch.tanh(logits * 0.25 / 2) * 2, *others)

    reference = Scaled(tensors | {"lm_head.weight": target.lm_head.weight}, layer_keys(), ("full", "full"))
    check_rounds(drafter, reference, target.model.embed_tokens.weight * 1.5)


@pytest.mark.parametrize(
    ("keys", "rules"),
    [
        ({"is_causal": True}, ("causal", "causal")),
        ({"dflash_config": {"causal": True}}, ("causal", "causal")),
        ({"dflash_config": {"causal_head": True}}, ("causal", "causal")),
        ({"dflash_config": {"causal_head": False}}, ("full", "full")),
        ({"is_causal": False, "dflash_config": {"causal": True}}, ("full", "full")),
        ({"dflash_config": {"causal": True}} | SLIDING, ("specforge", "causal")),
        ({"dflash_config": {"causal": False}} | SLIDING, ("zlab, not causal", "full")),
    ],
)
def test_a_block_is_causal_as_its_config_says(tmp_path, keys, rules):
    """JetSpec writes causal_head, NeMo and vLLM causal, and z-lab is_causal."""
    target, tensors, config = target_model(), tensors_of(layers=2), zlab_config(2)
    config = config | keys | {"dflash_config": config["dflash_config"] | keys.get("dflash_config", {})}
    drafter = built(write_checkpoint(tmp_path, config, tensors), target, "DFlash")
    reference = DFlashReference(tensors | {"lm_head.weight": target.lm_head.weight}, layer_keys(), rules, 3)
    check_rounds(drafter, reference, target.model.embed_tokens.weight, count=0)


@pytest.mark.parametrize(("rule", "in_16_bits"), [("coupled", False), ("rejection", False), ("rejection", True)])
def test_texts_are_those_of_the_target_alone(tmp_path, rule, in_16_bits):
    """An engine computes a target in 16 bits more precisely, and the drafter gets hidden states in its own format."""
    target = target_model(vocab_size=8).to(torch.bfloat16 if in_16_bits else torch.float32)
    tensors = dflash2_tensors() | {f"candidate_selector.{name}_codebook": torch.randn(8, 6) for name in NAMES}
    config = zlab_config(1, selector_top_k=3, mask_token_id=7)
    drafter = built(write_checkpoint(tmp_path, config, tensors), target, "DFlash2")
    assert not in_16_bits or Engine([target], helpers=[drafter]).use("invariant", 1).verified
    check_texts(target, drafter, rule)


NAMES = ("predecessor", "successor")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda tensors, config: config.pop("dflash_config"), "mask_token_id"),
        (lambda tensors, config: config["dflash_config"].pop("selector_top_k"), "selector_top_k"),
        (lambda tensors, config: config["dflash_config"].update(selector_top_k=VOCABULARY + 1), "selector_top_k"),
        (lambda tensors, config: config["dflash_config"].update(causal="yes"), "causal"),
        (lambda tensors, config: tensors.update({"layers.1.mlp_conv.base_kernel": torch.ones(2, HIDDEN)}), "mlp_conv"),
        (
            lambda tensors, config: tensors.update(
                {f"candidate_selector.{name}_codebook": torch.ones(VOCABULARY - 1, 6) for name in NAMES}
            ),
            "selector",
        ),
        (lambda tensors, config: tensors.pop("candidate_selector.successor_codebook"), "successor_codebook"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, change, word):
    tensors, config = dflash2_tensors(2), zlab()
    change(tensors, config)
    with pytest.raises(UserError, match=word):
        built(write_checkpoint(tmp_path, config, tensors), target_model(), "DFlash2")
