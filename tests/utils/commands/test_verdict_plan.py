"""/verdict: which prompts choose and judge the candidate, in which order, how long, and until when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import Screen, records_of
from verdict_runs import TEXTS, Runs, helpful, ids_of, prompts_file, session_of, verdict_of

from utils.commands.verdicts import selection
from utils.commands.verdicts.measurement import FOLDER, RUN_SECONDS, divide, plan_prompts, run_length, run_seconds
from utils.comparison.strategies import STRATEGIES
from utils.prompts.prompt_files import Prompt, read_prompts, spaced, tasks_in_turn
from utils.prompts.request_fields import grammar_text
from utils.repl.repl_session import Verdict


def test_one_prompt_is_run_as_long_as_there_is_time_for(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first 32 tokens of an answer are not the answer: drafts may be accepted less often later on."""
    runs = Runs(monkeypatch, lambda strategy, step: 0.075, passes=20)
    session = session_of(view, tmp_path)
    session.handle("/length 128")
    assert session.handle("one and more one") is Verdict.DONE
    row, _ = verdict_of(session, view, tmp_path, "/verdict")
    assert row["length"] == 128 and row["pairs"] >= 5 and runs.now < 180


def test_prompts_of_the_session_come_first_and_builtin_ones_else(view: Screen, tmp_path: Path) -> None:
    session = session_of(view, tmp_path)
    assert len(plan_prompts("", session.harness.state.prompts).measured) == 14
    for line in ("Hello", "Hello", "There", "x" * 900):
        session.handle(line)
    assert session.harness.state.prompts == ["Hello", "Hello", "There"], "without the one that was refused"
    plan = plan_prompts("", session.harness.state.prompts)
    assert [prompt.text for prompt in plan.measured] == ["Hello", "There"] and not plan.divided
    assert plan_prompts("builtin", ["Hello"]).divided


def test_what_chooses_the_candidate_is_never_measured(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tuning prompts are run before all others, and none of their runs is among the measured ones."""
    runs = Runs(monkeypatch, helpful)
    session = session_of(view, tmp_path)
    path = prompts_file(tmp_path, [*TEXTS, "eight"])
    plan = plan_prompts(str(path), [])
    row, _ = verdict_of(session, view, tmp_path, f"/verdict {path}")
    tuning, measured = ids_of(session, plan.tuning), ids_of(session, plan.measured)
    assert not tuning & measured and len(tuning) == 2 and row["prompts"] == len(measured) == 6
    first = next(index for index, (_, _, prompt) in enumerate(runs.made) if prompt in measured)
    assert {prompt for _, _, prompt in runs.made[:first]} == tuning
    assert not {prompt for _, _, prompt in runs.made[first:]} & tuning
    assert row["pairs"] == sum(prompt in measured and name == "target" for name, _, prompt in runs.made), (
        "every pair is of a measured prompt"
    )


@pytest.mark.parametrize("tasks", ["abcdefgg", "abcdefggg", "aabbccddeeff", "aaaaaaaabcd"])
def test_no_task_loses_its_only_prompt_to_tuning(tasks: str) -> None:
    plan = divide("prompts", [Prompt(str(number), task) for number, task in enumerate(tasks)])
    assert plan.tuning and {prompt.task for prompt in plan.measured} == set(tasks)


@pytest.mark.parametrize("amount", [1, 5, 6, 7, 8, 11, 12, 40])
def test_few_prompts_are_not_divided_and_more_are(amount: int) -> None:
    prompts = [Prompt(str(index)) for index in range(amount)]
    plan = divide("prompts", prompts)
    assert plan.divided == (amount > 5)
    if plan.divided:
        assert not set(plan.tuning) & set(plan.measured)
        assert 1 <= len(plan.tuning) <= min(3, amount // 4 or 1)
        assert len(plan.measured) + len(plan.tuning) + plan.left_out == amount and len(plan.measured) <= 24
    else:
        assert plan.measured == tuple(prompts) and set(plan.tuning) <= set(prompts)


def test_prompts_are_spaced_and_tasks_take_turns() -> None:
    prompts = [Prompt(str(index), "a" if index < 6 else "b") for index in range(12)]
    assert {prompt.task for prompt in spaced(prompts, 2)} == {"a", "b"}
    assert [prompt.task for prompt in tasks_in_turn(prompts)][:4] == ["a", "b", "a", "b"]
    assert len(set(tasks_in_turn(prompts))) == 12


def test_the_built_in_prompts() -> None:
    measured, tuning = (list(read_prompts(FOLDER / name)) for name in ("prompts.jsonl", "tuning.jsonl"))
    assert len(measured) == 14 and len(tuning) == 3
    assert all(sum(prompt.task == task for prompt in measured) == 2 for task in {prompt.task for prompt in measured})
    assert sum(bool(prompt.request and grammar_text(prompt.request)) for prompt in measured) == 2
    assert len({prompt.task for prompt in measured}) == 7 and not set(measured) & set(tuning)


def test_both_go_first_equally_often(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, helpful, noise=0.1)
    session = session_of(view, tmp_path)
    path = prompts_file(tmp_path, TEXTS)
    row, _ = verdict_of(session, view, tmp_path, f"/verdict {path}")
    assert row["passes"] > 1
    whole = [(name, prompt) for name, length, prompt in runs.made if length == 12][-2 * row["pairs"] :]
    firsts = [name for name, _ in whole[::2]]
    assert abs(2 * firsts.count("target") - len(firsts)) <= 1
    assert all(left[1] == right[1] and left[0] != right[0] for left, right in zip(whole[::2], whole[1::2], strict=True))


def test_ctrl_c_keeps_the_finished_pairs(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, helpful)
    session = session_of(view, tmp_path)
    path = prompts_file(tmp_path, TEXTS)
    measured = ids_of(session, plan_prompts(str(path), []).measured)
    # A warm-up run and two whole runs for each prompt; the tenth is one of a pair.
    runs.stop_after = lambda: sum(prompt in measured for _, _, prompt in runs.made) == 11
    assert session.handle(f"/verdict {path}") is Verdict.INTERRUPTED
    report = records_of(tmp_path / "records.jsonl")[-1]
    assert not report["finished"] and report["findings"][-1]["pairs"] == 3
    assert report["findings"][0]["runs"] == report["findings"][1]["runs"] == 3
    assert "over 3 prompts" in view.take()[0]
    runs.made.clear()
    runs.stop_after = lambda: sum(prompt in measured for _, _, prompt in runs.made) == 4
    session.handle(f"/verdict {path}")
    assert "Too few runs" in view.take()[0]
    runs.made.clear()
    runs.stop_after = lambda: len(runs.made) == 4
    assert session.handle(f"/verdict {path}") is Verdict.INTERRUPTED and "nothing" in view.take()[1]


def test_prompts_that_cannot_run_are_skipped(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Runs(monkeypatch, helpful, passes=1)
    session = session_of(view, tmp_path)
    path = prompts_file(tmp_path, [*TEXTS[:4], "x" * 900, "y" * 901, *TEXTS[4:]])
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {path}")
    too_long = [line for line in row["skipped"] if "context length" in line]
    assert 1 <= len(too_long) <= 2 and all(line in shown for line in too_long)
    assert session.handle(f"/verdict {prompts_file(tmp_path, ['x' * 900])}") is Verdict.FAILED
    assert "none of the prompts" in view.take()[1]


def test_progress_counts_the_tuning_prompts_that_are_used(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Runs(monkeypatch, helpful)
    session = session_of(view, tmp_path)
    assert session.handle(f"/verdict {prompts_file(tmp_path, ['x' * 900, 'one'])}") is not Verdict.FAILED
    shown = "".join(view.take())
    assert "tuning prompt 1 of 1" in shown and "tuning prompt 2" not in shown


def test_a_first_interval_within_a_minute_and_an_end(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eighteen tokens per second, as the embedded target has: 64 tokens take 3.6 s."""
    runs = Runs(monkeypatch, lambda strategy, step: 0.055, passes=20)
    session = session_of(view, tmp_path)
    session.handle("/length 128")
    seen: list[tuple[float, str]] = []
    monkeypatch.setattr(session.harness, "progress", lambda text: seen.append((runs.now, text)))
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {prompts_file(tmp_path, TEXTS)}")
    assert row["length"] == 64 and "/length is 128" in shown
    assert next(now for now, text in seen if "95 % interval" in text) < 60 and runs.now < 180
    assert all("s left" in text for _, text in seen if "interval" in text)


def test_on_a_very_slow_machine_there_is_an_answer(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run takes longer than the whole selection should: one kind is replayed, and the others are named."""
    Runs(monkeypatch, lambda strategy, step: 9.0)
    session = session_of(view, tmp_path)
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {prompts_file(tmp_path, TEXTS * 3)}")
    assert row["drafter_kind"] == "model" and "no time to replay: prompt lookup, " in shown
    assert row["passes"] == 1 and row["prompts"] == 6


def test_the_length_of_runs_follows_the_speed() -> None:
    assert [run_length(step, 1000) for step in (0.001, 0.05, 0.1, 0.2, 9)] == [128, 64, 32, 16, 16]
    assert run_seconds(1) == pytest.approx(10) and run_seconds(12) == RUN_SECONDS
    assert run_length(0.001, 35) == 35 and run_length(9, 5) == 5


def test_the_recommended_strategy_is_the_only_one_that_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(STRATEGIES[1], name="other", toggle="drafter")
    monkeypatch.setattr(selection, "STRATEGIES", (*STRATEGIES[:3], other))
    changes = selection.VerdictCandidate(other, None, 1.5).changes
    assert changes == {"speculative": False, "ngram": False, "drafter": True, "gamma": None}
