"""Sampled text follows the target's law exactly, whatever drafts; and each known mistake is seen to break that.

Statistics: 4 or 5 tokens, joint law of the first three, 3,000 runs; a correct decoder fails one of these tests with probability under
1e-5 (the seeds are fixed, so in fact always or never).
"""

from functools import partial
from itertools import pairwise

import pytest
import torch
from tiny import tiny_llama
from toys import ToyModel, chi_square, decoding, joint_probs, opposed, session, toy

from ngram_assisted import NGramDrafter, NGramStorage
from sampling import (
    RULES,
    ModelDrafter,
    Rule,
    Verified,
    autoregressive_steps,
    choose_rule,
    speculative_generate,
    speculative_steps,
)
from utils.decode.drafts import Draft
from utils.decode.noise import Domain, Noise
from utils.logits_processor import (
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)
from utils.metrics.results import tokens_of

TRIALS, LENGTH, START = 3000, 3, 0
PROMPT = [0, 1, START]  # an n-gram storage drafts 1 first, the same draft in every run
SAMPLERS: list[LogitsProcessor] = [
    MultinomialProcessor(1.0),
    MultinomialProcessor(0.7),
    TopKProcessor(1.0, 3),
    NucleusProcessor(1.0, 0.9),
    TopKNucleusProcessor(1.2, 4, 0.95),
]


def speculate(
    target: ToyModel, drafter: ToyModel, seed: int, *, processor: LogitsProcessor, gamma: int, rule=RULES["rejection"]
) -> tuple[int, ...]:
    plan = decoding(LENGTH, processor=processor, seed=seed)
    drafting = ModelDrafter(session(drafter), plan, target.config.vocab_size)
    return tuple(tokens_of(speculative_steps([START], drafting, session(target), plan, gamma=gamma, rule=rule)))


def assist(target: ToyModel, seed: int, *, processor: LogitsProcessor, rule=RULES["rejection"]) -> tuple[int, ...]:
    plan = decoding(LENGTH, processor=processor, seed=seed)
    drafting = NGramDrafter(NGramStorage(3, target.config.vocab_size), plan.noise, stop_if_unknown=False)
    return tuple(tokens_of(speculative_steps(PROMPT, drafting, session(target), plan, gamma=3, rule=rule)))


@pytest.mark.parametrize("processor", SAMPLERS, ids=str)
def test_plain_decoding_follows_the_law(processor: LogitsProcessor) -> None:
    target = toy(1, 5)

    def sample(seed: int) -> tuple[int, ...]:
        return tuple(
            tokens_of(autoregressive_steps([START], session(target), decoding(LENGTH, processor=processor, seed=seed)))
        )

    statistic, threshold = chi_square(sample, joint_probs(target, processor, START, LENGTH), TRIALS)
    assert statistic < threshold


@pytest.mark.parametrize(
    ("processor", "gamma"), [*((processor, 3) for processor in SAMPLERS), (SAMPLERS[0], 1)], ids=str
)
def test_speculative_decoding_follows_the_targets_law_with_an_opposed_drafter(
    processor: LogitsProcessor, gamma: int
) -> None:
    target = toy(1, 5)
    sample = partial(speculate, target, opposed(target), processor=processor, gamma=gamma)
    statistic, threshold = chi_square(sample, joint_probs(target, processor, START, LENGTH), TRIALS)
    assert statistic < threshold


@pytest.mark.parametrize("processor", SAMPLERS, ids=str)
def test_ngram_assisted_decoding_follows_the_targets_law(processor: LogitsProcessor) -> None:
    target = toy(2, 4)
    sample = partial(assist, target, processor=processor)
    statistic, threshold = chi_square(sample, joint_probs(target, processor, START, LENGTH), TRIALS)
    assert statistic < threshold


@pytest.mark.parametrize("processor", SAMPLERS, ids=str)
def test_ngram_assisted_text_is_plain_text_at_every_seed(processor: LogitsProcessor) -> None:
    target = toy(3, 6)
    for seed in range(60):
        plain = tokens_of(
            autoregressive_steps([START], session(target), decoding(LENGTH, processor=processor, seed=seed))
        )
        assert list(assist(target, seed, processor=processor)) == plain


@pytest.mark.parametrize("size", [9, 7])
def test_cached_runs_with_a_drafter_of_another_vocabulary_follow_the_law(size: int) -> None:
    """The library's own path on a tiny Llama of 8 tokens, the drafter's vocabulary padded or short: joint law of the first two tokens."""
    target, drafter, processor = (
        tiny_llama(seed=0, vocab_size=8),
        tiny_llama(seed=1, vocab_size=size),
        MultinomialProcessor(2.0),
    )
    prompt = [3, 1, 5]
    with torch.no_grad():
        first = processor(target(torch.tensor([prompt])).logits[0, -1:])[0]
        second = processor(target(torch.tensor([[*prompt, token] for token in range(8)])).logits[:, -1])
    probs = {(a, b): float(first[a] * second[a, b]) for a in range(8) for b in range(8)}

    def sample(seed: int) -> tuple[int, ...]:
        made, _ = speculative_generate(
            prompt, drafter, target, None, 2, processor, 3, -1, first_target=False, seed=seed
        )
        return tuple(made[:2])

    statistic, threshold = chi_square(sample, probs, 800)
    assert statistic < threshold


def double_draw(probs: torch.Tensor, draft: Draft, noise: Noise, *, start: int) -> tuple[int, int]:
    """The original's NASD: sample, compare, and on a mismatch sample again."""
    for index, wanted in enumerate(draft.tokens):
        if noise.sample(probs[index], start + index) != wanted:
            return index, noise.pick(probs[index], Domain.RESIDUAL, start + index, start)
    return len(draft.tokens), noise.sample(probs[-1], start + len(draft.tokens))


def shared_noise(probs: torch.Tensor, draft: Draft, noise: Noise, *, start: int) -> tuple[int, int]:
    """p/q with the uniform that also drew the draft."""
    for index, token in enumerate(draft.tokens):
        assert draft.probs is not None
        if noise.uniform(Domain.DRAFT, start + index, start) * draft.probs[index, token] >= probs[index, token]:
            residual = (probs[index] - draft.probs[index]).clamp(min=0)
            return index, noise.pick(residual, Domain.RESIDUAL, start + index, start)
    return len(draft.tokens), noise.sample(probs[-1], start + len(draft.tokens))


def bonus_from_q(probs: torch.Tensor, draft: Draft, noise: Noise, *, start: int) -> tuple[int, int]:
    """The bonus token drawn from the drafter's law of the last draft."""
    accepted, token = RULES["rejection"](probs, draft, noise, start=start)
    if accepted == len(draft.tokens) and draft.probs is not None and draft.tokens:
        return accepted, noise.pick(draft.probs[-1], Domain.RESIDUAL, start + accepted, start)
    return accepted, token


def never_reject(probs: torch.Tensor, draft: Draft, noise: Noise, *, start: int) -> tuple[int, int]:
    """Every draft stands."""
    return len(draft.tokens), noise.sample(probs[-1], start + len(draft.tokens))


MUTANTS = {"corrected_from_p": choose_rule("rejection", adjust=False)} | {
    rule.__name__: rule for rule in (shared_noise, bonus_from_q, never_reject)
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutants_of_the_rejection_rule_are_noticed(mutant) -> None:
    target, processor = toy(1, 5), MultinomialProcessor(1.0)
    sample = partial(speculate, target, opposed(target), processor=processor, gamma=2, rule=mutant)
    statistic, threshold = chi_square(sample, joint_probs(target, processor, START, LENGTH), TRIALS)
    assert statistic > threshold


def test_drawing_twice_in_ngram_assisted_decoding_is_noticed() -> None:
    target, processor = toy(2, 4), MultinomialProcessor(1.0)
    statistic, threshold = chi_square(
        partial(assist, target, processor=processor, rule=double_draw),
        joint_probs(target, processor, START, LENGTH),
        TRIALS,
    )
    assert statistic > threshold


def test_raw_q_against_processed_p_is_noticed() -> None:
    class RawDrafter(ModelDrafter):
        """Draws from the processed law, but reports the raw softmax."""

        def propose(self, context: list[int], count: int) -> Draft:
            draft = super().propose(context, count)
            logits = drafter.table[[context[-1], *draft.tokens[:-1]]] if draft.tokens else torch.zeros(0, 5)
            return Draft(draft.tokens, torch.softmax(logits.double(), dim=-1)) if draft.tokens else draft

    target, processor = toy(1, 5), TopKProcessor(0.5, 3)
    drafter = opposed(target)

    def sample(seed: int) -> tuple[int, ...]:
        plan = decoding(LENGTH, processor=processor, seed=seed)
        return tuple(
            tokens_of(speculative_steps([START], RawDrafter(session(drafter), plan, 5), session(target), plan, gamma=2))
        )

    statistic, threshold = chi_square(sample, joint_probs(target, processor, START, LENGTH), TRIALS)
    assert statistic > threshold


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_every_token_drawn_from_p_itself_is_drawn_with_the_targets_noise(rule: Rule) -> None:
    """Bonus tokens, and rounds without a draft: what the target alone would say behind the same text."""
    p = torch.softmax(toy(1, 6).table.double(), dim=-1)
    for seed in range(200):
        noise = Noise(seed)
        draft = Draft(
            [noise.pick(p[row], Domain.DRAFT, 5 + row, 5) for row in range(3)], p[:3]
        )  # p = q: all drafts stand
        assert rule(p[:4], Draft([]), noise, start=5) == (0, noise.sample(p[0], 5))
        accepted, token = rule(p[:4], draft, noise, start=5)
        assert accepted == 3 or rule.shares_noise
        assert token == noise.sample(p[accepted], 5 + accepted)


def test_an_unadjusted_run_is_still_reproducible() -> None:
    target = toy(1, 5)
    runs = [
        speculate(
            target, opposed(target), 7, processor=SAMPLERS[0], gamma=2, rule=choose_rule("rejection", adjust=False)
        )
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_acceptance_equals_one_minus_the_distance_of_the_laws() -> None:
    """alpha = sum min(p, q) (Leviathan et al. 2023, theorem 3.5); 20,000 first drafts, off by 5 sigma with probability under 1e-6."""
    p, q = (
        torch.softmax(torch.tensor([[2.0, 0.0, 1.0, -1.0]]).double(), -1),
        torch.softmax(torch.tensor([0.0, 1.5, 1.0, 0.5]).double(), -1),
    )
    probs, trials, accepted = torch.cat([p, p]), 20_000, 0
    for seed in range(trials):
        noise = Noise(seed)
        draft = Draft([noise.pick(q, Domain.DRAFT, 0, 0)], q[None])
        accepted += RULES["rejection"](probs, draft, noise, start=0)[0]
    alpha = float(torch.minimum(p[0], q).sum())
    assert abs(accepted / trials - alpha) < 5 * (alpha * (1 - alpha) / trials) ** 0.5


def test_the_drafter_is_told_every_round() -> None:
    """A drafter that records its commits sees the whole text, round by round."""
    seen: list[tuple[int, int]] = []

    class Witness(NGramDrafter):
        def commit(self, context: list[int], verified: Verified) -> None:
            seen.append((verified.start, len(context)))
            assert verified.logits.shape == verified.probs.shape
            super().commit(context, verified)

    target, plan = toy(3, 6), decoding(12)
    list(speculative_steps([START], Witness(NGramStorage(2, 6), plan.noise), session(target), plan, gamma=3))
    assert seen[0][0] == 1 and seen[-1][1] == 13
    assert all(after == before for (_, after), (before, _) in pairwise(seen))
