"""A draft head: one decoder layer that reads a target's hidden states and predicts the next ones (EAGLE).

Entry i combines the target's feature at position i with the embedding of token i + 1; the target's output head turns
the result into a distribution of token i + 2. After the last feature, the head continues from its own states.
EAGLE: Li et al. 2024, arXiv 2401.15077. Features from several depths: EAGLE-3, Li et al. 2025, arXiv 2503.01840.

As a folder a head is weights in safetensors, shape and target in JSON, and a model card. It fits only one target, which
is recognised by a sample of its weights, not by its name, because folders are moved and renamed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from utils.decode.model_info import vocabulary_size
from utils.engine import attention
from utils.errors import UserError
from utils.files import check_regular, os_reason, replacing
from utils.models.checkpoints import check_finite
from utils.models.feature_drafter import Conventions, StepwiseDrafter

FORMAT, VERSION = "speculative head", 1
CONFIG, WEIGHTS = "head.json", "model.safetensors"
REMEDY = "make one for it with `python -m sampling.distill`"
# Number formats move a fingerprint by less than this share of its norm; different models are further apart.
FINGERPRINT_TOLERANCE = 0.02


def feature_layers(count: int) -> tuple[int, ...]:
    """Return the hidden states that a head reads from a target with `count` blocks: early, late and last (-1).

    The last one is the input of the target's output head.
    """
    return tuple(dict.fromkeys((max(1, count // 4), max(1, 3 * count // 4), -1)))


@dataclass(frozen=True, slots=True)
class DraftHeadShape:
    """Sizes of a head, stored in its head.json.

    `hidden` is the target's hidden size. `layers` are the hidden states that it reads, see feature_layers. `heads` and
    `groups` are its attention and key-value heads, `width` is the size of its MLP, `theta` its rotary base, and
    `positions` its context length.
    """

    hidden: int
    layers: tuple[int, ...]
    heads: int
    groups: int
    width: int
    theta: float
    positions: int


class Head(nn.Module):
    """The weights of a head. TargetHead adds what it shares with its target."""

    def __init__(self, shape: DraftHeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.config = LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.width,
            num_hidden_layers=1,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.groups,
            head_dim=shape.hidden // shape.heads,
            # The head's own rotary base, without the target's long-context scaling.
            rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
            max_position_embeddings=shape.positions,
            # For training, which passes a mask. TargetHead selects row-invariant attention for drafting.
            attn_implementation="sdpa",
        )
        # These names are keys of the weights file.
        size = shape.hidden
        self.read = nn.Linear(size * len(shape.layers), size, bias=False)
        self.norm_feature, self.norm_token = LlamaRMSNorm(size), LlamaRMSNorm(size)
        self.mix = nn.Linear(2 * size, size, bias=False)
        self.layer = LlamaDecoderLayer(self.config, 0)
        self.norm = LlamaRMSNorm(size)
        self.rotary = LlamaRotaryEmbedding(self.config)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The hidden states that it reads."""
        return self.shape.layers

    def fuse_features(self, features: Tensor) -> Tensor:
        """Map features of the target (B, T, F) to states (B, T, H) like the head's own."""
        states: Tensor = self.read(features)
        return states

    def feedback(self, state: Tensor) -> Tensor:
        """The state itself: it is fed back before the final norm."""
        return state

    def forward(
        self, states: Tensor, embedded: Tensor, positions: Tensor, *, cache: Any = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the next states (B, T, H) at `positions` (1, T).

        `states` (B, T, H) are those before, and `embedded` (B, T, H) the embeddings of the tokens that follow them.
        """
        mixed = self.mix(torch.cat([self.norm_token(embedded), self.norm_feature(states)], dim=-1))
        next_states: Tensor = self.layer(
            mixed,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=self.rotary(mixed, positions),
        )
        return next_states


def shape_for(target: PreTrainedModel, layers: tuple[int, ...]) -> DraftHeadShape:
    """Return the shape of a head whose layer is as wide as a block of the target."""
    config = target.config.get_text_config(decoder=True)
    hidden, heads = config.hidden_size, config.num_attention_heads
    # The head size is hidden / heads here, whatever the target's own head size is.
    divisible = hidden % (2 * heads) == 0  # rotary embeddings need an even size per head
    rope = getattr(config, "rope_parameters", None) or {}
    return DraftHeadShape(
        hidden=hidden,
        layers=layers,
        heads=heads if divisible else 1,
        groups=(getattr(config, "num_key_value_heads", None) or heads) if divisible else 1,
        width=getattr(config, "intermediate_size", None) or 4 * hidden,
        theta=float(rope.get("rope_theta", 10_000.0)) if isinstance(rope, dict) else 10_000.0,
        positions=getattr(config, "max_position_embeddings", None) or 1 << 17,
    )


class TargetHead(StepwiseDrafter):
    """A head together with its target's embedding and the rows of the target's output head (V', H) that it drafts from.

    `vocabulary` (V',) has the ascending token ids of these rows; other tokens are never drafted. Like a drafter model
    it has a config, a name and a device.
    """

    def __init__(self, head: Head, target: PreTrainedModel, vocabulary: Tensor) -> None:
        super().__init__()
        self.head = head.to(target.device, target.dtype).eval().requires_grad_(False)
        self.conventions = Conventions(head.shape.layers)
        self.head.rotary = LlamaRotaryEmbedding(head.config).to(target.device)  # its frequencies stay float32
        self.config = head.config
        # Sessions read the vocabulary off the config, and a head answers with logits over all of it.
        self.config.vocab_size = vocabulary_size(target)
        self.config._attn_implementation = attention.NAME
        self.embed = target.get_input_embeddings()
        self.vocabulary: Tensor
        self.register_buffer("vocabulary", vocabulary.to(target.device))
        rows = target.get_output_embeddings().weight.detach()[self.vocabulary]
        # A linear layer instead of a matrix, so that the engine can replace it by a kernel.
        self.rows = nn.Linear(rows.shape[1], len(rows), bias=False, device="meta")
        self.rows.weight = nn.Parameter(rows, requires_grad=False)
        self.device, self.dtype = target.device, target.dtype
        self.name_or_path = "head"

    def fuse_features(self, features: Tensor) -> Tensor:
        return self.head.fuse_features(features)

    def next_states(self, states: Tensor, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
        next_states: Tensor = self.head(states, self.embed(tokens), positions, cache=cache)
        return next_states

    def logits(self, state: Tensor) -> Tensor:
        drafted: Tensor = self.rows(self.head.norm(state))  # (T, V')
        # Softmax gives minus infinity a probability of exactly 0, so q needs no second vocabulary.
        logits = drafted.new_full((len(drafted), self.config.vocab_size), float("-inf"))
        return logits.index_copy_(1, self.vocabulary, drafted)


@dataclass(frozen=True, slots=True)
class HeadFile:
    """What a folder stores: the head, the token ids (V',) it drafts, and its target's name, sizes and fingerprint."""

    head: Head
    vocabulary: Tensor
    target: str
    size: list[int]
    fingerprint: Tensor

    @classmethod
    def of(cls, head: Head, vocabulary: Tensor, target: PreTrainedModel) -> HeadFile:
        """Describe a head of this target. `vocabulary` (V',) has ascending ids."""
        return cls(head, vocabulary, target.name_or_path, target_sizes(target), fingerprint(target))


def save_head(folder: Path, file: HeadFile) -> None:
    """Write a head with weights in bfloat16. Raises UserError if the folder cannot be written."""
    tensors = {
        name: part.detach().to("cpu", torch.bfloat16).contiguous() for name, part in file.head.state_dict().items()
    }
    # "mark" is the name of the fingerprint in the file format.
    tensors |= {"vocabulary": file.vocabulary.to("cpu", torch.int32), "mark": file.fingerprint.cpu()}
    about = {
        "format": FORMAT,
        "version": VERSION,
        "target": file.target,
        "size": file.size,
        "shape": asdict(file.head.shape),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / WEIGHTS) as weights:
            weights.write(save(tensors))
        # Last, because a folder with this file counts as a head.
        with replacing(folder / CONFIG) as config:
            config.write((json.dumps(about, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({os_reason(error)}): choose a different folder.") from error


def is_head(folder: Path) -> bool:
    """Whether a folder holds a head rather than a model."""
    return (folder / CONFIG).is_file()


def load_head(folder: Path, target: PreTrainedModel) -> TargetHead:
    """Load a head onto its target, in the target's number format. Raises UserError as `read_head` does."""
    head, vocabulary = read_head(folder, target)
    return TargetHead(head, target, vocabulary)


def read_head(folder: Path, target: PreTrainedModel) -> tuple[Head, Tensor]:
    """Read a head in float32 and the token ids (V',) it drafts.

    Raises UserError if the folder holds no readable head, or that of a different target.
    """
    try:
        about = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if (about["format"], about["version"]) != (FORMAT, VERSION):
            raise UserError(f"The head in {folder} has a format or version that is not supported: {REMEDY}.")
        check_regular(folder / WEIGHTS)
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            # safe_open is not a mapping, so it can only be iterated through keys().
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        vocabulary, stored = parts.pop("vocabulary"), parts.pop("mark")
        # Before the head is built, so that a head of a different size is reported as one of a different target.
        _check_target(target, stored, about, folder)
        shape = DraftHeadShape(**about["shape"] | {"layers": tuple(about["shape"]["layers"])})
        size, _, blocks = target_sizes(target)
        # Hidden states are numbered from 0, the embeddings, to the number of blocks, or from the end.
        layers_fit = all(-blocks - 1 <= layer <= blocks for layer in shape.layers)
        # Rotary embeddings need an even size per head.
        if not layers_fit or shape.hidden % (2 * shape.heads) or not 0 < shape.theta < inf:
            raise ValueError("shape")
        _check_vocabulary(vocabulary, size)
        head = _head(shape, parts)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {os_reason(error)}.") from error
    except Exception as error:  # whatever damaged files lead to
        raise UserError(f"{folder} holds no readable head: fetch it again, or {REMEDY}.") from error
    check_finite(head, str(folder))
    return head, vocabulary.long()


def _head(shape: DraftHeadShape, parts: dict[str, Tensor]) -> Head:
    """Build a head with these weights. Raises ValueError or RuntimeError if they are not those of the shape."""
    # Without memory first: a damaged shape could ask for more than the machine has.
    with torch.device("meta"):
        expected = {name: part.shape for name, part in Head(shape).state_dict().items()}
    if {name: part.shape for name, part in parts.items()} != expected:
        raise ValueError("shapes")
    head = Head(shape)
    head.load_state_dict({name: part.float() for name, part in parts.items()})
    return head


def _check_vocabulary(vocabulary: Tensor, size: int) -> None:
    """Raise ValueError unless these are ascending token ids below `size`."""
    if vocabulary.dtype not in (torch.int32, torch.int64) or vocabulary.dim() != 1 or not len(vocabulary):
        raise ValueError("vocabulary")
    ascending = bool((vocabulary.diff() > 0).all())
    if not ascending or int(vocabulary[0]) < 0 or int(vocabulary[-1]) >= size:
        raise ValueError("vocabulary")


def _check_target(target: PreTrainedModel, stored: Tensor, about: dict[str, Any], folder: Path) -> None:
    if not is_same_target(target, about["size"], stored):
        name = " ".join(str(about["target"]).split())[:80]
        raise UserError(f"The head in {folder} reads the hidden states of {name}, which is not this target: {REMEDY}.")


def target_sizes(target: PreTrainedModel) -> list[int]:
    """Return the vocabulary size, hidden size and number of blocks of a target."""
    config = target.config.get_text_config(decoder=True)
    return [*target.get_input_embeddings().weight.shape, int(config.num_hidden_layers)]


def fingerprint(target: PreTrainedModel) -> Tensor:
    """Return numbers (N,) that identify a target in any number format, sampled from its embedding and its norms.

    These are never quantized. A target that was fine-tuned without changing them counts as the same.
    """
    embedding = target.get_input_embeddings().weight.detach()
    rows = torch.linspace(0, embedding.shape[0] - 1, 64, device=embedding.device).long()
    norms = [
        part.detach()[:8] for name, part in sorted(target.named_parameters()) if part.dim() == 1 and "norm" in name
    ]
    parts = [embedding[rows, :16].float().flatten(), *([torch.cat(norms).float()] if norms else [])]
    # Embedding and norms have different scales. Normalised, both count the same.
    return torch.cat([(part / part.norm().clamp(min=1e-12)).cpu() for part in parts])


def is_same_target(target: PreTrainedModel, sizes: list[int], stored: Tensor) -> bool:
    """Whether these are the sizes and the fingerprint (N,) of the target. Raises ValueError if it is not finite."""
    # NaN and infinity would make the comparison below meaningless.
    if not stored.isfinite().all():
        raise ValueError("fingerprint")
    own = fingerprint(target)
    if target_sizes(target) != sizes or own.shape != stored.shape:
        return False
    return bool((own - stored).norm() <= FINGERPRINT_TOLERANCE * stored.norm())
