"""New DSpark drafters (arXiv 2607.05147), and folders of them in the layout of the package speculators.

All slots of a block predict and see each other. The Markov head is a bias for the token before a draft.
"""

from pathlib import Path

from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from utils.decode.model_info import vocabulary_size
from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.dflash import CONFIDENCE, MARKOV, SPECULATORS, VANILLA, DFlash
from utils.drafter_formats.eagle3_file import (
    Surroundings,
    initialise,
    layer_keys,
    layer_like,
    save_drafter,
    speculators_keys,
)
from utils.drafter_formats.layer_config import FULL, layer_config
from utils.models.sources import StoredTensor

LAYERS = 2
RANK = 64  # of the Markov head


def new_dspark(target: PreTrainedModel, layers: tuple[int, ...], *, slots: int, drafted: int, mask: int) -> DFlash:
    """A drafter in float32 without embedding and output head, which has `drafted` rows.

    It reads the hidden states `layers`, none of which is the last one. `mask` is the token of unknown slots.
    """
    like, size = layer_like(target), vocabulary_size(target)
    keys = layer_keys(like) | {"layer_types": [FULL] * LAYERS, "num_hidden_layers": LAYERS, "vocab_size": size}
    config = speculators_keys("dspark", slots, target, drafted=drafted) | {
        "architectures": ["DSparkDraftModel"],
        "transformer_layer_config": keys | {"model_type": "qwen3", "attention_bias": False},
        "aux_hidden_state_layer_ids": list(layers),
        "block_size": slots,
        "mask_token_id": mask,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "markov_rank": RANK,
        "markov_head_type": VANILLA,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "target_hidden_size": None,
    }
    hidden = like.hidden_size
    shapes: dict[str, tuple[int, ...]] = {f"layers.{index}.": () for index in range(LAYERS)}
    shapes |= {"fc.weight": (hidden, hidden * len(layers)), CONFIDENCE: (1, hidden + RANK)}
    shapes |= dict(zip(MARKOV, ((size, RANK), (drafted, RANK)), strict=True))
    stored = {name: StoredTensor(Path(), name, "F32", shape) for name, shape in shapes.items()}
    checkpoint = DrafterCheckpoint("a new drafter", config, stored)
    layer = layer_config(keys, checkpoint, head_norms=True)
    layer.vocab_size = size
    drafter = DFlash(layer, checkpoint, target)
    drafter.rotary = LlamaRotaryEmbedding(layer)
    # The final norm is not the target's. States begin with the embedding, and that norm would magnify it until the
    # drafter predicts its own input.
    initialise(drafter)
    return drafter


def can_be_trained(drafter: DFlash) -> bool:
    """Whether a loaded drafter has the parts and the layout of a new one, perhaps with sliding or causal layers."""
    markov, confidence, hidden = drafter.markov_head, drafter.confidence_head, drafter.config.hidden_size
    if markov is None or confidence is None or drafter.candidate_selector is not None:
        return False
    reads = confidence["proj"].in_features == hidden + markov.markov_w1.embedding_dim
    is_known = SPECULATORS in drafter.stored and drafter.conventions.from_anchor
    return bool(reads and is_known and markov.kind == VANILLA)


def save_dspark(folder: Path, drafter: DFlash, target: PreTrainedModel, around: Surroundings) -> None:
    """Write a drafter. Raises UserError if the folder cannot be written."""
    keys = speculators_keys("dspark", drafter.slots, target, drafted=len(around.ids))
    config = drafter.stored | keys | {"block_size": drafter.slots}
    save_drafter(folder, target, around, weights=drafter.state_dict(), config=config)
