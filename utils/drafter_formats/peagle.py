"""P-EAGLE drafters: the network of EAGLE-3, trained to draft a whole block in one pass (arXiv 2602.01469).

Each draft after the first has a place of its own in the pass, with the mask token instead of the token before it and
`mask_hidden` instead of features. The drafts of a block therefore do not depend on each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from utils.bounds import MAX_GAMMA
from utils.decode.kv_cache import new_cache
from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.eagle3 import Eagle3, is_eagle3, load_eagle3
from utils.drafter_formats.target_parts import misfit
from utils.errors import UserError
from utils.models.feature_drafter import BlockDrafter, Conventions

MASK_STATE = "mask_hidden"
MASK_TOKEN = ("pard_token", "ptd_token_id", "mask_token_id")  # names in configs
USUAL_BLOCK = 8  # of speculators' training; exports for vLLM name no number


class PEagle(BlockDrafter):
    """A P-EAGLE drafter.

    `network` is an EAGLE-3 drafter with its embedding and head. `mask` has the features (1, F) and the token id in the
    places of unknown tokens.
    """

    mask_hidden: Tensor

    def __init__(self, network: Eagle3, mask: tuple[Tensor, int], block_size: int) -> None:
        super().__init__()
        self.network, self.mask_token, self.block_size = network, mask[1], block_size
        self.register_buffer("mask_hidden", mask[0].to(network.device, network.dtype))
        self.config, self.device, self.dtype = network.config, network.device, network.dtype
        self.target_layers = network.target_layers
        # No state is fed back, so where it would be taken from makes no difference.
        self.doubtful = tuple(flag for flag in network.doubtful if flag != "norm_output")

    @property
    def conventions(self) -> Conventions:
        return self.network.conventions

    @conventions.setter
    def conventions(self, conventions: Conventions) -> None:
        self.network.conventions = conventions

    def new_cache(self) -> Any:
        return new_cache(self.config)

    def block_logits(self, features: Tensor, tokens: Tensor, first: int, cache: Any) -> Tensor:
        unknown = self.block_size - 1
        features = torch.cat([features, self.mask_hidden.expand(unknown, -1)])
        tokens = torch.cat([tokens, tokens.new_full((unknown,), self.mask_token)])
        positions = torch.arange(first, first + len(tokens), device=tokens.device)
        states = self.network.fuse_features(features)
        states = self.network.next_states(states[None], tokens[None], positions[None], cache)[0]
        if unknown:  # a crop by 0 positions would empty the cache
            cache.crop(-unknown)
        return self.network.logits(states[-self.block_size :])


def is_peagle(checkpoint: DrafterCheckpoint) -> bool:
    """Whether it is an EAGLE-3 checkpoint with features for unknown tokens."""
    return checkpoint.has(MASK_STATE) and is_eagle3(checkpoint)


def load_peagle(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> PEagle:
    """Build the drafter. Raises UserError if its tensors do not fit its config or the target."""
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if name != MASK_STATE}
    block_size, token = _block_size(checkpoint), _mask_token(checkpoint)
    network = load_eagle3(replace(checkpoint, shapes=shapes), target)
    hidden = checkpoint.tensors([MASK_STATE])[MASK_STATE].reshape(1, -1)
    if hidden.shape[1] != network.fc.in_features:
        raise misfit(checkpoint, f"its {MASK_STATE} has {hidden.shape[1]} numbers, not {network.fc.in_features}")
    size = cast(nn.Embedding, network.embed_tokens).num_embeddings
    if not 0 <= token < size:
        raise misfit(checkpoint, f"its mask token is {token}, and its embedding has {size} tokens")
    return PEagle(network, (hidden, token), block_size)


def _mask_token(checkpoint: DrafterCheckpoint) -> int:
    key = next((name for name in MASK_TOKEN if checkpoint.config.get(name) is not None), None)
    if key is None:
        raise UserError(
            f"'{checkpoint.name}' names no mask token in its config.json: add mask_token_id, or fetch it again."
        )
    given = checkpoint.config[key]
    if isinstance(given, str) and given.isdecimal():  # some exports write it as text
        return int(given)
    if type(given) is not int:
        raise checkpoint.unusable(key, given, "the id of a token")
    return given


def _block_size(checkpoint: DrafterCheckpoint) -> int:
    """The number of drafts that the config declares, or the usual one."""
    proposals = checkpoint.part("speculators_config").get("proposal_methods") or [{}]
    if not isinstance(proposals, list) or not isinstance(proposals[0], dict):
        raise checkpoint.unusable("proposal_methods", proposals, "a list of objects")
    size = checkpoint.config.get("num_depths") or proposals[0].get("speculative_tokens") or USUAL_BLOCK
    if type(size) is not int or not 1 <= size <= MAX_GAMMA:
        raise UserError(f"'{checkpoint.name}' drafts {size} tokens, and a block may have 1 to {MAX_GAMMA}.")
    return size
