"""Runs of drafters that read hidden states: as parts of a session, and as parts of speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from samplers import PROCESSORS
from torch import Tensor, nn
from toys import decoding

from sampling import RULES, HeadDrafter, autoregressive_steps, speculative_steps
from sampling.drafters.feature_sessions import feature_session
from utils.decode.model_session import ModelSession
from utils.drafter_formats.checkpoint import DrafterCheckpoint, read_checkpoint
from utils.drafter_formats.formats import format_of
from utils.engine.weight_blocks import round_int8
from utils.metrics.results import tokens_of
from utils.models.sources import locate

TOKENS = [7, 11, 2, 29, 31, 5, 17, 40, 8, 1]
DRAFTS = [50, 9, 33, 2, 61, 8]
ROUNDS = (3, 4, 7)  # features of so many positions have arrived


@torch.no_grad()
def round_weights(drafter: nn.Module) -> None:
    """Round linear weights to 8 bits, as the engine does. Rounded weights stay the same."""
    for layer in drafter.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(round_int8(layer.weight).dense())


def read(folder: Path) -> DrafterCheckpoint:
    checkpoint = read_checkpoint(locate(str(folder), print))
    assert checkpoint is not None
    return checkpoint


def loaded(folder: Path, target: Any, name: str) -> Any:
    """The drafter in a folder, which must be recognised as the format of this name."""
    checkpoint = read(folder)
    row = format_of(checkpoint)
    assert row is not None and row.name == name
    return row.load(checkpoint, target)


def hidden_states(target: Any, layers: tuple[int, ...]) -> Tensor:
    """Features (T, F) of TOKENS, read off one forward pass by hooks on the layers themselves. The last one is before
    the final norm.
    """
    seen: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, index=index: seen.setdefault(index, inputs[0]))
        for index, layer in enumerate((*target.model.layers, target.model.norm))
    ]
    with torch.no_grad():
        target(torch.tensor([TOKENS]))
    for hook in hooks:
        hook.remove()
    return torch.cat([seen[layer][0] for layer in layers], dim=-1)


def draft_rounds(drafter: Any, features: Tensor, count: int) -> Iterator[tuple[int, list[int], Tensor]]:
    """Rounds of different lengths whose drafts are all rejected. Yields how many positions are known, the tokens from
    position 1 on, drafts included, and the logits (count, V) of the drafts.
    """
    session, known = feature_session(drafter), 0
    session.begin(TOKENS[:4])
    for end in ROUNDS:
        session.rewind(end)
        session.add_features(features[known:end], known, end)
        known, context = end, TOKENS[: end + 1] + DRAFTS[: count - 1]
        yield end, context[1:], torch.cat([session.feed(context[: end + 1 + step], keep=1) for step in range(count)])


def check_texts(target: Any, drafter: Any, rule: str, adaptive: Callable[[], Any] = lambda: None) -> None:
    """Texts of a tiny vocabulary are those of the target alone, with drafts that are often right and often wrong.

    At least two prompts, and as many more as it takes until drafts of both kinds were seen. adaptive: makes an
    adaptive gamma for each of them.
    """
    plan, accepted = decoding(8, processor=PROCESSORS[rule == "coupled"], seed=3), set()
    for number, prompt in enumerate([first, second] for first in range(8) for second in (2, 5)):
        if number >= 2 and accepted >= {0, 1}:
            return
        expected = tokens_of(autoregressive_steps(prompt, ModelSession(target, rewinds=False), plan))
        session = ModelSession(target, features=drafter.feature_layers)
        options = {"shares_noise": RULES[rule].shares_noise, "adaptive": adaptive()}
        head = HeadDrafter(feature_session(drafter), plan, session.vocab_size, **options)
        steps = list(speculative_steps(prompt, head, session, plan, gamma=4, rule=RULES[rule]))
        assert tokens_of(steps) == expected
        accepted |= {step.accepted for step in steps}
    assert accepted >= {0, 1}
