"""Drafters that draft a block in one pass: the same loop and rules, one pass per round, and exact texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samplers import PROCESSORS
from tiny import tiny_llama
from toys import decoding, drafting_gamma

from sampling import RULES, AdaptiveGamma, HeadDrafter, autoregressive_steps, speculative_steps
from sampling.drafters.feature_sessions import feature_session
from utils.decode.model_session import ModelSession
from utils.metrics.costs import Costs
from utils.metrics.results import tokens_of
from utils.models.feature_drafter import BlockDrafter, Conventions

SIZE, BLOCK = 8, 3


class RandomBlocks(BlockDrafter):
    """Logits that depend on all features so far, the last token, the place in the block and the token before."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        width = target.config.hidden_size
        self.config, self.conventions, self.block_size = target.config, Conventions((1, -1)), BLOCK
        self.device, self.dtype, self.name_or_path = target.device, target.dtype, "blocks"
        self.read = torch.randn(2 * width, BLOCK * SIZE, generator=generator) / width
        self.last, self.before = torch.randn(2, SIZE, SIZE, generator=generator)
        self.passes: list[tuple[int, list[int]]] = []

    def new_cache(self) -> list[torch.Tensor]:
        return []

    def block_logits(self, features, tokens, first, cache):
        self.passes.append((first, tokens.tolist()))
        assert len(features) == len(tokens) and first == sum(len(part) for part in cache)
        cache.append(features)
        return (torch.cat(cache).mean(0) @ self.read).view(BLOCK, SIZE) + self.last[tokens[-1]]

    def conditioned(self, logits, index, previous, cache):
        return logits + self.before[previous]


def run(rule: str, plan: Any, prompt: list[int], adaptive: AdaptiveGamma | None = None, gamma: int = 5):
    target = tiny_llama(vocab_size=SIZE)
    model, session = RandomBlocks(target), ModelSession(target, features=(1, -1))
    shares = RULES[rule].shares_noise
    drafter = HeadDrafter(feature_session(model), plan, SIZE, shares_noise=shares, adaptive=adaptive)
    steps = list(speculative_steps(prompt, drafter, session, plan, gamma=gamma, rule=RULES[rule]))
    expected = tokens_of(autoregressive_steps(prompt, ModelSession(target, rewinds=False), plan))
    return steps, expected, model


@pytest.mark.parametrize("index", range(len(PROCESSORS)))
def test_the_text_is_the_autoregressive_text(index):
    plan = decoding(24, processor=PROCESSORS[index], seed=index)
    steps, expected, _ = run("coupled", plan, [3, 1, 4])
    assert tokens_of(steps) == expected
    assert max(step.accepted for step in steps) > 0 and any(step.accepted < len(step.drafted) for step in steps)
    assert {len(step.drafted) for step in steps[1:-1]} <= {1, 2, BLOCK}


def test_a_round_takes_one_pass_over_what_is_new():
    """Every position is read once, with the token after it, whatever was rejected."""
    plan = decoding(30, processor=PROCESSORS[1], seed=4)
    steps, _, model = run("coupled", plan, [3, 1, 4])
    text = [3, 1, 4, *tokens_of(steps)]
    assert len(model.passes) == sum(bool(step.drafted) for step in steps)
    read = [token for _, tokens in model.passes for token in tokens]
    assert read == text[1 : len(read) + 1]
    assert [first for first, _ in model.passes] == [
        sum(len(tokens) for _, tokens in model.passes[:index]) for index in range(len(model.passes))
    ]


def test_drafts_are_drawn_from_the_rows_given_the_token_before():
    target = tiny_llama(vocab_size=SIZE)
    model = RandomBlocks(target)
    session = feature_session(model)
    session.begin([3, 1, 4])
    features = torch.randn(2, 2 * target.config.hidden_size)
    session.add_features(features, 0, 2)
    rows = (features.mean(0) @ model.read).view(BLOCK, SIZE) + model.last[4]
    assert torch.allclose(session.feed([3, 1, 4], keep=1)[0], rows[0] + model.before[4])
    assert torch.allclose(session.feed([3, 1, 4, 6], keep=1)[0], rows[1] + model.before[6])
    assert torch.allclose(session.feed([3, 1, 4, 6, 2], keep=1)[0], rows[2] + model.before[2])
    assert session.room([3, 1, 4]) == BLOCK and len(model.passes) == 1


class InOrder(RandomBlocks):
    """Remembers for which rows, and after which tokens, logits were computed, as a recurrent head does."""

    def conditioned(self, logits, index, previous, cache):
        self.order.append((index, previous))
        return super().conditioned(logits, index, previous, cache)


def test_rows_behind_forced_tokens_are_computed_in_their_order():
    """A recurrent head needs every row after the token before it, also those of tokens that it did not draft."""
    target = tiny_llama(vocab_size=SIZE)
    found = []
    for contexts in ([[3, 1, 4, 6, 2]], [[3, 1, 4], [3, 1, 4, 6], [3, 1, 4, 6, 2]]):
        model = InOrder(target)
        model.order = []
        session = feature_session(model)
        session.begin([3, 1, 4])
        session.add_features(torch.ones(2, 2 * target.config.hidden_size), 0, 2)
        found.append([session.feed(context, keep=1) for context in contexts][-1])
        assert model.order == [(0, 4), (1, 6), (2, 2)]
        assert session.room([3, 1, 4, 6]) == BLOCK - 1
    assert torch.equal(*found)


def test_the_cost_of_a_block_does_not_depend_on_the_drafts():
    costs = Costs.of([0.1, 0.2, 0.3, 0.4], {})
    adaptive = drafting_gamma(costs, 0.05, block=BLOCK)
    assert adaptive.cost(0) == 0.0
    assert [round(adaptive.cost(count), 6) for count in (1, 2, 3, 4)] == [0.25, 0.35, 0.45, 0.6]


@pytest.mark.parametrize("rule", ["coupled", "block", pytest.param("rejection", marks=pytest.mark.full)])
def test_adaptive_gamma_counts_the_whole_block(rule):
    plan = decoding(30, processor=PROCESSORS[0], seed=1)
    adaptive = drafting_gamma(Costs.of([0.05] * 8, {}), 0.01, block=BLOCK)
    steps, expected, model = run(rule, plan, [2, 7], adaptive)
    assert tokens_of(steps) == expected and len(model.passes) > 3


class Unsure(RandomBlocks):
    """With a confidence of its own."""

    def confidence(self, index, previous, cache):
        return (index + 1) * (previous + 1) / (BLOCK * SIZE)


class Recording(AdaptiveGamma):
    """Remembers the buckets of each round."""

    def learn(self, buckets, accepted, computed=0):
        self.rounds = [*getattr(self, "rounds", []), list(buckets)]
        super().learn(buckets, accepted, computed)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_adaptive_gamma_takes_the_drafters_own_confidence(rule):
    """It is that of the token before the draft, not of the draft."""
    target, plan, prompt = tiny_llama(vocab_size=SIZE), decoding(30, processor=PROCESSORS[2], seed=2), [3, 1, 4]
    model, adaptive = Unsure(target), Recording(Costs.of([0.05] * 8, {"toy": 0.01}), kind="toy", block=BLOCK)
    shares = RULES[rule].shares_noise
    drafter = HeadDrafter(feature_session(model), plan, SIZE, shares_noise=shares, adaptive=adaptive)
    session = ModelSession(target, features=(1, -1))
    steps = list(speculative_steps(prompt, drafter, session, plan, gamma=5, rule=RULES[rule]))
    text, expected = list(prompt), []
    for step in steps:
        before = [text[-1], *step.drafted[:-1]] if step.drafted else []
        eighths = [int(8 * model.confidence(index, token, None)) for index, token in enumerate(before)]
        expected.append([("confidence", min(7, eighth)) for eighth in eighths])
        text += step.tokens
    assert [buckets for buckets in adaptive.rounds if buckets] == [buckets for buckets in expected if buckets]
    assert len({bucket for buckets in expected for bucket in buckets}) > 3
