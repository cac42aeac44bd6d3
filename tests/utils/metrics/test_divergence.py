"""Why texts differ: sampling, a rounding tie or a bug, each on models made for it."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import open_session, records_of, screen
from shelf import load
from tiny import save_folder, tiny_llama, tiny_t5, tiny_tokenizer
from toys import ToyModel, decoding, opposed, session, toy

from sampling import RULES, ModelDrafter, autoregressive_steps, speculative_steps
from utils.decode.decoding import Decoding
from utils.decode.model_session import ModelSession
from utils.decode.noise import Noise
from utils.decode.steps import Step
from utils.logits_processor import (
    GreedyProcessor,
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKProcessor,
)
from utils.metrics.divergence import Cause, Divergence, DivergenceCase, _logits_of, explain
from utils.metrics.results import tokens_of


class WidthDependent(ToyModel):
    """A model whose logit of token 2 is higher if more than one position is computed."""

    def __init__(self, table: torch.Tensor, shift: float) -> None:
        super().__init__(table)
        self.shift = shift

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int = 0, **arguments: object) -> SimpleNamespace:
        output = super().forward(input_ids, logits_to_keep=logits_to_keep)
        logits = output.logits.clone()
        logits[..., 2] += self.shift * (logits_to_keep > 1)
        return SimpleNamespace(logits=logits)


def case(
    target: ToyModel,
    plan: Decoding,
    rounds: Iterable[Step],
    *,
    theirs: list[int] | None = None,
    own_noise: bool = False,
    coarse: bool = False,
) -> DivergenceCase:
    if theirs is None:
        theirs = tokens_of(autoregressive_steps([0], session(target), plan))
    return DivergenceCase(
        [0], tuple(rounds), theirs, partial(session, target), plan, width=4, own_noise=own_noise, coarse=coarse
    )


def speculate(target: ToyModel, drafter: ToyModel, plan: Decoding, rule: str) -> Iterable[Step]:
    drafting = ModelDrafter(session(drafter), plan, target.table.shape[-1], shares_noise=RULES[rule].shares_noise)
    return speculative_steps([0], drafting, session(target), plan, gamma=3, rule=RULES[rule])


def tied_table(gap: float) -> torch.Tensor:
    """After token 0 the target generates token 1, whose logit exceeds that of token 2 by a gap; otherwise token 3."""
    table = torch.zeros(4, 4)
    table[:, 3] = 9.0
    table[0] = torch.tensor([0.0, 5.0, 5.0 - gap, 0.0])
    return table


@pytest.mark.parametrize("rule", ["rejection", "coupled", "block"])
def test_a_greedy_tie_that_rounding_decides_is_a_rounding_tie(rule: str) -> None:
    target, plan = WidthDependent(tied_table(1e-5), 3e-5), decoding(4, processor=GreedyProcessor())
    divergence = explain(case(target, plan, speculate(target, target, plan, rule), own_noise=rule != "coupled"))
    assert divergence.ours and divergence.theirs
    assert (divergence.position, divergence.ours.token, divergence.theirs.token, divergence.cause) == (
        0,
        2,
        1,
        Cause.ROUNDING,
    )
    assert divergence.rounding == pytest.approx(3e-5, rel=0.1)
    assert {candidate.token for candidate in divergence.highest} == {1, 2} and 0 < divergence.gap < 4e-5


@pytest.mark.parametrize("processor", [TopKProcessor(1.0, 1), NucleusProcessor(1.0, 0.4), MultinomialProcessor(0.01)])
def test_rounding_may_decide_sets_and_races(processor: LogitsProcessor) -> None:
    """Every seed whose coupled text depends on the width is explained."""
    explained = 0
    for seed in range(40):
        target, plan = WidthDependent(tied_table(1e-3), 2e-3), decoding(3, processor=processor, seed=seed)
        rounds, expected = (
            list(speculate(target, target, plan, "coupled")),
            tokens_of(autoregressive_steps([0], session(target), plan)),
        )
        if tokens_of(rounds) != expected:
            explained += 1
            assert explain(case(target, plan, rounds)).cause is Cause.ROUNDING, seed
    assert explained


def test_a_difference_beyond_rounding_is_unexplained() -> None:
    """A verify width that changes logits by 0.5 is an error in the model's code, not rounding."""
    target, plan = WidthDependent(tied_table(0.3), 0.5), decoding(4, processor=GreedyProcessor())
    divergence = explain(case(target, plan, speculate(target, target, plan, "coupled")))
    assert divergence.cause is Cause.UNEXPLAINED and divergence.rounding == pytest.approx(0.5)


def test_a_quantization_that_depends_on_the_width_explains_only_what_the_passes_repeat() -> None:
    target, plan = WidthDependent(tied_table(0.3), 0.5), decoding(4, processor=GreedyProcessor())
    rounds = list(speculate(target, target, plan, "coupled"))
    divergence = explain(case(target, plan, rounds, coarse=True))
    assert divergence.cause is Cause.QUANTIZATION and divergence.rounding == pytest.approx(0.5)
    wrong = [Step((), 0, 3), *rounds[1:]]
    assert explain(case(target, plan, wrong, coarse=True)).cause is Cause.UNEXPLAINED


def test_bnb_int8_is_named_as_the_cause(tmp_path: Path) -> None:
    """Never `unexplained`, whether the replay or a near tie shows it."""
    model = tiny_llama(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    folder = save_folder(tmp_path / "model", model, tiny_tokenizer(chat=False))
    session = open_session(screen(), load(folder, "layers:1", quantize="bnb-int8"), records=tmp_path / "runs.jsonl")
    for line in ("/length 16", "hello there", "one, two, three"):
        session.handle(line)
    records = records_of(tmp_path / "runs.jsonl")
    causes = [record["divergence"]["cause"] for record in records if record.get("divergence")]
    assert causes and set(causes) == {Cause.QUANTIZATION}


def test_passes_are_repeated_without_the_rejected_drafts() -> None:
    """Positions of rejected drafts are forgotten before the next pass, as in the run."""
    model, plan = tiny_llama(), decoding(4, processor=GreedyProcessor())
    expected = tokens_of(autoregressive_steps([3, 4], ModelSession(model), plan))
    wrong = [(token + 1) % model.config.vocab_size for token in expected]
    rounds = [Step((wrong[0], wrong[1]), 0, expected[0]), Step((expected[1], wrong[2]), 1, wrong[2])]
    ours = DivergenceCase([3, 4], tuple(rounds), expected, partial(ModelSession, model), plan, width=3, own_noise=False)
    found = _logits_of(ours, rounds, rewinds=True)
    assert torch.allclose(found, ModelSession(model).feed([3, 4, *expected[:2]], keep=1)[0], atol=1e-4)


def test_a_wrong_token_is_unexplained() -> None:
    target, plan = toy(9, 8), decoding(6, seed=3)
    expected = tokens_of(autoregressive_steps([0], session(target), plan))
    altered = [*expected[:3], (expected[3] + 1) % 8, *expected[4:]]
    divergence = explain(case(target, plan, [Step((), 0, token) for token in altered]))
    assert (divergence.position, divergence.cause) == (3, Cause.UNEXPLAINED)
    assert (
        divergence.ours
        and divergence.theirs
        and (divergence.ours.token, divergence.theirs.token) == (altered[3], expected[3])
    )


def test_a_text_that_ends_early_is_unexplained() -> None:
    target, plan = toy(9, 8), decoding(6, seed=3)
    expected = tokens_of(autoregressive_steps([0], session(target), plan))
    divergence = explain(case(target, plan, [Step((), 0, token) for token in expected[:4]]))
    assert (divergence.position, divergence.ours, divergence.theirs and divergence.theirs.token, divergence.cause) == (
        4,
        None,
        expected[4],
        Cause.UNEXPLAINED,
    )


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_token_drawn_with_different_noise_is_sampling_unless_its_probability_is_0(rule: str) -> None:
    target = toy(9, 8)
    causes = set()
    for seed in range(20):
        plan = decoding(6, processor=TopKProcessor(1.0, 3), seed=seed)
        rounds, expected = (
            list(speculate(target, opposed(target), plan, rule)),
            tokens_of(autoregressive_steps([0], session(target), plan)),
        )
        if tokens_of(rounds) != expected:
            causes.add(explain(case(target, plan, rounds, own_noise=True)).cause)
    assert causes == {Cause.SAMPLING}
    never = int(target.table[0].argmin())
    plan = decoding(2, processor=TopKProcessor(1.0, 3))
    assert explain(case(target, plan, [Step((never,), 1, None)], own_noise=True)).cause is Cause.UNEXPLAINED


def test_a_bonus_token_never_differs_by_sampling() -> None:
    """Every rule draws it from p with the target's noise, and so it does with tokens of rounds without drafts."""
    target, plan = toy(9, 8), decoding(6, seed=3)
    expected = tokens_of(autoregressive_steps([0], session(target), plan))
    wrong = (expected[1] + 1) % 8
    for rounds in ([Step((expected[0],), 1, wrong)], [Step((), 0, expected[0]), Step((), 0, wrong)]):
        assert explain(case(target, plan, rounds, own_noise=True)).cause is Cause.UNEXPLAINED
    corrected = [Step((expected[0], expected[1]), 1, wrong)]
    assert explain(case(target, plan, corrected, own_noise=True)).cause is Cause.SAMPLING


@pytest.mark.parametrize("build", [tiny_llama, tiny_t5])
def test_16_bit_texts_differ_only_by_rounding_ties(build) -> None:
    target, drafter = build(seed=0).bfloat16(), build(seed=1).bfloat16()
    for seed in range(1, 2):
        for processor in (GreedyProcessor(), MultinomialProcessor(0.6)):
            divergence = divergence_between(
                target, drafter, [5, 9, 13, 9, 5, seed], Decoding(processor, 12, frozenset(), Noise(seed))
            )
            assert divergence is None or divergence.cause is Cause.ROUNDING, (seed, processor)


def divergence_between(target, drafter, prompt: list[int], plan: Decoding) -> Divergence | None:
    expected = tokens_of(autoregressive_steps(prompt, ModelSession(target), plan))
    drafting = ModelDrafter(ModelSession(drafter), plan, 64, shares_noise=True)
    rounds = tuple(speculative_steps(prompt, drafting, ModelSession(target), plan, gamma=4, rule=RULES["coupled"]))
    if tokens_of(rounds) == expected:
        return None
    return explain(
        DivergenceCase(prompt, rounds, expected, partial(ModelSession, target), plan, width=5, own_noise=False)
    )


def test_greedy_candidates_have_the_probabilities_of_the_raw_logits() -> None:
    target, plan = WidthDependent(tied_table(1e-5), 3e-5), decoding(4, processor=GreedyProcessor())
    divergence = explain(case(target, plan, speculate(target, target, plan, "coupled")))
    assert [candidate.probability for candidate in divergence.highest] == pytest.approx([0.4966, 0.4966], abs=1e-3)
