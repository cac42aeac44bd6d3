"""Why texts part: sampling, a rounding tie or a bug, each on models that are made to show it; and the line that says so."""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import Screen, open_session, records_of, screen, tiny_pair
from tiny import tiny_llama, tiny_t5
from toys import ToyModel, decoding, opposed, session, toy

from sampling import RULES, ModelDrafter, Rule, autoregressive_steps, speculative_steps
from utils.commands.experiments.divergence import EXPLANATIONS
from utils.comparison.records import RecordFile, divergence_figures
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
from utils.metrics.divergence import Candidate, Cause, Divergence, DivergenceCase, explain
from utils.metrics.results import tokens_of
from utils.repl.runner import NOT_EXPLAINED, OUT_OF_MEMORY, Verdict
from utils.screen.renderer import CAUSES


class Wobbly(ToyModel):
    """A model whose logits of token 2 come out higher where more than one position is asked for."""

    def __init__(self, table: torch.Tensor, wobble: float) -> None:
        super().__init__(table)
        self.wobble = wobble

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int = 0, **arguments: object) -> SimpleNamespace:
        output = super().forward(input_ids, logits_to_keep=logits_to_keep)
        logits = output.logits.clone()
        logits[..., 2] += self.wobble * (logits_to_keep > 1)
        return SimpleNamespace(logits=logits)


def case(
    target: ToyModel,
    plan: Decoding,
    rounds: Iterable[Step],
    *,
    theirs: list[int] | None = None,
    own_noise: bool = False,
) -> DivergenceCase:
    plain = tokens_of(autoregressive_steps([0], session(target), plan)) if theirs is None else theirs
    return DivergenceCase([0], tuple(rounds), plain, partial(session, target), plan, width=4, own_noise=own_noise)


def speculate(target: ToyModel, drafter: ToyModel, plan: Decoding, rule: str) -> Iterable[Step]:
    drafting = ModelDrafter(session(drafter), plan, target.table.shape[-1], shares_noise=RULES[rule].shares_noise)
    return speculative_steps([0], drafting, session(target), plan, gamma=3, rule=RULES[rule])


def tied_table(gap: float) -> torch.Tensor:
    """From token 0 the target goes on with token 1, by a gap over token 2; from everywhere else with 3."""
    table = torch.zeros(4, 4)
    table[:, 3] = 9.0
    table[0] = torch.tensor([0.0, 5.0, 5.0 - gap, 0.0])
    return table


@pytest.mark.parametrize("rule", ["rejection", "coupled", "block"])
def test_a_tie_that_rounding_decides_is_called_one_under_greedy(rule: str) -> None:
    target, plan = Wobbly(tied_table(1e-5), 3e-5), decoding(4, processor=GreedyProcessor())
    found = explain(case(target, plan, speculate(target, target, plan, rule), own_noise=rule != "coupled"))
    assert found.ours and found.theirs
    assert (found.position, found.ours.token, found.theirs.token, found.cause) == (0, 2, 1, Cause.ROUNDING)
    assert found.rounding == pytest.approx(3e-5, rel=0.1)
    assert {candidate.token for candidate in found.highest} == {1, 2} and 0 < found.gap < 4e-5


@pytest.mark.parametrize("processor", [TopKProcessor(1.0, 1), NucleusProcessor(1.0, 0.4), MultinomialProcessor(0.01)])
def test_ties_are_found_at_the_edges_of_sets_and_in_races_too(processor: LogitsProcessor) -> None:
    """Seeds whose coupled text turns on the wobble: every one is explained."""
    wobble, seen = 2e-3, 0
    for seed in range(400):
        target, plan = Wobbly(tied_table(1e-3), wobble), decoding(3, processor=processor, seed=seed)
        rounds, plain = (
            list(speculate(target, target, plan, "coupled")),
            tokens_of(autoregressive_steps([0], session(target), plan)),
        )
        if tokens_of(rounds) != plain:
            seen += 1
            assert explain(case(target, plan, rounds)).cause is Cause.ROUNDING, seed
    assert seen


def test_a_difference_beyond_rounding_is_not_excused() -> None:
    """Windows that move logits by a half are a mistake in the model's code, not a rounding."""
    target, plan = Wobbly(tied_table(0.3), 0.5), decoding(4, processor=GreedyProcessor())
    found = explain(case(target, plan, speculate(target, target, plan, "coupled")))
    assert found.cause is Cause.UNEXPLAINED and found.rounding == pytest.approx(0.5)


def test_a_wrong_token_is_unexplained() -> None:
    target, plan = toy(9, 8), decoding(6, seed=3)
    plain = tokens_of(autoregressive_steps([0], session(target), plan))
    altered = [*plain[:3], (plain[3] + 1) % 8, *plain[4:]]
    found = explain(case(target, plan, [Step((), 0, token) for token in altered]))
    assert (found.position, found.cause) == (3, Cause.UNEXPLAINED)
    assert found.ours and found.theirs and (found.ours.token, found.theirs.token) == (altered[3], plain[3])


def test_a_text_that_ends_early_is_unexplained() -> None:
    target, plan = toy(9, 8), decoding(6, seed=3)
    plain = tokens_of(autoregressive_steps([0], session(target), plan))
    found = explain(case(target, plan, [Step((), 0, token) for token in plain[:4]]))
    assert (found.position, found.ours, found.theirs and found.theirs.token, found.cause) == (
        4,
        None,
        plain[4],
        Cause.UNEXPLAINED,
    )


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_numbers_are_sampling_unless_the_law_excludes_the_token(rule: str) -> None:
    target = toy(9, 8)
    causes = set()
    for seed in range(20):
        plan = decoding(6, processor=TopKProcessor(1.0, 3), seed=seed)
        rounds, plain = (
            list(speculate(target, opposed(target), plan, rule)),
            tokens_of(autoregressive_steps([0], session(target), plan)),
        )
        if tokens_of(rounds) != plain:
            causes.add(explain(case(target, plan, rounds, own_noise=True)).cause)
    assert causes == {Cause.SAMPLING}
    never = int(target.table[0].argmin())
    plan = decoding(2, processor=TopKProcessor(1.0, 3))
    assert explain(case(target, plan, [Step((never,), 1, None)], own_noise=True)).cause is Cause.UNEXPLAINED


def test_a_bonus_token_is_never_excused_as_sampling() -> None:
    """It is drawn from p with the target's noise under every rule, and so is a token behind no drafts."""
    target, plan = toy(9, 8), decoding(6, seed=3)
    plain = tokens_of(autoregressive_steps([0], session(target), plan))
    wrong = (plain[1] + 1) % 8
    for rounds in ([Step((plain[0],), 1, wrong)], [Step((), 0, plain[0]), Step((), 0, wrong)]):
        assert explain(case(target, plan, rounds, own_noise=True)).cause is Cause.UNEXPLAINED
    corrected = [Step((plain[0], plain[1]), 1, wrong)]
    assert explain(case(target, plan, corrected, own_noise=True)).cause is Cause.SAMPLING


@pytest.mark.parametrize("build", [tiny_llama, tiny_t5])
def test_sixteen_bit_texts_part_at_rounding_ties_only(build) -> None:
    target, drafter = build(seed=0).bfloat16(), build(seed=1).bfloat16()
    for seed in range(1, 11):
        for processor in (GreedyProcessor(), MultinomialProcessor(0.6)):
            found = diverged(target, drafter, [5, 9, 13, 9, 5, seed], Decoding(processor, 24, frozenset(), Noise(seed)))
            assert found is None or found.cause is Cause.ROUNDING, (seed, processor)


def diverged(target, drafter, prompt: list[int], plan: Decoding) -> Divergence | None:
    plain = tokens_of(autoregressive_steps(prompt, ModelSession(target), plan))
    drafting = ModelDrafter(ModelSession(drafter), plan, 64, shares_noise=True)
    rounds = tuple(speculative_steps(prompt, drafting, ModelSession(target), plan, gamma=4, rule=RULES["coupled"]))
    if tokens_of(rounds) == plain:
        return None
    return explain(DivergenceCase(prompt, rounds, plain, partial(ModelSession, target), plan, width=5, own_noise=False))


def test_the_line_says_that_sampling_is_expected_and_what_makes_it_one_text(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    repl = open_session(view, records=file)
    for line in ("/processor multinomial 1.2", "/length 12", "Hello"):
        repl.handle(line)
    line = view.take()[0].splitlines()[-1]
    assert line.startswith("speculative differs at token ")
    assert line.endswith(CAUSES[Cause.SAMPLING].format(rule="rejection"))
    rows = records_of(file)
    assert [row["divergence"] and row["divergence"]["cause"] for row in rows] == ["sampling", None, None]
    assert rows[0]["divergence"]["position"] == rows[0]["first_difference"]
    place = rows[0]["first_difference"]
    assert [rows[0]["divergence"][name]["token"] for name in ("ours", "theirs")] == [
        row["token_ids"][place] for row in rows[::2]
    ]
    repl.handle("/divergence")
    results = view.take()[0]
    assert "target's highest" in results and EXPLANATIONS[Cause.SAMPLING].format(rule="rejection") in results
    assert records_of(file)[-1]["record"] == "divergence"
    repl.handle("/verify coupled")
    repl.handle("Hello")
    assert all(row["same_as_target"] for row in records_of(file)[-3:])
    view.take()
    repl.handle("/divergence")
    assert view.take()[1] == "speculative and ngram: the same tokens as target-only.\n"


def test_there_must_be_something_to_explain(view: Screen) -> None:
    repl = open_session(view)
    assert repl.handle("/divergence") is Verdict.FAILED
    assert view.take()[1] == "/divergence: a prompt is needed: send one first.\n"
    for line in ("/target off", "/length 3", "Hello"):
        repl.handle(line)
    view.take()
    assert repl.handle("/divergence") is Verdict.FAILED
    assert "the last prompt needs finished runs of the target and of another strategy" in view.take()[1]


def test_what_is_unexplained_is_shown_with_all_that_a_replay_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule with a bug: it emits the token after the one it should."""

    def off_by_one(probs: torch.Tensor, draft: object, noise: Noise, *, start: int) -> tuple[int, int]:
        return 0, (noise.sample(probs[0], start) + 1) % probs.shape[-1]

    monkeypatch.setitem(RULES, "coupled", Rule("coupled", off_by_one, shares_noise=True))
    monkeypatch.setattr("sampling.verification.verify_one_hot", off_by_one)
    view, file = screen(width=70), tmp_path / "runs.jsonl"
    repl = open_session(view, tiny_pair(), records=file)
    for line in ("/ngram off", "/verify coupled", "/length 6", "/seed 5", "Hello"):
        repl.handle(line)
    assert "unexplained: please report" in view.take()[0]
    for line in ("/seed 6", "/verify rejection", "/divergence"):
        repl.handle(line)
    data = json.loads(view.take()[0].splitlines()[-1])
    assert data["divergences"][0]["cause"] == "unexplained: please report"
    assert data["rounds"]["speculative"][0][1] == 0 and data["runs"][0]["versions"] and data["prompt_ids"]
    record = records_of(file)[-1]
    assert (record["record"], record["seed"], record["settings"]["verify"]) == (
        "divergence",
        5,
        "coupled",
    )  # of the run, not of now


def test_a_masked_token_can_be_reported(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of minus infinity are null in a record."""
    found = Divergence(
        0,
        Candidate(1, 0.0, float("-inf")),
        None,
        (Candidate(2, 1.0, 3.0), Candidate(1, 0.0, float("-inf"))),
        None,
        Cause.UNEXPLAINED,
    )
    figures = divergence_figures(found)
    assert figures["ours"] == {"token": 1, "probability": 0.0, "logit": None} and figures["gap"] is None
    RecordFile(tmp_path / "runs.jsonl").append([figures])


def test_an_explanation_that_fails_spoils_no_run(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("utils.comparison.last_prompt.explain", broken)
    file = tmp_path / "runs.jsonl"
    repl = open_session(view, records=file)
    repl.handle("/processor multinomial 1.2")
    assert repl.handle("Hello") is Verdict.DONE
    assert [row["divergence"] for row in records_of(file)] == [None] * 3
    messages = view.take()[1]
    assert NOT_EXPLAINED in messages and OUT_OF_MEMORY in messages


def test_under_greedy_the_candidates_have_the_models_own_probabilities() -> None:
    target, plan = Wobbly(tied_table(1e-5), 3e-5), decoding(4, processor=GreedyProcessor())
    found = explain(case(target, plan, speculate(target, target, plan, "coupled")))
    assert [candidate.probability for candidate in found.highest] == pytest.approx([0.4966, 0.4966], abs=1e-3)


def test_what_an_audit_measured_is_what_divergences_are_held_against(
    view: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[float] = []
    monkeypatch.setattr("utils.comparison.last_prompt.explain", lambda case, rounding: handed.append(rounding))
    monkeypatch.setattr(view.renderer, "divergence", lambda *arguments, **options: None)
    repl = open_session(view)
    for line in ("/processor multinomial 1.2", "/length 6", "/audit 2", "Hello"):
        repl.handle(line)
    assert handed == [repl.harness.state.rounding] and handed[0] > 0
