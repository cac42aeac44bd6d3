"""Medusa heads in both layouts compute what the equations say after the right hidden state, and change no text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_checkpoints import HIDDEN, VOCABULARY, layer_shapes, random_tensors, write_checkpoint
from drafter_runs import ROUNDS, TOKENS, check_texts, draft_rounds, hidden_states, loaded, read
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_tokenizer

from sampling import AdaptiveGamma, HeadDrafter
from sampling.drafters.feature_sessions import feature_session
from utils.drafter_formats.formats import format_of
from utils.metrics.costs import Costs

LAYERS, HEADS = 3, 3
CHOSEN = [5, 60, 3, 17, 8, 33]  # a draft vocabulary, in the order of its rows
FASTER = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "somebody/target"}
VLLM = {"model_type": "medusa", "hidden_size": HIDDEN, "num_heads": HEADS, "vocab_size": VOCABULARY}


def tensors_of(*, layers: int = 1, bias: bool = True, rows: int = VOCABULARY) -> Any:
    """Weights in the layout of vLLM."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(HEADS):
        for layer in range(layers):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (HIDDEN, HIDDEN)
            if bias:
                shapes[f"blocks.{head}.layers.{layer}.bias"] = (HIDDEN,)
        shapes[f"lm_heads.{head}.weight"] = (rows, HIDDEN)
    return random_tensors(shapes, seed=1)


def faster_names(tensors: Any, prefix: str = "") -> Any:
    """The same weights in the layout of FasterDecoding."""
    found, layers = {}, sum(name.startswith("blocks.0.") and name.endswith("weight") for name in tensors)
    for name, tensor in tensors.items():
        parts = name.split(".")
        new = f"{parts[1]}.{layers}.weight" if parts[0] == "lm_heads" else f"{parts[1]}.{parts[3]}.linear.{parts[4]}"
        found[prefix + new] = tensor
    return found


def reference(tensors: Any, feature: torch.Tensor, heads: list[torch.Tensor]) -> torch.Tensor:
    """Draft logits (K, V') after one hidden state (H,), from the equations: residual layers, then a linear head."""
    rows = []
    for head, weight in enumerate(heads):
        x, layer = feature, 0
        while f"blocks.{head}.layers.{layer}.weight" in tensors:
            z = tensors[f"blocks.{head}.layers.{layer}.weight"] @ x
            z = z + tensors.get(f"blocks.{head}.layers.{layer}.bias", torch.zeros(HIDDEN))
            x, layer = x + z / (1 + torch.exp(-z)), layer + 1
        rows.append(weight @ x)
    return torch.stack(rows)


def heads_of(tensors: Any) -> list[torch.Tensor]:
    return [tensors[f"lm_heads.{head}.weight"] for head in range(HEADS)]


def check_drafts(drafter: Any, target: Any, expected: Any, ids: list[int] | None = None) -> None:
    """In rounds whose drafts are all rejected. expected: of a hidden state. ids: of the draft vocabulary, in the
    order of its rows.
    """
    features = target.model.norm(hidden_states(target, (LAYERS,))).detach()
    assert drafter.feature_layers == (LAYERS,) and drafter.block_size == HEADS
    for end, _, logits in draft_rounds(drafter, features, HEADS):
        rows = expected(features[end - 1])
        found = logits if ids is None else logits[:, ids]
        assert torch.allclose(found, rows, atol=1e-4 * float(rows.abs().max()))
        if ids is not None:
            others = torch.ones(VOCABULARY, dtype=torch.bool)
            others[ids] = False
            assert torch.isneginf(logits[:, others]).all()
    assert end == ROUNDS[-1]


@pytest.mark.parametrize("layout", ["faster", "faster with a prefix", "vllm"])
@pytest.mark.parametrize(("layers", "bias"), [(1, True), (2, True), (1, False), (0, False)])
def test_drafts_are_those_of_the_equations(tmp_path, layout, layers, bias):
    target, tensors = tiny_llama(num_hidden_layers=LAYERS), tensors_of(layers=layers, bias=bias)
    prefix = "medusa_head." if layout.endswith("prefix") else ""
    stored = tensors if layout == "vllm" else faster_names(tensors, prefix)
    drafter = loaded(write_checkpoint(tmp_path, VLLM if layout == "vllm" else FASTER, stored), target, "Medusa")
    check_drafts(drafter, target, lambda feature: reference(tensors, feature, heads_of(tensors)))


@pytest.mark.parametrize("rows", [len(CHOSEN), VOCABULARY])
@pytest.mark.parametrize("declared", [True, False])
def test_a_token_map_gives_the_ids_of_drafts(tmp_path, rows, declared):
    """With heads of the chosen rows or of all rows. An undeclared map of heads with all rows is ignored, as in vLLM."""
    target, tensors = tiny_llama(num_hidden_layers=LAYERS), tensors_of(rows=rows)
    config = VLLM | ({"truncated_vocab_size": len(CHOSEN)} if declared else {})
    stored = tensors | {"token_map": torch.tensor(CHOSEN)}
    drafter = loaded(write_checkpoint(tmp_path, config, stored), target, "Medusa")
    uses_map = declared or rows == len(CHOSEN)
    heads = [weight[CHOSEN] if rows == VOCABULARY and uses_map else weight for weight in heads_of(tensors)]
    ids = CHOSEN if uses_map else None
    check_drafts(drafter, target, lambda feature: reference(tensors, feature, heads), ids)


@pytest.mark.parametrize("stored", [True, False])
def test_the_original_head_serves_all_blocks(tmp_path, stored):
    """It is in the file, or it is the target's."""
    target, tensors = tiny_llama(num_hidden_layers=LAYERS), tensors_of(bias=False)
    kept = {name: tensor for name, tensor in tensors.items() if "lm_heads" not in name}
    if stored:
        kept["lm_heads.0.weight"] = tensors["lm_heads.0.weight"]
    drafter = loaded(write_checkpoint(tmp_path, VLLM | {"original_lm_head": True}, kept), target, "Medusa")
    head = tensors["lm_heads.0.weight"] if stored else target.lm_head.weight.detach()
    check_drafts(drafter, target, lambda feature: reference(tensors, feature, [head] * HEADS))


def test_logits_are_scaled(tmp_path):
    target, tensors = tiny_llama(num_hidden_layers=LAYERS), tensors_of()
    drafter = loaded(write_checkpoint(tmp_path, VLLM | {"logit_scale": 0.25}, tensors), target, "Medusa")
    check_drafts(drafter, target, lambda feature: reference(tensors, feature, heads_of(tensors)) * 0.25)


def test_the_first_head_drafts_what_the_target_says_after_two_tokens(tmp_path):
    """A head that was trained perfectly: it maps the hidden state of t to token t + 2, and further heads to t + 3."""
    target, tensors = tiny_llama(num_hidden_layers=LAYERS), tensors_of()
    features = target.model.norm(hidden_states(target, (LAYERS,))).detach()
    for name in tensors:
        if "lm_heads" not in name:
            tensors[name].zero_()
    for head in range(HEADS):
        known = len(TOKENS) - 2 - head
        after = torch.nn.functional.one_hot(torch.tensor(TOKENS[2 + head :]), VOCABULARY).float()
        tensors[f"lm_heads.{head}.weight"] = torch.linalg.lstsq(features[:known], after).solution.T
    session = feature_session(loaded(write_checkpoint(tmp_path, FASTER, faster_names(tensors)), target, "Medusa"))
    session.begin(TOKENS[:4])
    session.add_features(features[:3], 0, 3)
    drafts = [int(session.feed(TOKENS[: 4 + step], keep=1).argmax()) for step in range(HEADS)]
    assert drafts == TOKENS[4 : 4 + HEADS]


def test_a_whole_model_with_heads_is_a_model(tmp_path):
    """Its heads were trained with its own layers, not for another target."""
    heads = faster_names(tensors_of(), "medusa_head.")
    layers = {f"model.{name}": torch.zeros(shape) for name, shape in layer_shapes("layers.0.").items()}
    assert format_of(read(write_checkpoint(tmp_path, FASTER, heads | layers))) is None


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_text_is_the_targets_own(tmp_path, rule):
    target, tensors = tiny_llama(num_hidden_layers=LAYERS, vocab_size=8), faster_names(tensors_of(rows=8))
    check_texts(target, loaded(write_checkpoint(tmp_path, FASTER, tensors), target, "Medusa"), rule)


def test_adaptive_gamma_counts_all_heads(tmp_path):
    drafter = loaded(write_checkpoint(tmp_path, VLLM, tensors_of()), tiny_llama(num_hidden_layers=LAYERS), "Medusa")
    session = feature_session(drafter)
    assert session.block_size == HEADS
    gamma = AdaptiveGamma(Costs.of([0.1] * 4, {}), 0.05, block=session.block_size)
    assert gamma.cost(1) == pytest.approx(0.1 + HEADS * 0.05)
    assert HeadDrafter(session, None, VOCABULARY, adaptive=gamma)._block == HEADS


@pytest.mark.parametrize("name", ["model.safetensors", "medusa_lm_head.safetensors"])
def test_a_folder_is_loaded_as_the_drafter_of_a_pair(tmp_path, name):
    save_folder(tmp_path / "target", tiny_llama(vocab_size=300, num_hidden_layers=LAYERS), tiny_tokenizer())
    folder = write_checkpoint(tmp_path / "drafter", FASTER, faster_names(tensors_of(rows=300)))
    (folder / "model.safetensors").rename(folder / name)
    pair = load(tmp_path / "target", folder)
    assert pair.drafter_kind == "Medusa" and "Medusa" in str(pair.drafter_name) and pair.feature_layers == (LAYERS,)


def target_folder(path: Path) -> Path:
    return save_folder(path / "target", tiny_llama(vocab_size=VOCABULARY, num_hidden_layers=LAYERS), tiny_tokenizer())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda tensors, config: tensors.pop("lm_heads.1.weight"), "2 output heads for 3 blocks"),
        (lambda tensors, config: tensors.pop("blocks.1.layers.0.weight"), "blocks.1.layers.0"),
        (lambda tensors, config: tensors.pop("blocks.1.layers.0.bias"), "blocks.1.layers.0.bias is missing"),
        (
            lambda tensors, config: (
                tensors.pop("blocks.1.layers.0.weight"),
                tensors.pop("blocks.1.layers.0.bias"),
            ),
            "blocks.1.layers.0",
        ),
        (lambda tensors, config: tensors.update({"extra": torch.zeros(2)}), "extra"),
        (lambda tensors, config: tensors["lm_heads.2.weight"].fill_(float("nan")), "finite"),
        (lambda tensors, config: tensors.update({"lm_heads.0.weight": torch.zeros(500, HIDDEN)}), "500"),
        (lambda tensors, config: tensors.update({"lm_heads.1.weight": torch.zeros(0, HIDDEN)}), "output head is (0, "),
        (lambda tensors, config: tensors.update({"blocks.0.layers.0.weight": torch.zeros(8, 8)}), "read 8 numbers"),
        (lambda tensors, config: config.update({"logit_scale": "big"}), "logit_scale"),
        (lambda tensors, config: config.update({"truncated_vocab_size": 6}), "no token_map"),
        (
            lambda tensors, config: (
                config.update({"truncated_vocab_size": 2}),
                tensors.update({"token_map": torch.tensor([1, 999])}),
            ),
            "vocabulary",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_sentence(tmp_path, change, word):
    tensors, config = tensors_of(), dict(VLLM)
    change(tensors, config)
    assert word in refusal(target_folder(tmp_path), write_checkpoint(tmp_path / "drafter", config, tensors))


@pytest.mark.parametrize("alone", [True, False])
def test_pickled_heads_are_refused_with_the_conversion(tmp_path, alone):
    """alone: the folder has no safetensors file at all."""
    folder = write_checkpoint(tmp_path / "drafter", FASTER, {"other": torch.zeros(2)})
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    if alone:
        (folder / "other.safetensors").unlink()
    torch.save(faster_names(tensors_of()), folder / "medusa_lm_head.pt")
    sentence = refusal(target_folder(tmp_path), folder)
    assert "pickled" in sentence and "torch.load('medusa_lm_head.pt', weights_only=True)" in sentence
