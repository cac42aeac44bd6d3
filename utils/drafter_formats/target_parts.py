"""What ties a drafter to its target: the embedding and the output head that they share, the vocabulary of the drafts,
and target.json, a sample of the target's weights beside a drafter that this program trained.

A drafter of another target with the same sizes would give correct text and no speed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from utils.bounds import WholeRange
from utils.decode.features import layer_count
from utils.decode.model_info import vocabulary_size
from utils.drafter_formats.checkpoint import DRAFT_TO_TARGET, DrafterCheckpoint
from utils.errors import UserError
from utils.files import read_text, replacing
from utils.models.sources import StoredTensor

NAME, VERSION = "target.json", 1
# Number formats move a fingerprint by less than this share of its norm; different models are further apart.
FINGERPRINT_TOLERANCE = 0.02
ROWS_AT_ONCE = 4096  # of two weights that are compared


class DraftHead(nn.Module):
    """An output head over a draft vocabulary of target ids.

    `rows` (V', H) are the head. `vocabulary` (V',) has the target id of each row; None if they are all of the V ids in
    order.
    """

    def __init__(self, rows: nn.Linear, vocabulary: Tensor | None, size: int) -> None:
        super().__init__()
        self.rows, self.size = rows, size
        self.vocabulary: Tensor | None
        self.register_buffer("vocabulary", vocabulary)

    def forward(self, state: Tensor) -> Tensor:
        """Return logits (..., V) for states (..., H). Tokens that are never drafted have minus infinity."""
        return self.over_target(self.rows(state))

    def over_target(self, drafted: Tensor) -> Tensor:
        """Return logits (..., V) over the target's vocabulary for those of the draft vocabulary (..., V')."""
        if self.vocabulary is None and drafted.shape[-1] == self.size:
            return drafted
        logits = drafted.new_full((*drafted.shape[:-1], self.size), float("-inf"))
        if self.vocabulary is None:  # a vocabulary of the same family with less padding
            logits[..., : drafted.shape[-1]] = drafted
            return logits
        return logits.index_copy_(-1, self.vocabulary, drafted)


def load_head(checkpoint: DrafterCheckpoint, target: PreTrainedModel, hidden: int) -> DraftHead:
    """Return the drafter's output head, or the target's, which also takes the place of an equal copy.

    Its input has size `hidden`. Raises UserError if sizes or ids do not fit the target.
    """
    size, weight = vocabulary_size(target), target.get_output_embeddings().weight.detach()
    vocabulary, has_own = _vocabulary(checkpoint, size), checkpoint.has("lm_head.weight")
    if has_own:
        own = checkpoint.tensors(["lm_head.weight"])["lm_head.weight"]
        weight = weight if _same(own, weight) else own
    elif vocabulary is not None:
        weight = weight[vocabulary.to(weight.device)]
    # Without any row, all logits would be minus infinity.
    if weight.shape[1:] != (hidden,) or not len(weight) or (vocabulary is None and len(weight) > size):
        raise misfit(checkpoint, f"its output head is {tuple(weight.shape)}, and the target has {size} tokens")
    if vocabulary is None and has_own and len(weight) < size and _names_part(checkpoint, len(weight)):
        raise UserError(
            f"'{checkpoint.name}' drafts from {len(weight)} of the target's {size} tokens, but has no "
            f"{DRAFT_TO_TARGET} of this length that names them: fetch or copy it again."
        )
    if vocabulary is not None and len(vocabulary) != len(weight):
        raise misfit(checkpoint, f"it has {len(weight)} output rows for {len(vocabulary)} draft tokens")
    rows = nn.Linear(hidden, len(weight), bias=False, device="meta")
    rows.weight = nn.Parameter(weight, requires_grad=False)
    return DraftHead(rows, vocabulary, size)


def load_embedding(
    checkpoint: DrafterCheckpoint, target: PreTrainedModel, hidden: int, *, scaled: bool = False
) -> nn.Embedding:
    """Return the drafter's input embedding, or one with the target's weights, which also replace an equal copy.

    With `scaled`, a borrowed embedding is multiplied by the target's factor, which Gemma has. Raises UserError if sizes
    do not fit.
    """
    shared = cast(nn.Embedding, target.get_input_embeddings())
    if not checkpoint.has("embed_tokens.weight"):
        if shared.weight.shape[1] != hidden:
            raise misfit(checkpoint, f"it has no embedding, and needs one of size {hidden}")
        return shared if scaled else _lookup(shared.weight)
    weight = checkpoint.tensors(["embed_tokens.weight"])["embed_tokens.weight"]
    if weight.shape[1:] != (hidden,) or len(weight) < vocabulary_size(target):
        raise misfit(checkpoint, f"its embedding is {tuple(weight.shape)}")
    return _lookup(
        shared.weight if _same(weight, shared.weight.detach()) else nn.Parameter(weight, requires_grad=False)
    )


def _lookup(weight: Tensor) -> nn.Embedding:
    count, size = weight.shape
    embedding = nn.Embedding(count, size, device="meta")
    embedding.weight = cast(nn.Parameter, weight)
    return embedding


def share_parts(
    drafter: Any, embedding: nn.Module, head: nn.Module, target: PreTrainedModel, *, rotary: nn.Module | None = None
) -> None:
    """Give a drafter its embedding, output head and rotary embedding, by default Llama's, and move it to the target's
    device and number format.
    """
    drafter.embed_tokens, drafter.lm_head, drafter.rotary = embedding, head, None
    drafter.to(target.device, target.dtype).eval().requires_grad_(False)
    drafter.rotary = (rotary or LlamaRotaryEmbedding(drafter.config)).to(target.device)  # its frequencies stay float32
    drafter.device, drafter.dtype = target.device, target.dtype


def feature_layers(
    checkpoint: DrafterCheckpoint, target: PreTrainedModel, layers: Sequence[int], *, before_norm: bool = True
) -> tuple[int, ...]:
    """The hidden states that a drafter reads. With `before_norm`, the last one is taken before the final norm: n + 1.

    Raises UserError unless the target has these hidden states and `fc` reads as many numbers as they have.
    """
    count, size = layer_count(target), int(target.config.get_text_config(decoder=True).hidden_size)
    read = checkpoint.shapes["fc.weight"][1]
    if len(layers) * size != read:
        reason = f"it reads {read} numbers per token, and {len(layers)} hidden states have {len(layers) * size}"
        raise misfit(checkpoint, reason)
    if odd := next((str(layer) for layer in layers if not isinstance(layer, int) or not 0 <= layer <= count), None):
        raise misfit(checkpoint, f"it reads hidden state {odd} of {count}")
    return tuple(layer + (before_norm and layer == count) for layer in layers)


def misfit(checkpoint: DrafterCheckpoint, reason: str) -> UserError:
    """An error for a drafter of a different target."""
    return UserError(f"'{checkpoint.name}' was not made for this target: {reason}. Name a drafter of this target.")


def _same(weight: Tensor, own: Tensor) -> bool:
    """Whether weights are equal in the format of the second one. Some rows at a time, because they may be large."""
    parts = (slice(start, start + ROWS_AT_ONCE) for start in range(0, len(own), ROWS_AT_ONCE))
    return weight.shape == own.shape and all(
        torch.equal(weight[part].to(own.device, own.dtype), own[part]) for part in parts
    )


def _names_part(checkpoint: DrafterCheckpoint, rows: int) -> bool:
    """Whether a head with this many rows has chosen ids, rather than all ids without the padding of the target's."""
    whole, part = checkpoint.layer_keys.get("vocab_size"), checkpoint.config.get("draft_vocab_size")
    declared = isinstance(whole, int) and isinstance(part, int) and rows == part < whole
    return declared or checkpoint.has("t2d") or checkpoint.shapes.get(DRAFT_TO_TARGET, (rows,))[0] != rows


def _vocabulary(checkpoint: DrafterCheckpoint, size: int) -> Tensor | None:
    """The target ids (V',) of the draft vocabulary, or None if it is the whole one."""
    name = DRAFT_TO_TARGET
    if not checkpoint.has(name) or checkpoint.shapes[name][0] >= size:
        return None
    stored = checkpoint.tensors([name])[name]
    ids = stored.long() + torch.arange(len(stored))  # target id = draft id + d2t[draft id]
    if int(ids.min()) < 0 or int(ids.max()) >= size or len(ids.unique()) != len(ids):
        raise misfit(checkpoint, f"its draft vocabulary has ids outside 0..{size - 1}, or ids that occur twice")
    return ids


def write_target_file(folder: Path, target: PreTrainedModel, *, window: int | None = None) -> None:
    """Describe the target of the drafter in a folder. window: see check_target_file."""
    about = {
        "version": VERSION,
        "target": target.name_or_path,
        "size": target_sizes(target),
        "fingerprint": [round(number, 6) for number in fingerprint(target).tolist()],
    } | ({"window": window} if window else {})
    with replacing(folder / NAME) as file:
        file.write((json.dumps(about) + "\n").encode())


def check_target_file(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> int | None:
    """Return the number of positions that layers with full attention are to attend to, None for all.

    Drafters are worse beyond the length of their training text. A config has one window for all of its layers. Raises
    UserError if a file beside the weights says that they belong to a different target, or is damaged.
    """
    files = (part.path for part in checkpoint.stored.values() if isinstance(part, StoredTensor))
    path = next(files, Path()).parent / NAME
    if not path.is_file():
        return None
    try:
        about: dict[str, Any] = json.loads(read_text(path))
        if about["version"] != VERSION:
            return None  # of a newer program
        own, stored = fingerprint(target), torch.tensor(about["fingerprint"], dtype=torch.float32)
        same = target_sizes(target) == about["size"] and own.shape == stored.shape
        same = same and bool((own - stored).norm() <= FINGERPRINT_TOLERANCE * stored.norm())
        name = " ".join(str(about["target"]).split())[:80]
        window = None if about.get("window") is None else WholeRange(2).check(about["window"])
    except Exception as error:  # whatever a damaged file leads to
        raise UserError(f"{path} is damaged: fetch it again, or delete it to load the drafter unchecked.") from error
    if not same:
        raise UserError(
            f"'{checkpoint.name}' was trained for {name}, which is not this target: name a drafter of this target, or "
            "train one with `python -m sampling.distill`."
        )
    return window


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
    parts = [embedding[rows][:, :16].float().flatten(), *([torch.cat(norms).float()] if norms else [])]
    # Embedding and norms have different scales. Normalised, both count the same.
    return torch.cat([(part / part.norm().clamp(min=1e-12)).cpu() for part in parts])
