"""A drafter that makes no drafts computes nothing. When it begins, it reads the whole text at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny import tiny_head, tiny_llama
from toys import decoding

from sampling import (
    RULES,
    AdaptiveGamma,
    HeadDrafter,
    HeadSession,
    ModelDrafter,
    autoregressive_steps,
    speculative_steps,
)
from sampling.drafters.adaptive_gamma import Bucket
from sampling.drafters.cross_tokenizer import CrossTokenizerDrafter
from utils.decode.decoding import Decoding
from utils.decode.model_session import ModelSession
from utils.decode.steps import Step
from utils.logits_processor import MultinomialProcessor
from utils.metrics.costs import Costs
from utils.metrics.results import tokens_of

SIZE, TOKENS, LATER = 8, 24, 6
PROMPT = [3, 1, 4, 1, 5] * 8
CHEAP, DEAR = ({"drafter": cost} for cost in (0.0, 1000.0))  # reading 1,000 tokens


class Later(AdaptiveGamma):
    """Begins to draft after a few rounds."""

    rounds = 0

    def follow(self, context: Sequence[int]) -> None:
        super().follow(context)
        self.rounds += 1

    def continues(self, buckets: list[Bucket]) -> bool:
        return self.rounds > LATER and len(buckets) < 3

    def proposes(self, buckets: list[Bucket]) -> bool:
        return True


def gamma_of(kind: type[AdaptiveGamma], read: dict[str, float]) -> AdaptiveGamma:
    return kind(Costs.of([0.05] * 8, {"drafter": 0.05}, read), kind="drafter", max_new=TOKENS)


def parts(
    kind: str, adaptive: AdaptiveGamma, plan: Decoding, read: list[int]
) -> tuple[Any, ModelSession, ModelSession]:
    """A drafter that notes how many tokens each of its passes reads, and sessions of its target: one for it, and one
    that decodes alone.
    """
    target = tiny_llama(vocab_size=SIZE)
    alone = ModelSession(target, rewinds=False)
    if kind == "model":
        session = ModelSession(other := tiny_llama(1, vocab_size=SIZE))
        other.register_forward_pre_hook(
            lambda _, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        drafter = ModelDrafter(session, plan, SIZE, shares_noise=True, adaptive=adaptive)
        return drafter, ModelSession(target), alone
    model = tiny_head(target, vocabulary=range(SIZE))
    compute = model.next_states

    def noted(states: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        read.append(states.shape[1])
        return compute(states, *others, **options)

    model.next_states = noted  # type: ignore[method-assign]
    session = ModelSession(target, features=model.feature_layers)
    not_needed = session.keep_no_features
    head = HeadDrafter(HeadSession(model), plan, SIZE, shares_noise=True, adaptive=adaptive, not_needed=not_needed)
    return head, session, alone


def run(kind: str, adaptive: AdaptiveGamma) -> tuple[list[Step], list[int]]:
    """The rounds, and how many tokens each pass of the drafter has read."""
    plan, read = decoding(TOKENS, processor=MultinomialProcessor(1.0), seed=4), list[int]()
    drafter, target, alone = parts(kind, adaptive, plan, read)
    steps = list(speculative_steps(PROMPT, drafter, target, plan, gamma=6, rule=RULES["coupled"]))
    assert tokens_of(steps) == tokens_of(autoregressive_steps(PROMPT, alone, plan))
    return steps, read


@pytest.mark.parametrize("kind", ["model", "head"])
def test_where_reading_does_not_pay_the_drafter_never_runs(kind: str) -> None:
    steps, read = run(kind, gamma_of(AdaptiveGamma, DEAR))
    assert len(steps) == TOKENS and not read
    steps, read = run(kind, gamma_of(AdaptiveGamma, CHEAP))
    assert any(step.drafted for step in steps) and read[0] >= len(PROMPT) - 1


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_drafter_that_begins_later_reads_everything_at_once(kind: str) -> None:
    steps, read = run(kind, gamma_of(Later, CHEAP))
    rounds = [bool(step.drafted) for step in steps]
    first = rounds.index(True)
    made = sum(len(step.tokens) for step in steps[:first])
    # An entry of a head needs the token after it.
    assert first >= LATER - 2 and read[0] == len(PROMPT) + made - (kind == "head")
    assert all(rounds[first:-1]) and max(read[1:]) <= 4 and sum(step.accepted for step in steps)


@pytest.mark.parametrize(("read", "kept"), [(CHEAP, True), (DEAR, False)])
def test_the_target_keeps_hidden_states_only_for_a_head_that_may_draft(read: dict[str, float], kept: bool) -> None:
    plan = decoding(TOKENS, seed=4)
    drafter, target, _ = parts("head", gamma_of(AdaptiveGamma, read), plan, [])
    asked: list[bool] = []
    target.model.register_forward_pre_hook(
        lambda _, args, kwargs: asked.append(bool(kwargs.get("output_hidden_states"))), with_kwargs=True
    )
    list(speculative_steps(PROMPT, drafter, target, plan, gamma=6, rule=RULES["coupled"]))
    assert set(asked) == {kept}


@pytest.mark.parametrize(
    ("draft", "longer", "never"), [(0.05, 0.05, False), (2.0, 2.0, True), (2.0, 0.05, False), (0.05, 2.0, False)]
)
def test_a_drafter_rests_if_its_first_draft_pays_at_neither_end_of_the_run(
    draft: float, longer: float, never: bool
) -> None:
    after = Costs.of([0.05] * 8, {"drafter": longer}, length=len(PROMPT) + TOKENS)
    costs = Costs.of([0.05] * 8, {"drafter": draft}, CHEAP, length=len(PROMPT), longer=after)
    adaptive = AdaptiveGamma(costs, kind="drafter", max_new=TOKENS)
    adaptive.begin(PROMPT, PROMPT)
    assert adaptive.never_drafts is never and adaptive.continues([]) is (draft < 1)
    adaptive.learn([("position", 0)], 1)
    assert not adaptive.never_drafts, "there is evidence"


@pytest.mark.parametrize(("cost", "never"), [(250.0, False), (1000.0, True)])
def test_another_drafter_may_pay_for_reading_that_takes_less_than_the_longest_run(cost: float, never: bool) -> None:
    costs = Costs.of([0.05], {}, {"drafter": cost})
    adaptive = AdaptiveGamma(costs, kind="drafter", max_new=TOKENS)
    AdaptiveGamma(costs, rival=adaptive)
    adaptive.begin(PROMPT, PROMPT)
    assert adaptive.never_drafts is never and not adaptive.continues([])
    adaptive._throughput.gain = 1000.0
    assert adaptive.continues([]) is not never


def test_a_waiting_head_copies_no_features() -> None:
    session = HeadSession(tiny_head(tiny_llama(vocab_size=SIZE)))
    session.begin(PROMPT)
    parts = [torch.randn(count, 64) for count in (40, 1, 1)]
    for known, part in zip((40, 41, 42), parts, strict=True):
        session.add_features(part, known - len(part), known)
    kept = [part.data_ptr() for part in session._waiting]
    assert kept == [part.data_ptr() for part in parts]


def test_a_drafter_with_a_different_tokenizer_does_not_translate_in_vain() -> None:
    class Untouched:
        end_ids = frozenset[int]()

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    plan, model = decoding(8, seed=1), tiny_llama(vocab_size=SIZE)
    adaptive = gamma_of(AdaptiveGamma, DEAR)
    retokenizer: Any = Untouched()
    drafter = CrossTokenizerDrafter(lambda: ModelSession(model), retokenizer, SIZE, adaptive=adaptive)
    steps = list(speculative_steps(PROMPT, drafter, ModelSession(model), plan, gamma=4))
    assert not any(step.drafted for step in steps)
