"""The same seed gives the same text: with greedy decoding and `coupled` no drafter changes the autoregressive text,
and n-gram drafters do not change it with any rule.

Token lists are compared, not distributions. The toy models are tables, so rounding plays no part. The last tests use
tiny random models.
"""

from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from samplers import PROCESSORS
from tiny import SHALLOW, tiny_llama
from toys import ToyModel, decoding, opposed, session, toy

from ngram_assisted import NGramDrafter, NGramStorage, ngram_assisted_speculative_generate
from sampling import (
    RULES,
    Draft,
    Drafter,
    ModelDrafter,
    Rule,
    Verified,
    autoregressive_generate,
    autoregressive_steps,
    speculative_generate,
    speculative_steps,
)
from utils.decode.decoding import Decoding
from utils.decode.noise import Domain, Noise
from utils.errors import UserError
from utils.logits_processor import (
    LogitsProcessor,
)
from utils.metrics.results import acceptance_of, tokens_of

SIZE, LENGTH, PROMPT = 8, 12, [3, 0, 1, 3, 0]
GAMMAS = (0, 1, 3, 8)


class Adaptive(ModelDrafter):
    """Drafts one more token after a round in which all were accepted, and two less after a rejected one."""

    allowed = 1

    def propose(self, context: list[int], count: int) -> Draft:
        draft = super().propose(context, min(count, self.allowed))
        self._end = len(context) + len(draft.tokens)
        return draft

    def commit(self, context: list[int], verified: Verified) -> None:
        self.allowed = self.allowed + 1 if len(context) > self._end else max(1, self.allowed - 2)
        super().commit(context, verified)


class Guessing:
    """Drafts random tokens, and reports the uniform distribution they are drawn from."""

    def __init__(self, decoding: Decoding) -> None:
        self._noise = Noise(decoding.noise.seed + 1)

    def begin(self, prompt: list[int], context: list[int]) -> None:
        """Nothing to prepare."""

    def propose(self, context: list[int], count: int) -> Draft:
        position = len(context)
        tokens = [int(self._noise.uniform(Domain.FILL, position, index) * SIZE) for index in range(count)]
        return Draft(tokens, torch.full((count, SIZE), 1 / SIZE, dtype=torch.float64) if count else None)

    def commit(self, context: list[int], verified: Verified) -> None:
        """Nothing to learn."""


def model_drafter(model: ToyModel, plan: Decoding, rule: Rule, kind: type[ModelDrafter] = ModelDrafter) -> ModelDrafter:
    return kind(session(model), plan, SIZE, shares_noise=rule.shares_noise)


DRAFTERS: dict[str, Callable[[ToyModel, Decoding, Rule], Drafter]] = {
    "the target itself": model_drafter,
    "always wrong": lambda target, plan, rule: model_drafter(opposed(target), plan, rule),
    "random": lambda target, plan, rule: Guessing(plan),
    "n-gram": lambda target, plan, rule: NGramDrafter(NGramStorage(3, SIZE), plan.noise),
    "adaptive": lambda target, plan, rule: model_drafter(toy(5, SIZE), plan, rule, Adaptive),
}
COUPLED = RULES["coupled"]


def autoregressive(target: ToyModel, plan: Decoding) -> list[int]:
    return tokens_of(autoregressive_steps(PROMPT, session(target), plan))


@cache
def expected_text(processor: LogitsProcessor, seed: int = 0) -> list[int]:
    return autoregressive(toy(9, SIZE), decoding(LENGTH, processor=processor, seed=seed))


@pytest.mark.parametrize("processor", PROCESSORS, ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_coupled_text_is_the_autoregressive_text_for_every_drafter_and_gamma(
    name: str, processor: LogitsProcessor
) -> None:
    target = toy(9, SIZE)
    for gamma in GAMMAS:
        seed = gamma % 2
        plan = decoding(LENGTH, processor=processor, seed=seed)
        steps = list(
            speculative_steps(
                PROMPT, DRAFTERS[name](target, plan, COUPLED), session(target), plan, gamma=gamma, rule=COUPLED
            )
        )
        assert tokens_of(steps) == expected_text(processor, seed), (seed, gamma)
        if name == "the target itself":
            assert acceptance_of(steps) in (1.0, None)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("processor", PROCESSORS, ids=str)
def test_ngram_assisted_text_is_the_autoregressive_text_with_every_rule(processor: LogitsProcessor, rule: Rule) -> None:
    target = toy(9, SIZE)
    for gamma in GAMMAS:
        seed = gamma % 2
        plan = decoding(LENGTH, processor=processor, seed=seed)
        drafter = NGramDrafter(NGramStorage(3, SIZE), plan.noise, stop_if_unknown=bool(seed % 2))
        steps = speculative_steps(PROMPT, drafter, session(target), plan, gamma=gamma, rule=rule)
        assert tokens_of(steps) == expected_text(processor, seed), (seed, gamma)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_the_autoregressive_text_with_every_rule(name: str, rule: Rule) -> None:
    target = toy(9, SIZE)
    plan = decoding(LENGTH, processor=PROCESSORS[0])
    for gamma in GAMMAS:
        made = tokens_of(
            speculative_steps(PROMPT, DRAFTERS[name](target, plan, rule), session(target), plan, gamma=gamma, rule=rule)
        )
        assert made == expected_text(PROCESSORS[0]), gamma


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_target_as_its_own_drafter_is_always_accepted_but_gives_a_different_text(rule: str) -> None:
    """p/q = 1 accepts every draft, but drafts are drawn with different noise, so the texts differ."""
    target, texts = toy(9, SIZE), 0
    for seed in range(20):
        plan = decoding(LENGTH, seed=seed)
        steps = list(
            speculative_steps(
                PROMPT, ModelDrafter(session(target), plan, SIZE), session(target), plan, gamma=3, rule=RULES[rule]
            )
        )
        assert acceptance_of(steps) == 1.0
        texts += tokens_of(steps) == autoregressive(target, plan)
    assert texts < 5


def test_drafts_that_share_the_noise_have_no_probs() -> None:
    """Accepting them by p/q would be biased. Without probs every rule is exact for them."""
    target, plan = toy(9, SIZE), decoding(LENGTH)
    drafter = model_drafter(toy(5, SIZE), plan, COUPLED)
    drafter.begin(PROMPT, PROMPT)
    assert drafter.propose(PROMPT, 3).probs is None
    for rule in RULES.values():
        made = tokens_of(
            speculative_steps(
                PROMPT, model_drafter(toy(5, SIZE), plan, COUPLED), session(target), plan, gamma=3, rule=rule
            )
        )
        assert made == autoregressive(target, plan)


def test_noise_that_is_drawn_in_sequence_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake: numbers that depend on how many were drawn before."""
    philox = np.random.Philox

    def start_sequence() -> None:
        generator = philox(1)
        monkeypatch.setattr(np.random, "Philox", lambda **key: generator)

    target, plan = toy(9, SIZE), decoding(LENGTH)
    start_sequence()
    expected = autoregressive(target, plan)
    start_sequence()
    made = tokens_of(
        speculative_steps(
            PROMPT, model_drafter(toy(5, SIZE), plan, COUPLED), session(target), plan, gamma=3, rule=COUPLED
        )
    )
    assert made != expected


@pytest.mark.parametrize(
    ("p_seed", "q_seed"), [(0, 1), *(pytest.param(seed, seed + 1, marks=pytest.mark.full) for seed in (2, 4))]
)
def test_coupled_acceptance_has_its_closed_form(p_seed: int, q_seed: int) -> None:
    """Pr[match] = sum_j 1 / sum_i max(p_i/p_j, q_i/q_j) (Daliri, Musco and Suresh 2024), by 2,000 first drafts.

    A false alarm, 5 standard deviations or 0.056, has a probability below 1e-6. Drafts that do not share the noise
    are accepted with probability sum_i p_i q_i, which is lower by more than 0.09 here.
    """
    p, q = (torch.softmax(toy(seed, 6).table[0].double(), 0) for seed in (p_seed, q_seed))
    expected = sum(1 / sum(max(float(p[i] / p[j]), float(q[i] / q[j])) for i in range(6)) for j in range(6))
    trials = 2000
    accepted = sum(
        RULES["coupled"](torch.stack([p, p]), Draft([Noise(seed).sample(q, 0)]), Noise(seed), start=0)[0]
        for seed in range(trials)
    )
    assert abs(accepted / trials - expected) < 5 * (expected * (1 - expected) / trials) ** 0.5
    overlap = float(torch.minimum(p, q).sum())
    assert overlap / (2 - overlap) <= expected <= overlap  # the known bounds for shared noise


@pytest.mark.parametrize("kind", SHALLOW)
def test_the_library_functions_give_the_same_text_with_cached_models(kind: str) -> None:
    """Every processor meets two kinds of models."""
    target, drafter, prompt = SHALLOW[kind](seed=0), SHALLOW[kind](seed=1), [5, 9, 13, 9, 5]
    cases = ((1, True, "rejection"), (4, True, "coupled"), (7, False, "block"))
    for seed, processor in enumerate(PROCESSORS[1 + len(kind) % 2 :: 2], start=len(kind)):
        gamma, use_cache, rule = cases[seed % 3]
        expected = autoregressive_generate(prompt, target, 9, processor, -1, seed=seed)
        options = {"gamma": gamma, "logits_processor": processor, "max_gen_len": 9, "eos_tokens_id": -1, "seed": seed}
        options["use_cache"] = use_cache
        assert speculative_generate(prompt, drafter, target, **options, verify="coupled")[0] == expected
        storage = NGramStorage(2, 64)
        assert ngram_assisted_speculative_generate(prompt, storage, target, **options, verify=rule)[0] == expected


def test_the_name_of_the_rule_is_checked() -> None:
    model = tiny_llama()
    with pytest.raises(UserError, match="'exact'.*rejection, coupled, block"):
        speculative_generate([1], model, model, verify="exact")
    with pytest.raises(UserError, match="'rejecton'.*rejection\\?"):
        ngram_assisted_speculative_generate([1], NGramStorage(2, 64), model, verify="rejecton")
    for rule in ("coupled", "block"):
        with pytest.raises(UserError, match=f"skip_sample_adjustment.*'{rule}'"):
            speculative_generate([1], model, model, skip_sample_adjustment=True, verify=rule)


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if not rule.shares_noise], ids=lambda rule: rule.name)
def test_texts_are_as_diverse_as_autoregressive_ones(rule: Rule) -> None:
    """Distinct texts of many seeds against their expected number; off by 5 sigma with probability below 1e-6."""
    expected, deviation = diversity(PROCESSORS[2])
    assert abs(len(texts_of(rule, noise=Noise)) - expected) < 5 * deviation


def test_noise_that_the_drafts_of_a_round_share_reduces_diversity() -> None:
    class Shared(Noise):
        """Every draft of a round is drawn with the same noise."""

        __slots__ = ()

        def pick(self, weights: torch.Tensor, domain: Domain, position: int, start: int) -> int:
            return Noise.pick(self, weights, domain, start, start)

    expected, deviation = diversity(PROCESSORS[2])
    assert len(texts_of(RULES["rejection"], noise=Shared)) < expected - 5 * deviation


SHORT, TRIALS = 4, 250  # so few tokens that some texts occur more than once


def texts_of(rule: Rule, *, noise: type[Noise]) -> set[tuple[int, ...]]:
    target, drafter = toy(9, SIZE), toy(9, SIZE, spread=1.4)  # a drafter that is often accepted
    texts = set()
    for seed in range(TRIALS):
        plan = Decoding(PROCESSORS[2], SHORT, frozenset(), noise(seed))
        drafting = ModelDrafter(session(drafter), plan, SIZE, shares_noise=rule.shares_noise)
        texts.add(tuple(tokens_of(speculative_steps(PROMPT, drafting, session(target), plan, gamma=3, rule=rule))))
    return texts


@cache
def diversity(processor: LogitsProcessor) -> tuple[float, float]:
    """Expected number of distinct texts in independent draws from the target, and a bound on its standard deviation."""
    rows = processor(toy(9, SIZE).table).tolist()
    missing = []
    for text in product(range(SIZE), repeat=SHORT):
        probability = 1.0
        for before, token in zip((PROMPT[-1], *text), text, strict=False):
            probability *= rows[before][token]
        missing.append((1 - probability) ** TRIALS)
    return sum(1 - miss for miss in missing), sum(miss * (1 - miss) for miss in missing) ** 0.5
