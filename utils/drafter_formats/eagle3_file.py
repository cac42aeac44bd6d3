"""New EAGLE-3 drafters, and folders of them in the layout of the package speculators, which vLLM reads, too.

If SGLang can compute the drafter, the keys that it reads are at the top of the config. The layout of speculators
numbers hidden states as inputs of layers, and the last one, n, is the state before the final norm.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors.torch import save
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from utils.decode.features import final_norm
from utils.decode.model_info import vocabulary_size
from utils.drafter_formats.checkpoint import CONFIG, WEIGHTS
from utils.drafter_formats.eagle3 import LAYER_IDS, Eagle3, OwnPosition
from utils.drafter_formats.layer_config import FULL, LAYER_KEYS, SLIDING
from utils.drafter_formats.target_parts import write_target_file
from utils.engine import attention
from utils.errors import UserError
from utils.files import os_reason, replacing
from utils.models.feature_drafter import Conventions

SPECULATORS_VERSION = "0.9.0"  # of the layout
HEAD_KINDS = ("attention", "key_value")
FEWEST_LAYERS = 7  # below them the usual hidden states coincide or do not exist


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of a drafter besides its layers.

    `embedding` (V, H) is its input embedding, `rows` (V', H) its output head, and `ids` (V',) the ascending token ids
    of these rows. Where one of the first two is None, it is the target's and not stored.
    """

    embedding: Tensor | None
    rows: Tensor | None
    ids: Tensor


def usual_layers(count: int) -> tuple[int, ...]:
    """The hidden states that EAGLE-3 drafters of a target with `count` layers read: early, middle and late ones.

    None of them is the last one, which programs take before or after the final norm.
    """
    if count >= FEWEST_LAYERS:
        return 2, count // 2, count - 3
    return tuple(sorted({count // 4, count // 2, count - 1}))


def new_eagle3(target: PreTrainedModel, layers: tuple[int, ...]) -> Eagle3:
    """A drafter in float32, without embedding and output head, that at first repeats the target's last prediction.

    It reads the hidden states `layers`. Each has a norm of its own (`fc_norm`), because they differ in scale.
    """
    drafter = Eagle3(layer_like(target), Conventions(layers), target, fc_norm=True)
    initialise(drafter)
    _read_features_as(target, drafter)
    return drafter


def layer_like(target: PreTrainedModel) -> LlamaConfig:
    """The config of a layer as wide as those of the target."""
    own = target.config.get_text_config(decoder=True)
    hidden, heads = own.hidden_size, own.num_attention_heads
    # The head size is hidden / heads here, whatever the target's own head size is.
    divisible = hidden % (2 * heads) == 0  # rotary embeddings need an even size per head
    rope = getattr(own, "rope_parameters", None) or {}
    theta = float(rope.get("rope_theta", 10_000.0)) if isinstance(rope, dict) else 10_000.0
    heads, groups = (heads, getattr(own, "num_key_value_heads", None) or heads) if divisible else (1, 1)
    return LlamaConfig(
        vocab_size=vocabulary_size(target),
        hidden_size=hidden,
        intermediate_size=getattr(own, "intermediate_size", None) or 4 * hidden,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=hidden // heads,
        rms_norm_eps=1e-5,
        # Without the target's long-context scaling.
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        max_position_embeddings=getattr(own, "max_position_embeddings", None) or 1 << 17,
        attn_implementation=attention.NAME,
    )


@torch.no_grad()
def initialise(drafter: Any) -> None:
    """Give a new drafter with `fc` small random weights, and let the last feature pass through."""
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    size = drafter.config.hidden_size
    drafter.fc.weight[:, -size:] += torch.eye(size)


@torch.no_grad()
def _read_features_as(target: PreTrainedModel, drafter: Eagle3) -> None:
    """Let the last norm of a new drafter, whose states begin with the features, read them as the target's does."""
    try:
        scale = getattr(final_norm(target), "weight", None)
    except UserError:  # it is not found
        return
    if scale is not None and scale.shape == drafter.norm.weight.shape:
        drafter.norm.weight.copy_(scale)


def save_eagle3(folder: Path, drafter: Eagle3, target: PreTrainedModel, around: Surroundings) -> None:
    """Write a drafter. Raises UserError if the folder cannot be written."""
    others = sorted(set(filter(None, _windows(drafter))))[1:]  # the config has the smallest window
    config, window = _config(drafter, target, around), max(others, default=None)
    save_drafter(folder, target, around, weights=_weights(drafter), config=config, window=window)


def save_drafter(
    folder: Path,
    target: PreTrainedModel,
    around: Surroundings,
    *,
    weights: dict[str, Tensor],
    config: dict[str, Any],
    window: int | None = None,
) -> None:
    """Write trained weights in bfloat16, their config, and target.json with the window beside them.

    Raises UserError if the folder cannot be written.
    """
    drafted = _tensors(weights, around, vocabulary_size(target))
    # Copies, because an embedding may be in memory in another form.
    tensors = {name: part.detach().cpu().clone(memory_format=torch.contiguous_format) for name, part in drafted.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / WEIGHTS) as file:
            file.write(save(tensors, metadata={"format": "pt"}))
        write_target_file(folder, target, window=window)
        # Last, because a folder with this file counts as a drafter.
        with replacing(folder / CONFIG) as file:
            file.write((json.dumps(config, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({os_reason(error)}): choose a different folder.") from error


def _tensors(weights: dict[str, Tensor], around: Surroundings, size: int) -> dict[str, Tensor]:
    """All tensors of the file, for a target with `size` tokens."""
    trained = weights | ({} if around.rows is None else {"lm_head.weight": around.rows})
    tensors = {name: part.bfloat16() if part.is_floating_point() else part for name, part in trained.items()}
    # Most programs would take the target's embedding, but the package speculators 0.9.0 does not always notice that it
    # is missing. In the number format of the target, so that an equal copy is recognised.
    tensors |= {} if around.embedding is None else {"embed_tokens.weight": around.embedding}
    if len(ids := around.ids.cpu()) < size:  # otherwise every token can be drafted
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def _weights(drafter: Eagle3) -> dict[str, Tensor]:
    """The weights with the idle parts that were left out when the drafter was loaded."""
    weights, config = drafter.state_dict(), drafter.config
    hidden, width, size = config.hidden_size, config.intermediate_size, config.head_dim
    for index, layer in enumerate(cast(Any, drafter.layers)):
        attends, name = layer.self_attn, f"layers.{index}"
        if isinstance(attends, OwnPosition):
            weights[f"{name}.self_attn.v_proj.weight"] = weights.pop(f"{name}.self_attn.linear.weight")
            weights[f"{name}.self_attn.o_proj.weight"] = torch.eye(hidden)
            for part in ("q_proj", "k_proj"):
                weights[f"{name}.self_attn.{part}.weight"] = torch.zeros(hidden, 2 * hidden)
            shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
            weights |= {f"{name}.mlp.{part}.weight": torch.zeros(shape) for part, shape in shapes.items()}
        else:
            for part in (f"{name}.self_attn.{part}.weight" for part in ("k_proj", "v_proj")):
                heads = weights[part].unflatten(0, (-1, size))
                copies = config.num_key_value_heads // len(heads)
                weights[part] = heads.repeat_interleave(copies, 0).flatten(0, 1)
    return weights


def can_be_stored(drafter: Eagle3) -> bool:
    """Whether a loaded drafter can be written again: attention to one position stores any matrix in its values."""
    config = drafter.config
    sizes = {config.hidden_size, *(config.head_dim * getattr(config, f"num_{kind}_heads") for kind in HEAD_KINDS)}
    return len(sizes) == 1 or not any(isinstance(layer.self_attn, OwnPosition) for layer in cast(Any, drafter.layers))


def _config(drafter: Eagle3, target: PreTrainedModel, around: Surroundings) -> dict[str, Any]:
    conventions, count, layer = drafter.conventions, drafter.target_layers, _layer_config(drafter)
    ids = [count if number in (-1, count + 1) else number for number in conventions.feature_layers]
    keys = _sglang_keys(drafter, layer, ids) | speculators_keys("eagle3", 3, target, drafted=len(around.ids))
    return keys | {
        "transformer_layer_config": layer,
        LAYER_IDS: ids,
        "norm_before_residual": conventions.norm_before_residual,
        "norm_before_fc": drafter.input_norm is not None,
        "fc_norm": len(drafter.fc_norm) > 0,
        "norm_output": conventions.norm_output,
        "embed_requires_grad": False,
        "target_hidden_size": drafter.fc.in_features // len(ids),
    }


def _sglang_keys(drafter: Eagle3, layer: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    """The keys that SGLang 0.5.23 reads at the top of a config, unless it would misread the drafter.

    It computes one layer of Llama without biases, and has no `norm_before_residual`. It numbers hidden states as
    outputs of layers; for some targets only if the first number is 1, which the usual layers have.
    """
    known = layer["model_type"] == "llama" and layer["num_hidden_layers"] == 1 and not layer["attention_bias"]
    known = known and "layer_types" not in layer
    if not known or drafter.conventions.norm_before_residual or ids[0] != 2:
        return {"architectures": ["Eagle3DraftModel"]}
    outputs = [number - 1 for number in ids]
    return layer | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: outputs},
    }


def layer_keys(config: Any) -> dict[str, Any]:
    """The keys of layers with this config, as files have them."""
    keys = {name: getattr(config, name) for name in LAYER_KEYS if getattr(config, name, None) is not None}
    keys.pop("rope_scaling", None)  # another name of rope_parameters
    if theta := config.rope_parameters.get("rope_theta"):
        keys["rope_theta"] = theta  # transformers 4 reads it here
    return keys


def _layer_config(drafter: Eagle3) -> dict[str, Any]:
    config = drafter.config
    keys = layer_keys(config)
    has_bias = "layers.0.self_attn.q_proj.bias" in drafter.state_dict()
    windows = _windows(drafter)
    if sizes := set(filter(None, windows)):
        types = [SLIDING if window == min(sizes) else FULL for window in windows]
        keys |= {"layer_types": types, "sliding_window": min(sizes)}
    return keys | {
        "model_type": config.model_type,
        "num_hidden_layers": len(windows),
        "vocab_size": config.vocab_size,
        "attention_bias": has_bias,
        "tie_word_embeddings": False,
    }


def _windows(drafter: Eagle3) -> list[int | None]:
    return [layer.self_attn.sliding_window for layer in cast(Any, drafter.layers)]


def speculators_keys(kind: str, drafts: int, target: PreTrainedModel, *, drafted: int) -> dict[str, Any]:
    """What speculators stores about a drafter of any kind with `drafted` output rows: the drafts of a round, the
    target as programs find it, and the versions.

    Folders of this machine mean nothing elsewhere, so only hub ids are named.
    """
    name = str(target.name_or_path)
    is_hub_id = name.count("/") == 1 and not Path(name).exists()
    architectures = list(target.config.architectures or [type(target).__name__])
    proposal: dict[str, Any] = {"proposal_type": "greedy", "speculative_tokens": drafts}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name if is_hub_id else None, "architectures": architectures},
        },
        "draft_vocab_size": drafted,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformers_version": transformers.__version__,
    }
