"""Blocks with a Markov head: sampled text follows the target's distribution, as every path of a run is enumerated.

The drafter is a DSpark drafter whose drafts are drawn from left to right, and whose confidence head decides how many
are proposed. Known mistakes in this are detected.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_checkpoints import built, tensors_of, zlab_config
from drafter_checkpoints import HIDDEN, random_tensors, write_checkpoint
from exact import distance, text_probs
from samplers import SAMPLERS
from tiny import tiny_llama
from toys import ToyModel, decoding, drafting_gamma, joint_probs, toy

from sampling import RULES, Draft, HeadDrafter, speculative_steps
from sampling.drafters.feature_sessions import BlockSession
from utils.decode.model_session import ModelSession
from utils.decode.steps import Step
from utils.drafter_formats.dflash import DFlash
from utils.metrics.costs import Costs

SIZE, LENGTH, RANK, PROMPT = 3, 4, 5, [1, 2, 0]
ROUNDING, DETECTED = 1e-12, 0.02


class FeatureToy(ToyModel):
    """A toy model with three hidden states: each is a random vector of the token."""

    def __init__(self) -> None:
        super().__init__(toy(1, SIZE).table)
        self.config.num_hidden_layers = 2
        self.vectors = torch.randn(3, SIZE, HIDDEN, generator=torch.Generator().manual_seed(2))

    def forward(self, input_ids: Any, output_hidden_states: bool = False, **others: Any) -> SimpleNamespace:
        output = super().forward(input_ids, **others)
        output.hidden_states = tuple(vectors[input_ids] for vectors in self.vectors)
        return output


TARGET = FeatureToy()


def random_model(folder: Path, **others: tuple[int, ...]) -> DFlash:
    """A drafter with a Markov head. others: shapes of further tensors of that head."""
    tensors = tensors_of(markov=RANK, confidence=HIDDEN + RANK, own=True, vocabulary=SIZE)
    # The token before a draft must matter, and confidence must be on both sides of one half.
    tensors["markov_head.markov_w1.weight"] *= 6
    tensors["confidence_head.proj.weight"][:, :HIDDEN] *= 0.2
    tensors |= random_tensors({f"markov_head.joint_proj.{name}": shape for name, shape in others.items()}, seed=3)
    config = zlab_config(mask_token_id=0, target_layer_ids=[-1, 0, 1]) | {"block_size": 3}
    return built(write_checkpoint(folder, config, tensors), tiny_llama(vocab_size=SIZE), "DSpark")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DFlash:
    return random_model(tmp_path_factory.mktemp("vanilla"))


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> DFlash:
    shape = (3 * RANK, 2 * RANK + HIDDEN)
    return random_model(tmp_path_factory.mktemp("recurrent"), weight=shape, bias=shape[:1])


def decode(
    noise: Any,
    *,
    model: DFlash,
    processor: Any = SAMPLERS[0],
    rule: str = "rejection",
    adaptive: bool = False,
    kind: type[HeadDrafter] = HeadDrafter,
    length: int = LENGTH,
) -> Iterator[Step]:
    plan = decoding(length, processor=processor, noise=noise)
    gamma = drafting_gamma(Costs.of([0.45] * 4, {}), 0.01, block=model.block_size) if adaptive else None
    drafter = kind(BlockSession(model), plan, SIZE, adaptive=gamma)
    session = ModelSession(TARGET, use_cache=False, features=model.feature_layers)
    return speculative_steps(PROMPT, drafter, session, plan, gamma=3, rule=RULES[rule])


def error(processor: Any = SAMPLERS[0], *, length: int = LENGTH, decode: Any = decode, **options: Any) -> float:
    """Total variation distance of the run's texts from the target's joint distribution."""
    texts = text_probs(partial(decode, processor=processor, length=length, **options))
    return distance(texts, joint_probs(TARGET, processor, PROMPT[-1], length))


@pytest.mark.parametrize(
    ("rule", "adaptive"),
    [
        ("block", True),
        pytest.param("rejection", False, marks=pytest.mark.full),
        pytest.param("rejection", True, marks=pytest.mark.full),
        pytest.param("block", False, marks=pytest.mark.full),
    ],
)
def test_sampled_text_follows_the_targets_distribution(model, rule, adaptive):
    """Adaptive runs propose blocks of different lengths. Otherwise their enumeration would not say much."""
    lengths: set[tuple[int, int]] = set()

    def watched(noise: Any, **options: Any) -> Iterator[Step]:
        for step in decode(noise, **options):
            lengths.add((len(step.drafted), step.accepted))
            yield step

    assert error(decode=watched, model=model, rule=rule, adaptive=adaptive) < ROUNDING
    assert lengths >= {(0, 0), (1, 0), (1, 1), (2, 2)} or not adaptive


@pytest.mark.full
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_processed_distributions_are_followed_too(model, rule):
    assert error(SAMPLERS[2], model=model, rule=rule) < ROUNDING


def test_text_of_a_recurrent_markov_head_follows_the_targets_distribution(recurrent):
    assert recurrent.markov_head.kind == "rnn"
    assert error(model=recurrent, rule="block") < ROUNDING


class Unconditioned(HeadDrafter):
    """Draws with the Markov head, and reports the distributions without it."""

    def propose(self, context: list[int], count: int) -> Draft:
        draft = super().propose(context, count)
        if not draft.tokens:
            return draft
        rows = self._session._block[: len(draft.tokens)]
        return Draft(draft.tokens, self._decoding.probs(rows, "drafter"))


class Peeking(HeadDrafter):
    """Drops drafts from the first one on of which the confidence head, shown the draft's own token, thinks little."""

    def propose(self, context: list[int], count: int) -> Draft:
        draft = super().propose(context, count)
        session = self._session
        kept = [
            index
            for index, token in enumerate(draft.tokens)
            if session.model.confidence(index, token, session._cache) >= 0.5
        ]
        length = next((index for index in range(len(draft.tokens)) if index not in kept), len(draft.tokens))
        return Draft(draft.tokens[:length], None if draft.probs is None or not length else draft.probs[:length])


@pytest.mark.parametrize("mistake", [Unconditioned, pytest.param(Peeking, marks=pytest.mark.full)])
def test_mistakes_are_detected(model, mistake):
    assert error(model=model, kind=mistake, length=3) > DETECTED
