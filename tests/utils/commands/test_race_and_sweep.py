"""/race and /sweep: the order of runs, verdicts, what Ctrl-C keeps, and the figures on screen and in the record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, open_session, records_of, table_pair, tiny_pair
from recordings import before_each_run, interrupt_after
from transformers import PreTrainedModel

from utils.commands import race
from utils.commands.experiments.races import RaceItem, RaceResult
from utils.comparison.arms import Run
from utils.comparison.warm_up import draft_seconds
from utils.config.settings import Settings
from utils.config.value_types import ProcessorSpec, StorageSpec
from utils.decode.layer_cut import first_layers
from utils.decode.steps import FinishReason, Step
from utils.engine.engine_choice import EngineFigures
from utils.metrics.results import Generation
from utils.pairs import drafter_kinds
from utils.prompts.prompt_files import Prompt
from utils.repl.repl_session import ReplSession, Verdict

NAMES = ["speculative", "ngram", "target"]


def generation(tokens: int, seconds: float, first: float = 0.5) -> Generation:
    return Generation(tuple(Step((), 0, token) for token in range(tokens)), seconds, first, FinishReason.LENGTH)


def session_with_prompt(view: Screen, file: Path) -> ReplSession:
    session = open_session(view, records=file)
    for line in ("/length 4", "Hello"):
        assert session.handle(line) is Verdict.DONE
    return session


def test_speeds_of_a_paired_run() -> None:
    fast, slow, short = (
        Run("target", "target", "", tuple(made.tokens), made.finish, made.seconds, 0.5, *_rates(made))
        for made in (generation(9, 2.5), generation(9, 5.0), generation(1, 0.5))
    )
    arms: list[Any] = [object(), object()]
    ours, item = replace(fast, name="ngram"), RaceItem(1, Prompt("x"), "all", Settings(), arms)
    paired, itself = RaceResult.of(item, 0, [(arms[0], (ours,)), (arms[1], (slow,))])
    assert (paired.speed, paired.speedup, fast.decode_tokens_per_second) == (3.6, 2.0, 4.0)
    assert paired.same and short.decode_tokens_per_second is None
    assert itself.speedup == 1.0 and itself.same
    (alone,) = RaceResult.of(item, 0, [(arms[0], (ours,))])
    assert alone.speedup is None and alone.same is None


def _rates(made: Generation) -> tuple[int, float | None]:
    return len(made.tokens), made.decode_tokens_per_second


def test_strategies_take_turns_at_going_first(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    before_each_run(monkeypatch, lambda strategy, settings: order.append(strategy.name))
    session = session_with_prompt(view, tmp_path / "records.jsonl")
    assert session.handle("/race 5") is Verdict.DONE
    assert order[:3] == NAMES, "the warm-up"
    assert [order[first] for first in range(3, 18, 3)] == [*NAMES, "speculative", "ngram"]
    rows = {row["strategy"]: row for row in records_of(tmp_path / "records.jsonl")[-1]["findings"]}
    assert set(rows) == set(NAMES) and all(len(row["tokens_per_second"]) == 5 for row in rows.values())
    assert rows["target"]["verdict"] == "baseline"
    assert rows["speculative"]["verdict"] in ("faster", "slower", "not distinguishable")


def test_layers_are_cut_from_the_target_before_any_run_is_timed(view: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[int] = []

    def counted(model: PreTrainedModel, depth: int) -> PreTrainedModel:
        cuts.append(depth)
        return first_layers(model, depth)

    monkeypatch.setattr(drafter_kinds, "first_layers", counted)
    session = open_session(view, tiny_pair(num_hidden_layers=2), draft_seconds=draft_seconds)
    for line in ("/length 4", "/drafter_kind layers:1", "Hello", "/race 3", "/sweep gamma 1 2", "/whatif", "Hello"):
        assert session.handle(line) is Verdict.DONE
    assert cuts == [1], "when the draft cost is measured"


def test_ctrl_c_keeps_the_finished_repeats(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, 11)  # three warm-up runs, two repeats, and two runs of the third
    session = session_with_prompt(view, tmp_path / "records.jsonl")
    assert session.handle("/race 9") is Verdict.INTERRUPTED
    report = records_of(tmp_path / "records.jsonl")[-1]
    assert not report["finished"] and [len(row["tokens_per_second"]) for row in report["findings"]] == [2, 2, 2]


def test_ctrl_c_between_two_events_keeps_the_finished_repeats(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_with_prompt(view, tmp_path / "records.jsonl")
    note = view.renderer.note

    def interrupted(text: str) -> None:
        if "3 of 3" in text:
            raise KeyboardInterrupt
        note(text)

    monkeypatch.setattr(view.renderer, "note", interrupted)
    assert session.handle("/race 3") is Verdict.INTERRUPTED
    report = records_of(tmp_path / "records.jsonl")[-1]
    assert report["record"] == "race" and [len(row["tokens_per_second"]) for row in report["findings"]] == [2, 2, 2]


def test_a_sweep_runs_all_values_in_turns_and_keeps_the_setting(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[Any, str]] = []
    before_each_run(monkeypatch, lambda strategy, settings: order.append((settings.gamma, strategy.name)))
    session = open_session(view, records=tmp_path / "records.jsonl")
    for line in ("/length 8", "Hello", "/sweep gamma 0 2 auto x2"):
        assert session.handle(line) is Verdict.DONE, view.take()
    assert session.settings.gamma == 4
    warm_up = [(gamma, name) for gamma in (0, 2, None) for name in NAMES]
    assert order[:9] == order[9:18] == warm_up
    assert order[18:] == [(gamma, name) for gamma in (2, None, 0) for name in (*NAMES[1:], NAMES[0])]
    rows = records_of(tmp_path / "records.jsonl")[-1]["findings"]
    assert [row["setting"] for row in rows[::3]] == ["gamma 0", "gamma 2", "gamma auto"] and len(rows) == 9
    assert rows[0]["drafted"] == 0 < rows[3]["drafted"] and all(row["same_texts"] for row in rows)
    assert all(len(row["tokens_per_second"]) == len(row["speedups"]) == 2 for row in rows)


def swept(session: ReplSession, file: Path, arguments: str) -> list[str]:
    """The values that a sweep has run."""
    assert session.handle(f"/sweep {arguments} x1") is Verdict.DONE, arguments
    report = records_of(file)[-1]
    return list(dict.fromkeys(row["setting"] for row in report["findings"]))


def test_values_that_can_be_swept(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    session = session_with_prompt(view, file)
    before = session.settings
    processors = swept(session, file, "processor greedy, nucleus 0.8 0.9")
    assert processors == ["processor greedy", "processor nucleus 0.8 0.9"]
    assert swept(session, file, "drafter_kind lookup suffix") == ["drafter_kind lookup", "drafter_kind suffix"]
    assert swept(session, file, "temperature 0 1.5") == ["temperature 0", "temperature 1.5"]
    assert swept(session, file, "order 2 4") == ["order 2", "order 4"]
    assert swept(session, file, "candidates 1 3") == ["candidates 1", "candidates 3"]
    assert swept(session, file, "top_p 0.5 off") == ["top_p 0.5", "top_p off"]
    assert session.settings == before


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ("topknucleus 0.7 40 0.9", ProcessorSpec(1.5, 40, 0.9)),
        ("greedy", ProcessorSpec(1.5)),
    ],
)
def test_a_temperature_changes_nothing_else_of_the_processor(
    processor: str, expected: ProcessorSpec, view: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[ProcessorSpec] = []
    before_each_run(monkeypatch, lambda strategy, settings: used.append(settings.processor))
    session = open_session(view)
    for line in ("/length 2", f"/processor {processor}", "Hello", "/sweep temperature 1.5 x1"):
        assert session.handle(line) is Verdict.DONE
    assert used and all(one == expected for one in used)


def test_an_order_changes_nothing_else_of_the_storage(view: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[StorageSpec] = []
    before_each_run(monkeypatch, lambda strategy, settings: used.append(settings.ngram_storage))
    session = open_session(view)
    for line in ("/length 2", "/set_ngramstorage onelevel 3", "Hello", "/sweep order 5 x1"):
        assert session.handle(line) is Verdict.DONE
    assert used and all(one == StorageSpec("onelevel", 5) for one in used)


def test_ctrl_c_keeps_the_finished_values(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, 11)  # six warm-up runs, three of the first value, two of the second
    session = session_with_prompt(view, tmp_path / "records.jsonl")
    assert session.handle("/sweep gamma 1 2") is Verdict.INTERRUPTED
    report = records_of(tmp_path / "records.jsonl")[-1]
    assert not report["finished"] and [row["setting"] for row in report["findings"]] == ["gamma 1"] * 3


@pytest.mark.parametrize(("factor", "is_reported"), [(1.25, True), (1.02, False)])
def test_a_faster_engine_for_the_target_is_named(
    factor: float, is_reported: bool, view: Screen, tmp_path: Path
) -> None:
    pair = table_pair()
    session = open_session(view, pair, records=tmp_path / "records.jsonl")
    slow = EngineFigures(
        step_seconds=0.05, costs=((2, 1.1), (5, 1.2), (9, 1.5)), prefill=400.0, threads=1, verified=True
    )
    pair.engine.table = {"plain": slow, "invariant": replace(slow, step_seconds=0.05 / factor)}
    for line in ("/length 20", "Hello there"):
        assert session.handle(line) is Verdict.DONE
    # The texts of random models repeat themselves, so at least one strategy has a speed-up.
    assert ("1.25x as fast in the invariant engine" in view.take()[0]) is is_reported
    other = records_of(tmp_path / "records.jsonl")[-1]["engine"]["faster_baseline"]
    assert other == ({"name": "invariant", "factor": pytest.approx(1.25)} if is_reported else None)
    assert session.handle("/race 2") is Verdict.DONE
    conclusion = records_of(tmp_path / "records.jsonl")[-1]["conclusion"]
    assert any("1.25x as fast" in line for line in conclusion) is is_reported


def test_invalid_input_names_the_allowed_values(view: Screen) -> None:
    session = open_session(view, table_pair())
    assert session.handle("/race") is Verdict.FAILED and "prompt" in view.take()[1]
    session.handle("/length 3")
    session.handle("Hello")
    for line, allowed in (
        ("/race 0", "1 to 1000"),
        ("/race -3 prompts.jsonl", "1 to 1000"),
        ("/race 5x", "1 to 1000"),
        ("/race nosuch.jsonl", "nosuch.jsonl"),
        ("/race 3 nosuch.jsonl", "nosuch.jsonl"),
        ("/sweep", race.EXAMPLES),
        ("/sweep target on off", "gamma, drafter_kind"),
        ("/sweep gamma", race.EXAMPLES),
        ("/sweep gamma 3 99", "0 to 63"),
        ("/sweep gamma 3 x0", "1 to 100"),
        ("/sweep gamma x3", race.EXAMPLES),
        ("/sweep temperature 9999", "0 to 100"),
    ):
        assert session.handle(line) is Verdict.FAILED and allowed in view.take()[1], line
