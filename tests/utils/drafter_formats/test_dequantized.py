"""Drafters in FP8 and W4A16 have the weights of the published formulas, and other quantized ones are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_checkpoints import HIDDEN, eagle3_tensors, speculators_config, write_checkpoint
from drafter_runs import read
from mtp_checkpoints import deepseek_layers, tiny_glm, tiny_mellum, write_target
from quantized_checkpoints import fp8_parts, int4_parts, quantized, scheme
from safetensors.torch import load_file
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from utils.drafter_formats.mtp import mtp_layers
from utils.models.quantization import ROWS, QuantizedWeight

BLOCK = {"quant_method": "fp8", "weight_block_size": [16, 24]}
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FP8, tensor": (partial(fp8_parts, block="tensor", end="weight_scale"), {"quant_method": "fp8"}),
    "FP8, rows": (partial(fp8_parts, block="row", end="weight_scale"), scheme("float-quantized", strategy="channel")),
    "FP8, blocks of DeepSeek": (partial(fp8_parts, block=(16, 24), end="weight_scale_inv"), BLOCK),
    "FP8, usual blocks": (partial(fp8_parts, block=(128, 128), end="weight_scale_inv"), {"quant_method": "fp8"}),
    "FP8, blocks": (
        partial(fp8_parts, block=(32, 8), end="weight_scale"),
        scheme("float-quantized", strategy="block", block_structure=[32, 8]),
    ),
    "FP8, groups": (
        partial(fp8_parts, block=(1, 16), end="weight_scale"),
        scheme("float-quantized", strategy="group", group_size=16),
    ),
    "W4A16, groups": (partial(int4_parts, group=16), scheme("pack-quantized", num_bits=4, group_size=16)),
    "W4A16, zero points": (
        partial(int4_parts, group=8, asymmetric=True),
        scheme("pack-quantized", num_bits=4, group_size=8, symmetric=False),
    ),
    "W4A16, order": (
        partial(int4_parts, group=16, asymmetric=True, order=True),
        scheme("pack-quantized", num_bits=4, group_size=16, actorder="group"),
    ),
}


def target_model() -> Any:
    return tiny_llama(num_hidden_layers=6)


def drafter_folders(root: Path, quantize: Any, config: dict[str, Any]) -> tuple[Path, Path]:
    """An EAGLE-3 drafter as stored, and in floats."""
    stored, meant = quantized(eagle3_tensors({}, layers=2), quantize)
    keys = speculators_config({})
    first = write_checkpoint(root / "stored", keys | {"quantization_config": config}, stored)
    return first, write_checkpoint(root / "floats", keys, meant)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """The folder of a target. Tests do not change it."""
    return save_folder(tmp_path_factory.mktemp("target") / "target", target_model(), tiny_tokenizer())


@pytest.mark.parametrize("name", FORMATS)
def test_a_drafter_has_the_weights_of_the_formula(target_folder, tmp_path, name):
    stored, floats = drafter_folders(tmp_path, *FORMATS[name])
    found, expected = (load(target_folder, folder).drafter for folder in (stored, floats))
    assert found is not None and expected is not None and found.dtype == torch.float32
    weights = expected.state_dict()
    assert found.state_dict().keys() == weights.keys() and "layers.0.mlp.up_proj.weight" in weights
    for part, weight in found.state_dict().items():
        assert torch.equal(weight, weights[part]), part


def test_weights_have_the_format_of_the_target(target_folder, tmp_path, monkeypatch):
    """From the beginning: in float32 they would take twice the memory."""
    formats, read_weight = set(), QuantizedWeight.read
    monkeypatch.setattr(QuantizedWeight, "read", lambda weight, dtype: formats.add(dtype) or read_weight(weight, dtype))
    stored, floats = drafter_folders(tmp_path, *FORMATS["W4A16, groups"])
    found, expected = (load(target_folder, folder, dtype="bfloat16").drafter for folder in (stored, floats))
    assert found is not None and expected is not None
    assert all(torch.equal(part, expected.state_dict()[name]) for name, part in found.state_dict().items())
    assert formats == {torch.bfloat16}


@pytest.mark.parametrize(
    "quantize", [partial(fp8_parts, block="row", end="weight_scale"), partial(int4_parts, group=1)]
)
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (ROWS + 3, 9)])
def test_sizes_need_not_be_multiples(tmp_path, quantize, shape):
    stored, meant = quantized({"odd.weight": torch.randn(shape)}, quantize)
    folder = write_checkpoint(tmp_path, {}, stored)
    assert torch.equal(read(folder).tensors()["odd.weight"], meant["odd.weight"])


ONCE = {"target": ("FP8, blocks", "W4A16, zero points"), "drafter": ("FP8, rows", "W4A16, order")}


class Largest(TorchDispatchMode):
    """The most bytes that one tensor of floats takes of those that are computed."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **kwargs or {})
        parts = [part for part in tree_leaves(output) if isinstance(part, torch.Tensor) and part.is_floating_point()]
        self.bytes = max(self.bytes, *(part.nbytes for part in parts), 0)
        return output


@pytest.mark.parametrize("name", ["FP8, blocks", "W4A16, zero points"])
def test_nothing_is_larger_than_the_final_weight(tmp_path, name):
    quantize, config = FORMATS[name]
    stored, _ = quantized({"a.weight": torch.randn(4096, 16)}, quantize)
    checkpoint = read(write_checkpoint(tmp_path, {"quantization_config": config}, stored))
    (weight,) = checkpoint.stored.values()
    with Largest() as largest:
        final = weight.read(torch.bfloat16)
    assert final.dtype == torch.bfloat16 and largest.bytes == final.nbytes


def model_folders(root: Path, quantize: Any, keys: Any) -> tuple[Path, Path]:
    """A model as stored, with this `quantization_config`, and in floats."""
    folders = [
        save_folder(root / name, tiny_llama(num_hidden_layers=1), tiny_tokenizer()) for name in ("stored", "floats")
    ]
    config = json.loads((folders[0] / "config.json").read_text(encoding="utf-8"))
    stored, meant = quantized(load_file(folders[0] / "model.safetensors"), quantize)
    write_checkpoint(folders[0], config | ({} if keys is None else {"quantization_config": keys}), stored)
    write_checkpoint(folders[1], config, meant)
    for folder in folders:
        (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [5]}), encoding="utf-8")
    return folders[0], folders[1]


def check_model(folders: tuple[Path, Path], role: str) -> None:
    """What is loaded from the first folder computes the same as from the second."""
    found, expected = (getattr(load(folder if role == "target" else folders[1], folder), role) for folder in folders)
    prompt = torch.tensor([[7, 11, 2, 29]])
    with torch.no_grad():
        assert torch.equal(found(prompt).logits, expected(prompt).logits)
    assert found.generation_config.to_dict() == expected.generation_config.to_dict()


@pytest.mark.parametrize(
    ("role", "name"),
    [
        pytest.param(role, name, marks=() if name in ONCE[role] else pytest.mark.full)
        for role in ("target", "drafter")
        for name in FORMATS
    ],
)
def test_models_are_read_too(tmp_path, name, role):
    """transformers refuses most of them without a package that this program does not need."""
    check_model(model_folders(tmp_path, *FORMATS[name]), role)


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("keys", [None, {"quant_method": "modelopt", "quant_algo": "FP8"}])
def test_scales_apply_without_a_config_that_transformers_knows(tmp_path, keys, role):
    """As in exports of ModelOpt. transformers would read the numbers without their scales."""
    folders = model_folders(tmp_path, FORMATS["FP8, tensor"][0], keys)
    check_model(folders, role)
    assert "already quantized" in refusal(folders[0], quantize="int8")


def other_parts(
    name: str, weight: torch.Tensor, kind: torch.dtype, of_scale: torch.dtype
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return {name: weight.to(kind), f"{name}_scale": torch.ones(len(weight), 1).to(of_scale)}, weight


@pytest.mark.parametrize(
    ("kind", "of_scale", "name"),
    [
        (torch.int8, torch.float32, "int8"),
        (torch.uint8, torch.float8_e4m3fn, "uint8"),  # NVFP4
        (torch.uint32, torch.float32, "U32"),  # MLX
        (torch.float8_e4m3fnuz, torch.float32, "F8_E4M3FNUZ"),
    ],
)
def test_other_numbers_without_a_config_are_refused(tmp_path, kind, of_scale, name):
    folder, _ = model_folders(tmp_path, partial(other_parts, kind=kind, of_scale=of_scale), None)
    assert f"weights in {name} (" in refusal(folder)


@pytest.mark.parametrize("keys", [None, BLOCK, FORMATS["FP8, blocks"][1]])
def test_joined_experts_in_eight_bits_are_not_read_without_their_scales(tmp_path, keys):
    """Their names do not end with `weight`."""
    folder = save_folder(tmp_path / "experts", tiny_mellum(vocab_size=300), tiny_tokenizer())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = {name: part for name, part in load_file(folder / "model.safetensors").items() if ".experts." not in name}
    for index in range(len(config["layer_types"])):
        prefix = f"model.layers.{index}.mlp.experts."
        for name, rows, columns in (("gate_up_proj", 32, 32), ("down_proj", 32, 16)):
            tensors[prefix + name] = torch.ones(4, rows, columns).to(torch.float8_e4m3fn)
            tensors[f"{prefix}{name}_scale_inv"] = torch.full((4, -(-rows // 16), -(-columns // 24)), 0.5)
    write_checkpoint(folder, config | ({} if keys is None else {"quantization_config": keys}), tensors)
    sentence = refusal(folder)
    assert "float8_e4m3fn" in sentence and "mlp.experts." in sentence


ROTATED = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}


def test_weights_whose_inputs_are_to_be_rotated_are_refused(target_folder, tmp_path):
    """By SpinQuant and QuIP, which compressed-tensors describes beside the format of the weights."""
    quantize, keys = FORMATS["W4A16, groups"]
    config = keys | {"transform_config": {"config_groups": {"u": ROTATED}}}
    drafter, _ = drafter_folders(tmp_path / "head", quantize, config)
    model, floats = model_folders(tmp_path, quantize, config)
    sentences = refusal(target_folder, drafter), refusal(model), refusal(floats, model)
    assert all("transform_config" in sentence for sentence in sentences)
    fused = ROTATED | {"apply": [{"targets": ["Linear"], "location": "weight_input"}]}
    config["transform_config"]["config_groups"]["u"] = fused
    check_model(model_folders(tmp_path / "fused", quantize, config), "target")


def test_mtp_layers_are_dequantized(tmp_path):
    """Their experts are joined, and have a tensor and a scale each."""
    target = tiny_glm(vocab_size=300)
    layers = deepseek_layers(target, copies=False)
    folders = [
        write_target(tmp_path / str(index), target, tensors, tiny_tokenizer())
        for index, tensors in enumerate(quantized(layers, FORMATS["FP8, usual blocks"][0]))
    ]
    found, expected = (load(folder, "mtp").drafter for folder in folders)
    experts = replace(mtp_layers(read(folders[0])), dtype=torch.bfloat16).tensors()[
        "layer.mtp_block.mlp.experts.down_proj"
    ]
    assert experts.dtype == torch.bfloat16 and experts.dim() == 3
    assert found is not None and expected is not None
    assert all(torch.equal(part, expected.state_dict()[name]) for name, part in found.state_dict().items())


FC = "fc.weight"


def fc(**parts: Any) -> dict[str, Any]:
    return {f"fc.{name}": part for name, part in parts.items()}


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        (fc(weight=torch.ones(HIDDEN, 3 * HIDDEN, dtype=torch.int8), weight_scale=torch.ones(HIDDEN, 1)), "int8"),
        (fc(weight=torch.ones(HIDDEN, 3 * HIDDEN).to(torch.float8_e5m2), weight_scale=torch.ones(1)), "float8_e5m2"),
        (fc(weight=torch.ones(HIDDEN, 3 * HIDDEN).to(torch.float8_e4m3fn)), "float8_e4m3fn"),
        (fc(weight=torch.ones(HIDDEN, 3 * HIDDEN).to(torch.float8_e4m3fn), weight_scale=torch.ones(3)), "scale"),
        (
            int4_parts(FC, torch.ones(HIDDEN, 3 * HIDDEN), 8)[0] | {"fc.weight_shape": torch.tensor([HIDDEN, 48])},
            "int32",
        ),
        (int4_parts(FC, torch.ones(HIDDEN, 3 * HIDDEN), 8)[0] | {"fc.weight_scale": torch.ones(HIDDEN, 7)}, "int32"),
        (int4_parts(FC, torch.ones(HIDDEN, 3 * HIDDEN), 8)[0] | fc(weight=torch.zeros(HIDDEN, 3 * HIDDEN)), "int32"),
        (int4_parts(FC, torch.ones(HIDDEN, 3 * HIDDEN), 8)[0] | fc(weight_scale_inv=torch.ones(1)), "int32"),
        (
            int4_parts(FC, torch.ones(HIDDEN, 3 * HIDDEN), 8)[0] | fc(weight_g_idx=torch.zeros(1, dtype=torch.int32)),
            "int32",
        ),
        (fc(weight_packed=torch.ones(HIDDEN, 48, dtype=torch.uint8), weight_scale=torch.ones(HIDDEN, 6)), "uint8"),
        (fc(qweight=torch.ones(12, HIDDEN, dtype=torch.int32), scales=torch.ones(1, HIDDEN)), "int32"),
    ],
)
def test_other_formats_are_refused_with_those_that_are_read(target_folder, tmp_path, tensors, word):
    rest = {name: tensor for name, tensor in eagle3_tensors({}).items() if name != FC}
    config = speculators_config({}) | {"quantization_config": {"quant_method": "any"}}
    sentence = refusal(target_folder, write_checkpoint(tmp_path / "drafter", config, rest | tensors))
    assert word in sentence and "FP8" in sentence and "W4A16" in sentence and "fc." in sentence


def test_float64_is_not_a_quantized_format(target_folder, tmp_path):
    """Its name in safetensors, F64, begins like those of formats with 6 bits."""
    tensors = {name: part.double() if "proj" in name else part for name, part in eagle3_tensors({}).items()}
    folder = write_checkpoint(tmp_path / "drafter", speculators_config({}), tensors)
    assert load(target_folder, folder).drafter_kind == "EAGLE-3"
    model = save_folder(tmp_path / "model", target_model().double(), tiny_tokenizer())
    assert load(model).target.dtype == torch.float32


def test_a_scale_that_is_not_finite_is_refused(target_folder, tmp_path):
    quantize, config = FORMATS["FP8, rows"]
    stored, _ = quantized(eagle3_tensors({}), quantize)
    stored["layers.0.mlp.up_proj.weight_scale"][3] = float("nan")
    folder = write_checkpoint(tmp_path / "drafter", speculators_config({}) | {"quantization_config": config}, stored)
    assert "not finite (layers.0.mlp.up_proj.weight)" in refusal(target_folder, folder)


def test_a_model_in_another_format_is_refused(tmp_path):
    folder = save_folder(tmp_path, target_model(), tiny_tokenizer())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[f"{name}_packed"] = torch.zeros(tensors.pop(name).shape[0], 16, dtype=torch.uint8)
    keys = scheme("nvfp4-pack-quantized", num_bits=4, type="float")
    sentence = refusal(write_checkpoint(folder, config | {"quantization_config": keys}, tensors))
    assert f"{name}_packed" in sentence and "W4A16" in sentence
