"""PARD models: all drafts of a round from one pass over mask tokens, which leave no trace in the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact import distance, text_probs
from samplers import PROCESSORS, SAMPLERS
from tiny import DECODER, tiny_llama, tiny_mamba, tiny_sliding
from tiny import build as build_model
from toys import decoding, drafting_gamma, joint_probs, toy
from toys import session as toy_session
from transformers import Lfm2Config, Lfm2ForCausalLM

from sampling import RULES, ModelDrafter, autoregressive_steps, speculative_steps
from sampling.drafters.masked import MaskedSession
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.metrics.costs import Costs
from utils.metrics.results import tokens_of

SIZE, MASK, BLOCK = 8, 8, 4  # the mask token is not one of the target's
TEXT = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 7, 1, 2, 7, 4]


def target_model() -> Any:
    return tiny_llama(vocab_size=SIZE, num_hidden_layers=1)


def drafter_model(build: Any = tiny_llama, **overrides: Any) -> Any:
    seed, layers = (7, {}) if build is tiny_hybrid else (9, {"num_hidden_layers": 1})
    return build(seed, vocab_size=SIZE + 1, **layers | overrides)


def reference(model: Any, context: list[int], size: int = BLOCK) -> torch.Tensor:
    """The drafts' logits (K, V), from one pass without a cache over the whole context and K - 1 mask tokens."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([[*context, *[MASK] * (size - 1)]]), use_cache=False).logits[0, -size:]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("build", [tiny_llama, tiny_sliding])
def test_drafts_are_those_of_a_pass_over_mask_tokens(build, cache):
    """Over rounds in which no, some and all drafts are accepted, and one without drafts."""
    model = drafter_model(build)
    session = MaskedSession(ModelSession(model, use_cache=cache), MASK, BLOCK)
    session.begin(TEXT[:3])
    for start, accepted in ((3, 0), (4, 2), (7, BLOCK), (12, 1), (14, 0)):
        expected = reference(model, TEXT[:start])
        drafted = TEXT[start : start + accepted] + [0] * (BLOCK - accepted)
        for row in range(BLOCK):
            logits = session.feed(TEXT[:start] + drafted[:row], keep=1)
            assert torch.allclose(logits[0], expected[row], atol=1e-4)
        session.rewind(start + accepted)
        session.rewind(start + accepted)  # of a round in which nothing was drafted


def rounds(model: Any, target: Any, rule: str, plan: Any, prompt: list[int], **options: Any) -> Any:
    """The rounds of a run, the autoregressive text, and the rows of each pass of the drafter."""
    cache = options.pop("cache", True)
    passes: list[int] = []
    hook = model.register_forward_hook(
        lambda module, args, kwargs, output: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    session = MaskedSession(ModelSession(model, use_cache=cache), MASK, BLOCK)
    passes.clear()  # opening the session may try the cache
    shares = RULES[rule].shares_noise
    drafter = ModelDrafter(session, plan, SIZE, shares_noise=shares, block=BLOCK, **options)
    steps = list(speculative_steps(prompt, drafter, ModelSession(target), plan, gamma=6, rule=RULES[rule]))
    hook.remove()
    return steps, tokens_of(autoregressive_steps(prompt, ModelSession(target, rewinds=False), plan)), passes


@pytest.mark.parametrize(
    ("build", "index"), [(tiny_llama, 0), (tiny_sliding, 1), pytest.param(tiny_llama, 4, marks=pytest.mark.full)]
)
def test_the_text_is_the_autoregressive_text(build, index):
    target, accepted, rejected = target_model(), set(), 0
    for seed in (0, 2):
        plan = decoding(20, processor=PROCESSORS[index], seed=seed)
        steps, expected, _ = rounds(drafter_model(build), target, "coupled", plan, [3, 1, seed])
        assert tokens_of(steps) == expected
        accepted |= {step.accepted for step in steps}
        rejected += sum(step.accepted < len(step.drafted) for step in steps)
        assert {len(step.drafted) for step in steps[: -BLOCK - 1]} == {BLOCK}
    assert accepted >= {0, 1, 2} and rejected


def test_each_round_feeds_only_the_new_tokens_and_the_masks():
    steps, _, passes = rounds(
        drafter_model(), target_model(), "coupled", decoding(30, processor=PROCESSORS[1]), [3, 1, 4]
    )
    new = [3, *(step.accepted + 1 for step in steps)]
    drafting = [index for index, step in enumerate(steps) if step.drafted]
    # A round without drafts at the end of the text feeds nothing.
    assert passes == [new[index] + BLOCK - 1 for index in drafting] and max(step.accepted for step in steps) > 0


@pytest.mark.parametrize("rule", ["greedy", "coupled", "block", pytest.param("rejection", marks=pytest.mark.full)])
def test_adaptive_gamma_counts_the_whole_block(rule):
    plan = decoding(30, processor=PROCESSORS[0 if rule == "greedy" else 2], seed=1)
    adaptive = drafting_gamma(Costs.of([0.05] * 8, {}), 0.01, block=BLOCK)
    name = "rejection" if rule == "greedy" else rule
    steps, expected, passes = rounds(drafter_model(), target_model(), name, plan, [2, 7], adaptive=adaptive)
    assert len(passes) >= sum(bool(step.drafted) for step in steps) > 3
    assert len({len(step.drafted) for step in steps}) > 1
    if rule in ("greedy", "coupled"):
        assert tokens_of(steps) == expected


def tiny_hybrid(seed: int, **overrides: Any) -> Any:
    """One layer with attention and one with a recurrent state."""
    layers = {"layer_types": ["full_attention", "conv"], "block_multiple_of": 8}
    return build_model(Lfm2ForCausalLM, Lfm2Config(**DECODER | layers | overrides), seed)


def test_a_recurrent_state_is_restored_after_the_mask_tokens():
    target, model = target_model(), drafter_model(tiny_hybrid)
    plan = decoding(32, processor=PROCESSORS[1], seed=2)
    steps, expected, _ = rounds(model, target, "coupled", plan, [3, 1, 4], cache=False)
    cached, _, _ = rounds(model, target, "coupled", plan, [3, 1, 4])
    assert tokens_of(steps) == expected and cached == steps
    assert {step.accepted for step in steps} >= {0, 1}


def test_a_recurrent_drafter_whose_state_cannot_be_used_drafts_without_a_cache():
    target, model = target_model(), drafter_model(tiny_mamba)
    plan = decoding(12, processor=PROCESSORS[1], seed=2)
    with pytest.raises(UserError, match="use_cache=False"):
        rounds(model, target, "coupled", plan, [3, 1, 4])
    steps, expected, _ = rounds(model, target, "coupled", plan, [3, 1, 4], cache=False)
    assert tokens_of(steps) == expected and steps[0].drafted


def test_blocks_are_shorter_at_the_end_of_the_drafters_context():
    model = drafter_model(max_position_embeddings=20)
    plan = decoding(40, processor=PROCESSORS[1], seed=1)
    steps, expected, passes = rounds(model, target_model(), "coupled", plan, [3, 1, 4])
    assert tokens_of(steps) == expected and not steps[-2].drafted and len(passes) > 2
    session = MaskedSession(ModelSession(model), MASK, BLOCK)
    context = (TEXT * 2)[:18]
    session.begin(context)
    assert session.room(context) == 2
    expected_rows = reference(model, context, 2)
    assert torch.allclose(session.feed(context, keep=1)[0], expected_rows[0], atol=1e-4)
    assert torch.allclose(session.feed([*context, 5], keep=1)[0], expected_rows[1], atol=1e-4)


@pytest.mark.parametrize(
    ("rule", "adaptive"),
    [
        ("block", True),
        pytest.param("rejection", False, marks=pytest.mark.full),
        pytest.param("rejection", True, marks=pytest.mark.full),
        pytest.param("block", False, marks=pytest.mark.full),
    ],
)
def test_sampled_text_follows_the_targets_distribution(rule, adaptive):
    """Every path of a run is enumerated. The drafter's mask token is an ordinary token here."""
    target, model, length = toy(1, 3), toy(2, 3), 4

    def decode(noise: Any) -> Any:
        plan = decoding(length, processor=SAMPLERS[0], noise=noise)
        gamma = drafting_gamma(Costs.of([0.45] * 4, {}), 0.01, block=2) if adaptive else None
        session = MaskedSession(toy_session(model), 1, 2)
        drafter = ModelDrafter(session, plan, 3, adaptive=gamma, block=2)
        return speculative_steps([1, 2, 0], drafter, toy_session(target), plan, gamma=3, rule=RULES[rule])

    assert distance(text_probs(decode), joint_probs(target, SAMPLERS[0], 0, length)) < 1e-12
