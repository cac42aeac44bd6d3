"""DFlash and DSpark drafters in every layout compute what the equations say, over rounds with rejected drafts."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from dflash_checkpoints import (
    BLOCK,
    LAYERS,
    MASK,
    VOCABULARY,
    built,
    speculators_config,
    target_model,
    tensors_of,
    zlab_config,
)
from dflash_reference import DFlashReference
from drafter_checkpoints import HIDDEN, layer_keys, write_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import MuseGlimmerAssistantConfig
from transformers.cache_utils import DFlashCache
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantModel

from sampling.drafters.feature_sessions import BlockSession

TOKENS = [7, 11, 2, 29, 31, 5, 17, 40, 8, 1, 22, 13]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}


def features_of(positions: int, hidden_states: int = 3) -> torch.Tensor:
    return torch.randn(positions, hidden_states * HIDDEN, generator=torch.Generator().manual_seed(5))


def check_rounds(drafter: Any, reference: DFlashReference, embedding: torch.Tensor, columns: torch.Tensor) -> None:
    """Compare the logits of rounds that bring different numbers of features. columns: the draft vocabulary."""
    session, features, known = BlockSession(drafter), features_of(len(TOKENS)), 0
    session.begin(TOKENS[:4])
    for end in (3, 4, 8, 10):  # features of so many positions have arrived
        session.rewind(end)
        session.add_features(features[known:end], known, end)
        known = end
        slots = torch.tensor([TOKENS[end]] + [MASK] * (BLOCK - 1))
        states = reference.states(features[:end], embedding[slots])[BLOCK - drafter.block_size :]
        drafted = [50, 9, 33, 4][: drafter.block_size - 1]
        for index in range(drafter.block_size):
            context = TOKENS[: end + 1] + drafted[:index]
            logits = session.feed(context, keep=1)
            expected = states[index] @ reference.weights["lm_head.weight"].T
            if drafter.markov_head is not None:
                expected = expected + reference.bias(context[-1])
            if drafter.confidence_head is not None:
                assert abs(session.confidence(context) - reference.confidence(states[index], context[-1])) < 1e-5
            assert torch.allclose(logits[0, columns], expected, atol=2e-4, rtol=1e-4)
            others = torch.ones(VOCABULARY, dtype=torch.bool).index_fill_(0, columns, False)
            assert torch.isneginf(logits[0, others]).all()
        session.rewind(end)


@pytest.mark.parametrize("from_anchor", [None, False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_drafts_of_the_zlab_layout_are_those_of_the_equations(tmp_path, from_anchor, layers):
    target, tensors = target_model(), tensors_of(layers=layers)
    config = zlab_config(layers) | ({} if from_anchor is None else {"sample_from_anchor": from_anchor})
    drafter = built(write_checkpoint(tmp_path, config, tensors), target, "DFlash")
    assert drafter.block_size == (BLOCK if from_anchor else BLOCK - 1)
    weights = tensors | {"lm_head.weight": target.lm_head.weight}
    reference = DFlashReference(weights, layer_keys(), ("full",) * layers)
    check_rounds(drafter, reference, target.model.embed_tokens.weight, torch.arange(VOCABULARY))


@pytest.mark.parametrize(
    ("rule", "flags"),
    [
        ("speculators", {}),
        ("speculators, not causal", {"sliding_window_non_causal": True}),
        ("specforge", {}),
        ("full", {"use_sliding_window": False}),
    ],
)
@pytest.mark.parametrize("window", [1, 3, 6])
def test_sliding_layers_attend_as_their_programs_train_them(tmp_path, rule, flags, window):
    target, tensors, sliding = target_model(), tensors_of(layers=2), SLIDING | {"sliding_window": window}
    if rule.startswith("speculators"):
        config = speculators_config(2, **flags)
        config["transformer_layer_config"] |= sliding
    else:
        config = zlab_config(2) | sliding | flags
    drafter = built(write_checkpoint(tmp_path, config, tensors), target, "DFlash")
    weights = tensors | {"lm_head.weight": target.lm_head.weight}
    reference = DFlashReference(weights, layer_keys(), (rule, "full"), window)
    check_rounds(drafter, reference, target.model.embed_tokens.weight, torch.arange(VOCABULARY))


@pytest.mark.parametrize(("every", "with_markov", "own"), [*product([1, 2], [True, False], [True, False])])
def test_drafts_and_confidence_of_dspark_are_those_of_the_equations(tmp_path, every, with_markov, own):
    """every: the draft vocabulary has one of so many tokens. own: whether it has an embedding of its own."""
    target = target_model()
    tensors = tensors_of(layers=2, every=every, markov=5, confidence=HIDDEN + 5 * with_markov, own=own)
    drafter = built(write_checkpoint(tmp_path, speculators_config(2, kind="dspark"), tensors), target, "DSpark")
    assert drafter.block_size == BLOCK
    embedding = tensors["embed_tokens.weight"] if own else target.model.embed_tokens.weight
    columns = tensors["d2t"] + torch.arange(len(tensors["d2t"])) if every > 1 else torch.arange(VOCABULARY)
    check_rounds(drafter, DFlashReference(tensors, layer_keys(), ("full",) * 2), embedding, columns)


def test_the_model_in_transformers_gives_the_same_states(tmp_path):
    """Over rounds: it keeps the context's keys and values, and drops those of the block."""
    target, tensors = target_model(), tensors_of(layers=2)
    drafter = built(write_checkpoint(tmp_path, zlab_config(2), tensors), target, "DFlash")
    keys = {name: value for name, value in layer_keys().items() if name != "rope_theta"}
    config = MuseGlimmerAssistantConfig(
        **keys,
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
        target_layer_ids=[1, 2, 3],
        block_size=BLOCK,
        mask_token_id=MASK,
        rope_parameters={"rope_type": "default", "rope_theta": layer_keys()["rope_theta"]},
    )
    model = MuseGlimmerAssistantModel(config).eval()
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({renamed.get(name, name): tensor for name, tensor in tensors.items()})
    theirs, ours, features, known = DFlashCache(config=config), drafter.new_cache(), features_of(len(TOKENS)), 0
    theirs.activate_past_recording()
    for end in (3, 4, 8):
        theirs.set_previous_accepted_tokens(end - known)
        if known:
            theirs.crop(-BLOCK)
        slots = torch.tensor([TOKENS[end]] + [MASK] * (BLOCK - 1))
        with torch.no_grad():
            expected = model(
                noise_embeds=target.model.embed_tokens(slots)[None],
                context_hidden_states=features[None, known:end],
                position_ids=torch.arange(known, end + BLOCK)[None],
                past_key_values=theirs,
            ).last_hidden_state[0, 1:]
            drafter.block_logits(features[known:end], torch.tensor(TOKENS[known + 1 : end + 1]), known, ours)
        assert torch.allclose(ours.states, expected, atol=1e-5, rtol=1e-5)
        assert [layer.get_seq_length() for layer in ours.layers] == [end, end]
        known = end


@pytest.mark.parametrize(
    ("config", "count", "read"),
    [
        (lambda: zlab_config(2), 3, (2, 3, 5)),
        (lambda: zlab_config(2, target_layer_ids=[-1, 2, LAYERS - 1]), 3, (0, 3, LAYERS)),
        (lambda: speculators_config(2), 3, (2, 3, 4)),
        (lambda: speculators_config(2, aux_hidden_state_layer_ids=[0, 3, LAYERS]), 3, (0, 3, LAYERS + 1)),
        (lambda: zlab_config(2, target_layer_ids=None), 2, (2, LAYERS - 2)),
        (lambda: zlab_config(2, target_layer_ids=None, num_target_layers=5), 2, (2, 3)),
        (lambda: zlab_config(1, target_layer_ids=None), 1, (LAYERS // 2 + 1,)),
        (lambda: zlab_config(3, target_layer_ids=None, num_target_layers=LAYERS), 3, (2, LAYERS // 2, LAYERS - 2)),
    ],
)
def test_layer_ids_are_read_as_their_programs_write_them(tmp_path, config, count, read):
    keys = config()
    layers = len((keys.get("transformer_layer_config") or keys)["layer_types"])
    tensors = tensors_of(layers=layers) | {"fc.weight": torch.zeros(HIDDEN, count * HIDDEN)}
    assert built(write_checkpoint(tmp_path, keys, tensors), target_model(), "DFlash").feature_layers == read


class Largest(TorchDispatchMode):
    """The most numbers that one tensor holds of those that are computed."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **kwargs or {})
        sizes = [part.numel() for part in tree_leaves(output) if isinstance(part, torch.Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return output


@pytest.mark.parametrize("keys", [{}, SLIDING])
def test_a_long_prompt_needs_no_mask_of_its_square(tmp_path, keys):
    """The first pass reads the features of the whole prompt at once. Nothing is larger than these."""
    drafter = built(write_checkpoint(tmp_path, zlab_config(2) | keys, tensors_of(layers=2)), target_model(), "DFlash")
    length = 1500
    features, tokens = features_of(length), torch.zeros(length, dtype=torch.long)
    with torch.no_grad(), Largest() as largest:
        drafter.block_logits(features, tokens, 0, drafter.new_cache())
    assert largest.numbers <= 1.5 * features.numel() < length**2 / 10
