"""/whatif on the screen and in the records: a table, a plot, sentences; and what it cannot tell."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import Screen, records_of, tiny_pair, workbench

from utils.commands.experiments.whatif import Rate
from utils.comparison.reports import Chart
from utils.decode.steps import FinishReason, Step
from utils.metrics.costs import Costs
from utils.metrics.results import Generation
from utils.repl.runner import Verdict
from utils.screen.plots import line_plot


def test_every_gamma_is_told_and_recorded(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    bench = workbench(view, records=file)
    for line in ("/length 12", "/gamma 3", "Hello there", "/drafter_kind loaded suffix", "/whatif"):
        assert bench.handle(line) is Verdict.DONE, view.take()
    shown = view.take()[0]
    runs, report = records_of(file)[:-1], records_of(file)[-1]
    found = {(row["drafter"], row["gamma"]): row for row in report["findings"]}
    assert set(found) == {(name, gamma) for name in ("model", "suffix", "ngram") for gamma in (*range(17), None)}
    for run in runs:
        if run["strategy"] in ("speculative", "ngram"):
            told = found[run["drafter_kind"], 3]
            names = ("rounds", "drafted", "accepted", "tokens_per_target_forward")
            assert [told[name] for name in names] == [run[name] for name in names]
    assert "predicted tokens/s" in shown and "** model" in shown and "the best of each" in shown
    assert "model: best at gamma " in shown and "are what real runs come to" in shown
    assert all(row["exact"] and row["speedup"] > 0 for row in found.values())
    assert found["model", 0]["speedup"] == pytest.approx(1)


def test_under_rules_with_noise_of_their_own_it_is_an_estimate(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    bench = workbench(view, records=file)
    for line in ("/processor multinomial 1", "/length 12", "Hello", "/whatif"):
        bench.handle(line)
    assert "An estimate" in view.take()[0]
    assert {row["drafter"]: row["exact"] for row in records_of(file)[-1]["findings"]} == {"model": False, "ngram": True}
    bench.handle("/verify coupled")
    bench.handle("Hello")
    bench.handle("/whatif")
    assert "An estimate" not in view.take()[0]


def test_what_it_needs(view: Screen) -> None:
    bench = workbench(view)
    assert bench.handle("/whatif") is Verdict.FAILED and "a prompt is needed" in view.take()[1]
    for line in ("/target off", "/length 8", "Hello"):
        bench.handle(line)
    assert bench.handle("/whatif") is Verdict.FAILED and "/target on" in view.take()[1]
    for line in ("/target on", "/length 1", "Hello"):
        bench.handle(line)
    assert bench.handle("/whatif") is Verdict.FAILED and "two tokens" in view.take()[1]
    assert bench.handle("/whatif now") is Verdict.FAILED and "no argument" in view.take()[1]


def test_without_a_drafter_the_storage_is_told_alone(view: Screen, tmp_path: Path) -> None:
    bench = workbench(view, tiny_pair(drafter=False), tmp_path / "records.jsonl")
    for line in ("/length 8", "Hello", "/whatif"):
        assert bench.handle(line) is Verdict.DONE
    assert {row["drafter"] for row in records_of(tmp_path / "records.jsonl")[-1]["findings"]} == {"ngram"}


def test_times_are_those_of_plain_steps_and_the_table_of_costs() -> None:
    run = Generation(tuple(Step((), 0, token) for token in range(5)), 3.0, 1.0, FinishReason.LENGTH)
    rate = Rate.of(run)
    assert (rate.start, rate.step) == (0.5, 0.5)
    rounds = [Step((1, 2), 1, 3), Step((), 0, 4), Step((5,), 1, 6)]
    assert rate.seconds(rounds, Costs((0.1, 0.3)), 3 * 0.25) == pytest.approx(0.5 + 0.5 * (3 + 0.3 + 0.1 + 3 * 0.25))


def test_a_plot_is_plain_text_as_wide_as_it_may_be() -> None:
    drawn = line_plot(Chart({"one": [1, 2, 3, 2], "two": [2, 2, 1]}, "speed", "gamma", list("0123")), width=60)
    lines = drawn.splitlines()
    assert max(map(len, lines)) <= 60 and "\x1b" not in drawn and drawn.count("^") == 4
    assert "speed" in lines[0] and lines[-1].strip() == "gamma"
