"""Sampled text follows the target's distribution with every drafter, and each known mistake is detected.

Every path of a whole run is enumerated (see exact.py): drafter, processor, verification rule and loop are the
program's own, and only the noise is replaced. Nothing is sampled, so there are no false alarms. test_noise.py tests the
program's noise.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from exact import Branching, Reusing, distance, outcome_probs, text_probs
from samplers import SAMPLERS
from tiny import tiny_llama
from toys import ToyModel, decoding, joint_probs, opposed, session, toy

from ngram_assisted import NGramDrafter, NGramStorage
from sampling import (
    RULES,
    Draft,
    ModelDrafter,
    Rule,
    Verified,
    autoregressive_steps,
    choose_rule,
    speculative_generate,
    speculative_steps,
)
from utils.decode.noise import Domain, Noise
from utils.decode.steps import Step
from utils.logits_processor import LogitsProcessor, MultinomialProcessor, TopKProcessor
from utils.metrics.results import tokens_of

LENGTH, START, SIZE = 3, 0, 4
PROMPT = [0, 1, START]  # from this prompt an n-gram storage drafts 1 first, the same draft in every run
ROUNDING = 1e-12
DETECTED = 0.05  # total variation distance; the mistakes below reach 0.08 to 0.7
TARGET = toy(1, SIZE)
PROCESSOR = SAMPLERS[0]


def speculate(
    noise: Any,
    *,
    processor: LogitsProcessor = PROCESSOR,
    gamma: int = 3,
    rule: Any = RULES["rejection"],
    kind: type[ModelDrafter] = ModelDrafter,
) -> Iterator[Step]:
    """A run with a drafter that ranks the tokens in the reverse order of the target."""
    plan = decoding(LENGTH, processor=processor, noise=noise)
    drafter = kind(session(opposed(TARGET)), plan, SIZE)
    return speculative_steps([START], drafter, session(TARGET), plan, gamma=gamma, rule=rule)


def assist(
    noise: Any, *, processor: LogitsProcessor, target: ToyModel = TARGET, rule: Any = RULES["rejection"]
) -> Iterator[Step]:
    """An n-gram assisted run. After contexts that are not in the storage drafts are random."""
    plan = decoding(LENGTH, processor=processor, noise=noise)
    drafter = NGramDrafter(NGramStorage(3, target.config.vocab_size), plan.noise, stop_if_unknown=False)
    return speculative_steps(PROMPT, drafter, session(target), plan, gamma=3, rule=rule)


def error(
    run: Callable[[Any], Iterator[Step]], processor: LogitsProcessor = PROCESSOR, noise: type[Branching] = Branching
) -> float:
    """Total variation distance of the run's texts from the target's joint distribution of LENGTH tokens."""
    return distance(text_probs(run, noise), joint_probs(TARGET, processor, START, LENGTH))


@pytest.mark.parametrize("processor", SAMPLERS, ids=str)
def test_autoregressive_decoding_follows_the_distribution(processor: LogitsProcessor) -> None:
    def run(noise: Any) -> Iterator[Step]:
        return autoregressive_steps([START], session(TARGET), decoding(LENGTH, processor=processor, noise=noise))

    assert error(run, processor) < ROUNDING


@pytest.mark.parametrize(
    ("processor", "rule", "gamma"),
    [
        *((processor, "rejection", 3) for processor in (PROCESSOR, *SAMPLERS[2:4])),
        *(pytest.param(processor, "rejection", 3, marks=pytest.mark.full) for processor in SAMPLERS[1::3]),
        (PROCESSOR, "rejection", 1),
        (PROCESSOR, "block", 3),
        pytest.param(SAMPLERS[-1], "block", 3, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_speculative_decoding_follows_the_targets_distribution_with_an_opposed_drafter(
    processor: LogitsProcessor, rule: str, gamma: int
) -> None:
    assert error(partial(speculate, processor=processor, gamma=gamma, rule=RULES[rule]), processor) < ROUNDING


@pytest.mark.parametrize("processor", SAMPLERS, ids=str)
def test_ngram_assisted_decoding_follows_the_targets_distribution(processor: LogitsProcessor) -> None:
    assert error(partial(assist, processor=processor), processor) < ROUNDING


@pytest.mark.parametrize("processor", SAMPLERS, ids=str)
def test_ngram_assisted_text_is_the_autoregressive_text_for_every_seed(processor: LogitsProcessor) -> None:
    target = toy(3, 6)
    for seed in range(20):
        expected = autoregressive_steps([START], session(target), decoding(LENGTH, processor=processor, seed=seed))
        assert tokens_of(assist(Noise(seed), processor=processor, target=target)) == tokens_of(expected)


@pytest.mark.parametrize("size", [pytest.param(6, marks=pytest.mark.full), 4])
def test_cached_runs_with_a_larger_or_smaller_drafter_vocabulary_follow_the_distribution(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library function with a tiny Llama of 5 tokens: every path of two tokens."""
    target, drafter, processor = (
        tiny_llama(seed=0, vocab_size=5),
        tiny_llama(seed=1, vocab_size=size),
        MultinomialProcessor(2.0),
    )
    prompt = [3, 1, 2]
    with torch.no_grad():
        first = processor(target(torch.tensor([prompt])).logits[0, -1:])[0]
        second = processor(target(torch.tensor([[*prompt, token] for token in range(5)])).logits[:, -1])
    expected = {(a, b): float(first[a] * second[a, b]) for a in range(5) for b in range(5)}

    def walk(noise: Branching) -> tuple[int, ...]:
        monkeypatch.setattr("utils.decode.decoding.Noise", lambda seed: noise)
        return tuple(
            speculative_generate(prompt, drafter, target, None, 2, processor, 2, -1, first_target=False, seed=0)[0]
        )

    assert distance(outcome_probs(walk), expected) < 1e-5  # of logits in float32


def double_draw(probs: torch.Tensor, draft: Draft, noise: Noise, *, start: int) -> tuple[int, int]:
    """The original NASD: sample, compare, and sample again if the draft differs."""
    for index, drafted in enumerate(draft.tokens):
        if noise.sample(probs[index], start + index) != drafted:
            return index, noise.pick(probs[index], Domain.RESIDUAL, start + index, start)
    return len(draft.tokens), noise.sample(probs[-1], start + len(draft.tokens))


def shared_noise(probs: torch.Tensor, draft: Draft, noise: Noise, *, start: int) -> tuple[int, int]:
    """Rejection with the uniform number that also drew the draft."""
    for index, token in enumerate(draft.tokens):
        assert draft.probs is not None
        p, q = float(probs[index, token]), float(draft.probs[index, token])
        if noise.uniform(Domain.DRAFT, start + index, start) * q >= p:
            residual = (probs[index] - draft.probs[index]).clamp(min=0)
            return index, noise.pick(residual, Domain.RESIDUAL, start + index, start)
    return len(draft.tokens), noise.sample(probs[-1], start + len(draft.tokens))


def never_reject(probs: torch.Tensor, draft: Draft, noise: Noise, *, start: int) -> tuple[int, int]:
    """Every draft is accepted."""
    return len(draft.tokens), noise.sample(probs[-1], start + len(draft.tokens))


MISTAKES = [
    pytest.param(choose_rule("rejection", adjust=False), id="corrected_from_p"),
    pytest.param(never_reject, id="never_reject"),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_rejection_rule_are_detected(mistake: Any) -> None:
    assert error(partial(speculate, gamma=1, rule=mistake)) > DETECTED


def test_noise_that_is_used_twice_is_detected() -> None:
    """By its effect on the distribution, and by the enumeration itself."""
    run = partial(speculate, gamma=1, rule=shared_noise)
    assert error(run, noise=Reusing) > DETECTED
    with pytest.raises(AssertionError, match="used twice"):
        error(run)


def test_drawing_twice_in_ngram_assisted_decoding_is_detected() -> None:
    processor = SAMPLERS[2]
    assert error(partial(assist, processor=processor, rule=double_draw), processor) > DETECTED


class RawDrafter(ModelDrafter):
    """Draws from the processed distribution, but reports the unprocessed softmax."""

    def propose(self, context: list[int], count: int) -> Draft:
        draft = super().propose(context, count)
        if not draft.tokens:
            return draft
        logits = opposed(TARGET).table[[context[-1], *draft.tokens[:-1]]]
        return Draft(draft.tokens, torch.softmax(logits.double(), dim=-1))


def test_an_unprocessed_q_against_a_processed_p_is_detected() -> None:
    processor = TopKProcessor(0.5, 3)
    run = partial(speculate, processor=processor, gamma=1)
    assert error(run, processor) < ROUNDING
    assert error(partial(run, kind=RawDrafter), processor) > DETECTED


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_tokens_drawn_from_p_use_the_targets_noise(rule: Rule) -> None:
    """Bonus tokens, and tokens of rounds without drafts, are those of autoregressive decoding after the same text."""
    p = torch.softmax(toy(1, 6).table.double(), dim=-1)
    for seed in range(60):
        noise = Noise(seed)
        drafted = [noise.pick(p[row], Domain.DRAFT, 5 + row, 5) for row in range(3)]
        assert rule(p[:4], Draft([]), noise, start=5) == (0, noise.sample(p[0], 5))
        accepted, token = rule(p[:4], Draft(drafted, p[:3]), noise, start=5)  # p = q: all drafts are accepted
        assert accepted == 3 or rule.shares_noise
        assert token == noise.sample(p[accepted], 5 + accepted)


def test_a_run_without_adjustment_is_reproducible() -> None:
    rule = choose_rule("rejection", adjust=False)
    runs = [tokens_of(speculate(Noise(7), gamma=2, rule=rule)) for _ in range(2)]
    assert runs[0] == runs[1]


def test_the_drafter_receives_every_round() -> None:
    """The calls of `commit` cover the whole text."""
    seen: list[tuple[int, int]] = []

    class Recorder(NGramDrafter):
        def commit(self, context: list[int], verified: Verified) -> None:
            seen.append((verified.start, len(context)))
            assert verified.logits.shape == verified.probs.shape
            super().commit(context, verified)

    target, plan = toy(3, 6), decoding(12)
    list(speculative_steps([START], Recorder(NGramStorage(2, 6), plan.noise), session(target), plan, gamma=3))
    assert seen[0][0] == 1 and seen[-1][1] == 13
    assert all(after == before for (_, after), (before, _) in pairwise(seen))
