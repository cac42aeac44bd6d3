"""What the decoders need of a drafter that reads its target's hidden states, whatever its checkpoint format is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from utils.decode.kv_cache import new_cache


@dataclass(frozen=True, slots=True)
class Conventions:
    """What a checkpoint leaves to convention, or states in ways that differ between programs.

    `feature_layers` are the hidden states that are read, numbered as in `utils.decode.features`. With
    `norm_before_residual`, the first residual is the normalised state. With `norm_output`, the state after the final
    norm is fed back. With `norm_before_head`, the output head reads the state after the final norm. With `from_anchor`,
    the first slot of a block, which holds the last known token, predicts too.
    """

    feature_layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_output: bool = False
    from_anchor: bool = False
    norm_before_head: bool = True


class FeatureDrafter(nn.Module, ABC):
    """A drafter that continues from hidden states (features) of its target, concatenated to size F.

    `conventions` are how its checkpoint is read; another value takes effect at once. `config` has the target's
    vocabulary size, and describes the layers that have a cache. Like a model it has a device, a dtype and a
    name_or_path. `is_ambiguous` is True if programs disagree about how to read its files. `target_layers` is the number
    of the target's layers, or 0 if programs agree on which of them it reads. `doubtful` are the other conventions in
    which programs differ.
    """

    conventions: Conventions
    config: Any
    device: Any
    dtype: Any
    name_or_path: str
    is_ambiguous: bool = False
    target_layers: int = 0
    doubtful: tuple[str, ...] = ()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The hidden states that it reads."""
        return self.conventions.feature_layers

    def new_cache(self) -> Any:
        """Return an empty cache for one run. That of a stepwise drafter can forget its last n entries by `crop(-n)`."""
        # A sliding cache could not bring back what rejected drafts pushed out of its window.
        return new_cache(self.config, keeps_all=True)


class StepwiseDrafter(FeatureDrafter):
    """One pass for each draft, as in EAGLE (arXiv 2401.15077).

    Entry i of its cache joins the feature of position i with the token at position i + 1 and predicts token i + 2.
    After the last known feature it continues from its own states. `norm` is the final norm. The embedding, the output
    head `lm_head` and the rotary embedding may be shared with the target.
    """

    embed_tokens: Any
    norm: Any
    lm_head: Any
    rotary: Any

    def add_entries(self, states: Tensor, tokens: Tensor, first: int, cache: Any) -> tuple[Tensor, Tensor]:
        """Add entries at positions from `first`: from the states (T, H) before them and the tokens (T,) that follow
        these. Returns the last state (1, H) and its logits (1, V).
        """
        positions = torch.arange(first, first + len(tokens), device=tokens.device)[None]  # (1, T)
        state = self.next_states(states[None], tokens[None], positions, cache)[0, -1:]
        return state, self.logits(state)

    def fuse_features(self, features: Tensor) -> Tensor:
        """Map features of the target (B, T, F) to states (B, T, H)."""
        return features

    @abstractmethod
    def next_states(self, states: Tensor, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Return the states (B, T, H) at `positions` (1, T), from those before and the tokens (B, T) that follow.

        If positions do not read each other, it may return the last one alone.
        """

    @abstractmethod
    def logits(self, state: Tensor) -> Tensor:
        """Return logits (T, V) over the target's vocabulary for states (T, H). Tokens that are never drafted have
        minus infinity.
        """

    def feedback(self, state: Tensor) -> Tensor:
        """Return what takes the place of a feature's state when the target's is not known yet: (1, H) for a state
        (1, H).
        """
        return cast(Tensor, self.norm(state)) if self.conventions.norm_output else state


class BlockDrafter(FeatureDrafter):
    """One pass for all K = `block_size` drafts of a round, as in DFlash (arXiv 2602.06036)."""

    block_size: int

    @abstractmethod
    def block_logits(self, features: Tensor, tokens: Tensor, first: int, cache: Any) -> Tensor:
        """Return logits (K, V) of the next K tokens over the target's vocabulary.

        `features` (T, F) are those of the positions from `first` that are new since the last pass. `tokens` (T,) follow
        these positions; the last one ends the context. The cache gets what is known of these T positions. Nothing of
        the block may enter a later pass.
        """

    def conditioned(self, logits: Tensor, index: int, previous: int, cache: Any) -> Tensor:
        """Return the logits (1, V) of draft `index` of the last block after the token before it.

        For drafters that draw from left to right. `logits` is the draft's row of the block. Drafts are requested in
        order, each after the ones before it.
        """
        return logits

    def confidence(self, index: int, previous: int, cache: Any) -> float | None:
        """Return the drafter's own estimate of the probability that draft `index` of the last block is accepted, given
        the token before it; None if it has no such estimate. It must not depend on the draft's own token.
        """
        return None
