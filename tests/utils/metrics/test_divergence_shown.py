"""How a divergence is shown and recorded, and what happens if it cannot be explained."""

from pathlib import Path

import pytest
import torch
from fakes import Screen, open_session, records_of, screen, table_pair, tiny_pair

from sampling import RULES, Rule
from utils.comparison.arms import REASONS
from utils.comparison.harness import NO_PROMPT_YET
from utils.comparison.records import RecordFile, divergence_figures
from utils.decode.noise import Noise
from utils.metrics.divergence import Cause, Divergence, TokenCandidate
from utils.repl.repl_session import NOT_EXPLAINED, OUT_OF_MEMORY, Verdict


def test_sampling_is_shown_and_recorded_as_the_cause(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    repl = open_session(view, records=file)
    for line in ("/processor multinomial 1.2", "/length 12", "Hello"):
        repl.handle(line)
    (line,) = [line for line in view.take()[0].splitlines() if line.startswith("speculative differs at token ")]
    assert REASONS[Cause.SAMPLING] in line
    rows = records_of(file)
    assert [row["divergence"] and row["divergence"]["cause"] for row in rows] == ["sampling", None, None]
    assert rows[0]["divergence"]["position"] == rows[0]["first_difference"]
    position = rows[0]["first_difference"]
    assert [rows[0]["divergence"][name]["token"] for name in ("ours", "theirs")] == [
        row["token_ids"][position] for row in rows[::2]
    ]
    repl.handle("/texts")
    assert line.split() == view.take()[0].splitlines()[-1].split()
    repl.handle("/verify coupled")
    repl.handle("Hello")
    assert all(row["same_as_baseline"] for row in records_of(file)[-3:])
    view.take()
    repl.handle("/texts")
    assert view.take()[0].startswith("target, speculative, ngram")


def test_divergence_needs_a_finished_comparison(view: Screen) -> None:
    repl = open_session(view)
    assert repl.handle("/texts") is Verdict.FAILED
    assert NO_PROMPT_YET in view.take()[1]
    for line in ("/target off", "/length 3", "Hello"):
        repl.handle(line)
    view.take()
    assert repl.handle("/texts") is Verdict.DONE
    assert "differs" not in view.take()[0]


def test_an_unexplained_divergence_is_shown_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a wrong verification rule."""

    def off_by_one(probs: torch.Tensor, draft: object, noise: Noise, *, start: int) -> tuple[int, int]:
        return 0, (noise.sample(probs[0], start) + 1) % probs.shape[-1]

    monkeypatch.setitem(RULES, "coupled", Rule("coupled", off_by_one, shares_noise=True))
    monkeypatch.setattr("sampling.verification.verify_one_hot", off_by_one)
    view, file = screen(width=70), tmp_path / "runs.jsonl"
    repl = open_session(view, table_pair(), records=file)
    for line in ("/ngram off", "/verify coupled", "/length 6", "/seed 5", "Hello"):
        repl.handle(line)
    assert "reason is unknown" in " ".join(view.take()[0].split())
    assert records_of(file)[0]["divergence"]["cause"] == Cause.UNEXPLAINED
    repl.handle("/race 1")
    repl.handle("/texts")
    assert "reason is unknown" in " ".join(view.take()[0].split())


def test_masked_logits_are_null_in_a_record(tmp_path: Path) -> None:
    divergence = Divergence(
        0,
        TokenCandidate(1, 0.0, float("-inf")),
        None,
        (TokenCandidate(2, 1.0, 3.0), TokenCandidate(1, 0.0, float("-inf"))),
        None,
        Cause.UNEXPLAINED,
    )
    figures = divergence_figures(divergence)
    assert figures["ours"] == {"token": 1, "probability": 0.0, "logit": None} and figures["gap"] is None
    RecordFile(tmp_path / "runs.jsonl").append([figures])


def test_a_failed_explanation_does_not_affect_the_runs(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("utils.comparison.harness.explain", broken)
    file = tmp_path / "runs.jsonl"
    repl = open_session(view, records=file)
    repl.handle("/processor multinomial 1.2")
    assert repl.handle("Hello") is Verdict.DONE
    assert [row["divergence"] for row in records_of(file)] == [None] * 3
    messages = view.take()[1]
    assert NOT_EXPLAINED in messages and OUT_OF_MEMORY in messages


def test_the_rounding_that_an_audit_measured_is_used(view: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[float] = []

    def explain(case: object, rounding: float) -> Divergence:
        known.append(rounding)
        return Divergence(0, None, None, (TokenCandidate(5, 0.5, 1.0),) * 2, None, Cause.SAMPLING)

    monkeypatch.setattr("utils.comparison.harness.explain", explain)
    repl = open_session(view, tiny_pair())
    for line in ("/processor multinomial 1.2", "/length 6", "/audit 2", "Hello"):
        repl.handle(line)
    assert known == [repl.harness.state.rounding] and known[0] > 0
