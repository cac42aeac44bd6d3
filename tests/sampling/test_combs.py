"""Combs in the draft-verify loop: texts and distributions are the target's own, and leaves are accepted."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from exact import distance, text_probs
from tiny import tiny_head, tiny_llama
from toys import ToyModel, decoding, toy

from sampling import RULES, HeadDrafter, ModelDrafter, autoregressive_steps, speculative_steps
from sampling.combs import Comb, Place
from sampling.drafters.feature_sessions import feature_session
from utils.decode.model_session import ModelSession
from utils.decode.noise import Noise
from utils.decode.steps import Leaf, Step
from utils.engine import Engine
from utils.logits_processor import GreedyProcessor, LogitsProcessor, MultinomialProcessor, NucleusProcessor
from utils.metrics.costs import LEAF, Costs
from utils.metrics.results import acceptance_of, tokens_of

SIZE = 60
PROMPT = [5, 9, 2, 31, 7]
FLAT = Costs(verify=(0.01,) * 20)


class ToySession:
    """A toy model as a target that computes leaves. Its logits depend on the last token alone."""

    name, context_length = "toy", None

    def __init__(self, model: ToyModel) -> None:
        self._table, self.vocab_size = model.table, model.config.vocab_size

    def begin(self, prompt: list[int]) -> list[int]:
        return list(prompt)

    def room(self, context: list[int]) -> int | None:
        return None

    def feed(self, context: list[int], keep: int, leaves: Sequence[Leaf] = ()) -> torch.Tensor:
        return self._table[context[-keep:] + [leaf.token for leaf in leaves]]

    def rewind(self, length: int, leaf: int | None = None) -> None: ...

    def take_features(self) -> None: ...


def blurred(model: Any, amount: float = 0.02) -> Any:
    """A drafter that agrees with the target most of the time."""
    torch.manual_seed(3)
    drafter = tiny_llama(vocab_size=SIZE, seed=0)
    drafter.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += amount * torch.randn_like(weight)
    return drafter


def run(target: Any, drafter: Any, processor: LogitsProcessor, rule: str, **options: Any) -> list[Step]:
    """A run with combs of a drafter model. options: of the comb, and gamma."""
    gamma = options.pop("gamma", 4)
    plan, verify = decoding(40, processor=processor, seed=11), RULES[rule]
    session = ModelSession(target)
    comb = Comb(plan.noise, shares_noise=verify.shares_noise, **options)
    drafts = ModelDrafter(ModelSession(drafter), plan, SIZE, shares_noise=verify.shares_noise, comb=comb)
    return list(speculative_steps(PROMPT, drafts, session, plan, gamma=gamma, rule=verify))


@pytest.mark.parametrize("costs", [None, FLAT])
@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize(
    ("processor", "rule"),
    [
        (GreedyProcessor(), "rejection"),
        (GreedyProcessor(), "block"),
        (GreedyProcessor(), "coupled"),
        (MultinomialProcessor(1.0), "coupled"),
        (NucleusProcessor(0.8, 0.7), "coupled"),
    ],
)
def test_the_text_is_the_targets_own(processor: LogitsProcessor, rule: str, gamma: int, costs: Costs | None) -> None:
    target = tiny_llama(vocab_size=SIZE).double()
    steps = run(target, blurred(target).double(), processor, rule, gamma=gamma, costs=costs)
    own = list(autoregressive_steps(PROMPT, ModelSession(target), decoding(40, processor=processor, seed=11)))
    assert tokens_of(steps) == tokens_of(own)
    assert any(step.leaf is not None for step in steps)


def test_a_model_drafts_what_it_would_have_drafted_had_the_chain_been_right() -> None:
    """Its cache must not keep the draft that a leaf replaced."""
    target = tiny_llama(vocab_size=SIZE).double()
    drafter, processor = blurred(target).double(), MultinomialProcessor(1.0)
    combs = run(target, drafter, processor, "coupled", costs=FLAT)
    assert sum(step.leaf is not None for step in combs) > 2
    plan = decoding(40, processor=processor, seed=11)
    text = [*PROMPT, *tokens_of(combs)]
    for start, step in zip(starts(combs), combs, strict=True):
        fresh = ModelDrafter(ModelSession(drafter), plan, SIZE, shares_noise=True)
        fresh.begin(PROMPT, PROMPT)
        assert tuple(fresh.propose(text[: len(PROMPT) + start], len(step.drafted)).tokens) == step.drafted


def test_leaves_differ_from_each_other_and_from_the_drafts_that_they_could_replace() -> None:
    target = tiny_llama(vocab_size=SIZE)
    for rule in RULES:
        for step in run(target, blurred(target), MultinomialProcessor(1.0), rule, costs=FLAT):
            alternatives = [*enumerate(step.drafted), *step.leaves]
            assert len(set(alternatives)) == len(alternatives)


def test_a_leaf_that_is_an_end_token_ends_the_text() -> None:
    target = tiny_llama(vocab_size=SIZE).double()
    drafter, ended = blurred(target).double(), 0
    steps = run(target, drafter, GreedyProcessor(), "rejection", costs=FLAT)
    text = tokens_of(steps)
    for step in steps:
        if step.leaf is None or text.index(end := step.leaves[step.leaf].token) < starts(steps)[steps.index(step)]:
            continue
        plan = decoding(40, processor=GreedyProcessor(), ends=[end])
        comb = Comb(plan.noise, shares_noise=False, costs=FLAT)
        drafts = ModelDrafter(ModelSession(drafter), plan, SIZE, comb=comb)
        last = list(speculative_steps(PROMPT, drafts, ModelSession(target), plan, gamma=4))
        assert tokens_of(last) == text[: text.index(end) + 1] and last[-1].finish == "stop"
        ended += last[-1].leaf is not None and last[-1].token is None
    assert ended


def test_an_end_token_in_the_chain_ends_the_text() -> None:
    target, ended = tiny_llama(vocab_size=SIZE).double(), 0
    drafter = blurred(target).double()
    steps = run(target, drafter, GreedyProcessor(), "rejection", costs=FLAT)
    text = tokens_of(steps)
    for end in {token for step in steps for token in step.drafted[: step.accepted]}:
        plan = decoding(40, processor=GreedyProcessor(), ends=[end])
        comb = Comb(plan.noise, shares_noise=False, costs=FLAT)
        drafts = ModelDrafter(ModelSession(drafter), plan, SIZE, comb=comb)
        last = list(speculative_steps(PROMPT, drafts, ModelSession(target), plan, gamma=4))
        assert tokens_of(last) == text[: text.index(end) + 1]
        ended += last[-1].token is None and last[-1].leaf is None and bool(last[-1].leaves)
    assert ended


def test_a_head_continues_from_the_features_of_an_accepted_leaf() -> None:
    """With equal bits at all widths, its drafts after a leaf are those of a run whose chain had been right."""
    target = tiny_llama(vocab_size=SIZE)
    assert Engine([target]).use("invariant", 1).verified
    head, plan = tiny_head(target), decoding(60, processor=MultinomialProcessor(0.7), seed=2)

    def steps(comb: Comb | None) -> list[Step]:
        session = ModelSession(target, features=head.feature_layers)
        drafter = HeadDrafter(feature_session(head), plan, SIZE, shares_noise=True, comb=comb)
        return list(speculative_steps(PROMPT, drafter, session, plan, gamma=2, rule=RULES["coupled"]))

    chains, combs = steps(None), steps(Comb(plan.noise, shares_noise=True, costs=FLAT))
    assert tokens_of(combs) == tokens_of(chains) and sum(step.leaf is not None for step in combs) > 2
    # Drafts depend on the text before them alone, so a round that begins at the same place has the same chain.
    first = dict(zip(starts(chains), (step.drafted for step in chains), strict=True))
    shared = [(first[start], step.drafted) for start, step in zip(starts(combs), combs, strict=True) if start in first]
    assert len(shared) > 10 and all(one == other for one, other in shared)


def starts(steps: list[Step]) -> list[int]:
    counts = [0]
    for step in steps[:-1]:
        counts.append(counts[-1] + len(step.tokens))
    return counts


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("costs", [None, FLAT])
@pytest.mark.parametrize("seed", range(3))
def test_the_distribution_of_whole_runs_is_the_targets(rule: str, costs: Costs | None, seed: int) -> None:
    target, drafter = toy(seed, size=3), toy(50 + seed, size=3)
    accepted: list[int] = []

    def decode(noise: Any) -> list[Step]:
        plan = decoding(3, processor=MultinomialProcessor(1.0), noise=noise)
        comb = Comb(noise, shares_noise=False, costs=costs)
        drafts = ModelDrafter(ModelSession(drafter, use_cache=False), plan, 3, comb=comb)
        steps = list(speculative_steps([1], drafts, ToySession(target), plan, gamma=2, rule=RULES[rule]))
        accepted.append(sum(step.leaf is not None for step in steps))
        return steps

    def alone(noise: Any) -> list[Step]:
        plan = decoding(3, processor=MultinomialProcessor(1.0), noise=noise)
        return list(autoregressive_steps([1], ModelSession(target, use_cache=False), plan))

    assert distance(text_probs(decode), text_probs(alone)) < 1e-6
    assert sum(accepted)


def test_leaves_count_as_drafts() -> None:
    step = Step((4, 5, 6), 1, 9, leaves=(Leaf(0, 3), Leaf(1, 8)), leaf=1)
    assert step.tokens == (4, 8, 9) and step.is_bonus
    assert (step.all_accepted, step.all_drafted) == (2, 5) and acceptance_of([step]) == 0.4


def places(*confident: float) -> list[Place]:
    """A chain of drafts whose runners-up have these probabilities."""
    return [Place(0, ("confidence", 6), torch.ones(9) / 9, torch.zeros(9), (value, value / 2)) for value in confident]


def test_leaves_are_chosen_by_what_they_cost() -> None:
    def chosen(costs: Costs, *values: float) -> list[int]:
        comb = Comb(Noise(1), shares_noise=False, costs=costs)
        return [leaf.place for leaf in comb.leaves(places(*values), 0)]

    assert chosen(Costs(verify=(0.0,) * 9), 0.4, 0.01) == [0, 0, 1, 1]
    assert chosen(Costs(verify=tuple(0.2 * k for k in range(1, 9))), 0.4, 0.01, 0.4) == [0, 2]
    assert chosen(Costs(verify=(0.0,) * 9, draft=((LEAF, 0.5),)), 0.4, 0.4) == []
    # A jump of costs is worth it only for several leaves at once.
    assert chosen(Costs(verify=(0.0, 0.0, 0.6, 0.6, 0.6, 0.6)), 0.4, 0.01) == []
    assert chosen(Costs(verify=(0.0, 0.0, 0.6, 0.6, 0.6, 0.6)), 0.4, 0.4) == [0, 0, 1, 1]


def test_leaves_that_are_never_accepted_are_given_up() -> None:
    comb = Comb(Noise(1), shares_noise=False, costs=Costs(verify=tuple(0.1 * k for k in range(1, 9))))
    for _ in range(40):
        chain = places(0.3)
        comb.learn(chain, comb.leaves(chain, 0), [7], computed=1)
    assert comb.leaves(places(0.3), 0) == ()


def test_leaves_that_are_accepted_are_proposed_again() -> None:
    comb = Comb(Noise(1), shares_noise=False, costs=Costs(verify=tuple(0.3 * k for k in range(1, 9))))
    chain, leaves = places(0.2), (Leaf(0, 7),)
    assert comb.leaves(chain, 0) == ()
    for _ in range(10):
        comb.learn(chain, leaves, [7, 3], computed=1)
    assert len(comb.leaves(chain, 0)) == 1
