"""/race and /sweep: turns, verdicts, what Ctrl-C leaves, and the figures on screen and in the record."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, records_of, tiny_pair, workbench

from utils.commands.experiments import race, sweep
from utils.commands.experiments.race import Heat, verdict
from utils.commands.registry import Registry, Situation
from utils.comparison import model_drafters as drafters
from utils.comparison.model_drafters import draft_seconds
from utils.comparison.reports import Finding
from utils.config.settings import Settings
from utils.config.value_types import StorageSpec
from utils.decode.layer_cut import first_layers
from utils.decode.steps import FinishReason, Step
from utils.logits_processor import MultinomialProcessor, TopKNucleusProcessor
from utils.metrics.results import Generation
from utils.repl.runner import Verdict


def generation(tokens: int, seconds: float, first: float = 0.5) -> Generation:
    return Generation(tuple(Step((), 0, token) for token in range(tokens)), seconds, first, FinishReason.LENGTH)


def test_speeds_of_a_heat() -> None:
    heat = Heat(generation(9, 2.5), generation(9, 5.0))
    assert (heat.speed, heat.speedup, heat.decode) == (3.6, 2.0, 4.0)
    assert Heat(generation(9, 2.5), None).speedup is None and Heat(generation(1, 0.5), None).decode is None


@pytest.mark.parametrize(
    ("ups", "words"),
    [
        ([], "-"),
        ([1, 1, 1], "the baseline"),
        ([1.2, 1.3], "5 repeats tell more"),
        ([1.2, 1.3, 1.1, 1.01, 2], "faster"),
        ([0.2, 0.3, 0.1, 0.99, 0.5], "slower"),
        ([1.2, 1.3, 0.99, 1.2, 1.2], "within noise"),
    ],
)
def test_a_verdict_needs_repeats_that_agree(ups: list[float], words: str) -> None:
    assert verdict(ups) == words


def test_every_repeat_begins_with_another_strategy(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = race.run_alone

    def watched(bench: Any, prompt: Any, strategy: Any, settings: Any, **options: Any) -> Generation:
        order.append(strategy.name)
        return real(bench, prompt, strategy, settings, **options)

    monkeypatch.setattr(race, "run_alone", watched)
    bench = workbench(view, records=tmp_path / "records.jsonl")
    for line in ("/length 6", "Hello", "/race 5"):
        assert bench.handle(line) is Verdict.DONE
    names = ["speculative", "ngram", "target"]
    assert order[:3] == names and [order[place] for place in range(3, 18, 3)] == [
        "speculative",
        "ngram",
        "target",
        "speculative",
        "ngram",
    ]
    found = {row["strategy"]: row for row in records_of(tmp_path / "records.jsonl")[-1]["findings"]}
    assert set(found) == set(names) and all(len(row["tokens_per_second"]) == 5 for row in found.values())
    assert found["target"]["verdict"] == "the baseline" and found["speculative"]["verdict"] in (
        "faster",
        "slower",
        "within noise",
    )
    assert "Medians" in view.take()[0]


def test_a_cut_of_the_target_is_made_before_any_run_is_timed(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts: list[int] = []
    monkeypatch.setattr(drafters, "first_layers", lambda model, depth: cuts.append(depth) or first_layers(model, depth))
    bench = workbench(view, draft_seconds=draft_seconds)
    for line in ("/length 4", "/drafter_kind layers:1", "Hello", "/race 3", "/sweep gamma 1 2", "/whatif", "Hello"):
        assert bench.handle(line) is Verdict.DONE
    assert cuts == [1], "measuring what a draft costs has made it"


def test_ctrl_c_keeps_the_repeats_that_were_done(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = race.run_alone, iter(range(100))

    def interrupted(*arguments: Any, **options: Any) -> Generation:
        if next(count) >= 11:  # three to warm up, two repeats, and within the third
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(race, "run_alone", interrupted)
    bench = workbench(view, records=tmp_path / "records.jsonl")
    bench.handle("/length 4")
    bench.handle("Hello")
    assert bench.handle("/race 9") is Verdict.INTERRUPTED
    report = records_of(tmp_path / "records.jsonl")[-1]
    assert not report["finished"] and [len(row["tokens_per_second"]) for row in report["findings"]] == [2, 2, 2]


def test_a_sweep_runs_every_value_in_turns_and_leaves_the_setting(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[Any, str]] = []
    real = race.run_alone

    def watched(bench: Any, prompt: Any, strategy: Any, settings: Any, **options: Any) -> Generation:
        order.append((settings.gamma, strategy.name))
        return real(bench, prompt, strategy, settings, **options)

    monkeypatch.setattr(race, "run_alone", watched)
    bench = workbench(view, records=tmp_path / "records.jsonl")
    for line in ("/length 8", "Hello", "/sweep gamma 0 2 auto x2"):
        assert bench.handle(line) is Verdict.DONE, view.take()
    assert bench.settings.gamma == 4
    names = ["speculative", "ngram", "target"]
    turned = [*names[1:], names[0]]
    assert order[:9] == [(gamma, name) for gamma in (0, 2, None) for name in names], "to warm up"
    assert order[9:18] == order[:9] and order[18:] == [(gamma, name) for gamma in (2, None, 0) for name in turned]
    rows = records_of(tmp_path / "records.jsonl")[-1]["findings"]
    assert [row["setting"] for row in rows[::3]] == ["gamma 0", "gamma 2", "gamma auto"] and len(rows) == 9
    assert rows[0]["drafted"] == 0 < rows[3]["drafted"] and all(row["same_as_target"] for row in rows)
    assert all(len(row["tokens_per_second"]) == len(row["speedups"]) == 2 for row in rows)
    shown = view.take()[0]
    assert "fastest: " in shown and re.search(r"0 +2 +auto\n +gamma\n", shown)


def swept(bench: Any, file: Path, line: str) -> list[str]:
    assert bench.handle(f"/sweep {line} x1") is Verdict.DONE, line
    report = records_of(file)[-1]
    return list(dict.fromkeys(row["setting"] for row in report["findings"]))


def test_what_can_be_swept(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    bench = workbench(view, records=file)
    for line in ("/length 4", "Hello"):
        bench.handle(line)
    before = bench.settings
    assert swept(bench, file, "processor greedy, nucleus 0.8 0.9") == ["processor greedy", "processor nucleus 0.8 0.9"]
    assert swept(bench, file, "drafter_kind lookup suffix") == ["drafter_kind lookup", "drafter_kind suffix"]
    assert swept(bench, file, "temperature 0 1.5") == ["temperature 0", "temperature 1.5"]
    assert swept(bench, file, "order 2 4") == ["order 2", "order 4"] and bench.settings == before


def test_a_part_of_a_setting_is_that_part_alone(view: Screen) -> None:
    def value(name: str, word: str, settings: Settings) -> Settings:
        return sweep._value(0, name, word, Situation(settings, Registry([]), workbench(view)._bench)).settings

    settings = replace(
        Settings(), processor=TopKNucleusProcessor(0.7, 40, 0.9), ngram_storage=StorageSpec("onelevel", 3)
    )
    assert value("temperature", "1.5", settings).processor == TopKNucleusProcessor(1.5, 40, 0.9)
    assert value("temperature", "1.5", Settings()).processor == MultinomialProcessor(1.5)
    assert value("order", "5", settings).ngram_storage == StorageSpec("onelevel", 5)


def test_ctrl_c_between_two_events_keeps_what_was_done(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = workbench(view, records=tmp_path / "records.jsonl")
    for line in ("/length 4", "Hello"):
        bench.handle(line)
    real = view.renderer.note

    def note(text: str) -> None:
        if text.startswith("2 of 3"):
            raise KeyboardInterrupt
        real(text)

    monkeypatch.setattr(view.renderer, "note", note)
    assert bench.handle("/race 3") is Verdict.INTERRUPTED
    report = records_of(tmp_path / "records.jsonl")[-1]
    assert report["record"] == "race" and [len(row["tokens_per_second"]) for row in report["findings"]] == [2, 2, 2]
    assert "what was finished" in view.take()[1]


def test_what_is_fastest_and_what_is_as_good() -> None:
    def row(setting: str, speeds: list[float], ups: list[float]) -> Finding:
        return Finding((), {"strategy": "ngram", "setting": setting, "tokens_per_second": speeds, "speedups": ups})

    rows = [
        row("gamma 1", [11, 12, 13], [9.0] * 3),
        row("gamma 2", [14, 15, 16], [1.4, 1.5, 1.6]),
        row("gamma 3", [12, 13, 14.5], []),
    ]
    lines = sweep._conclusion(rows)
    assert lines[0] == "fastest: ngram with gamma 2, 15.0 tokens/s, 1.50x target-only there", (
        "a slow baseline makes no setting fast"
    )
    assert lines[1] == "within noise of it: ngram with gamma 3"


def test_ctrl_c_keeps_the_values_that_were_done(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = race.run_alone, iter(range(100))

    def interrupted(*arguments: Any, **options: Any) -> Generation:
        if next(count) == 11:  # six to warm up, three of the first value, and within the second
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(race, "run_alone", interrupted)
    bench = workbench(view, records=tmp_path / "records.jsonl")
    for line in ("/length 4", "Hello"):
        bench.handle(line)
    assert bench.handle("/sweep gamma 1 2") is Verdict.INTERRUPTED
    report = records_of(tmp_path / "records.jsonl")[-1]
    assert not report["finished"] and [row["setting"] for row in report["findings"]] == ["gamma 1"] * 3


def test_what_they_need(view: Screen) -> None:
    bench = workbench(view, tiny_pair())
    assert bench.handle("/race") is Verdict.FAILED and "a prompt is needed" in view.take()[1]
    bench.handle("/length 3")
    bench.handle("Hello")
    for line, words in (
        ("/race 0", "1 to 1000"),
        ("/sweep", "give a setting and values"),
        ("/sweep target on off", "choose one of gamma, drafter_kind"),
        ("/sweep gamma", "give a setting and values"),
        ("/sweep gamma 3 99", "0 to 63"),
        ("/sweep gamma 3 x0", "1 to 100"),
        ("/sweep gamma x3", "give a setting and values"),
        ("/sweep temperature 9999", "out of range"),
    ):
        assert bench.handle(line) is Verdict.FAILED and words in view.take()[1], line
