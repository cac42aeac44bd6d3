"""Speed-ups against target-only in a faster engine: in sentences, findings and records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, open_session, records_of, table_pair

from utils.comparison.reports import Finding, Report
from utils.comparison.second_baseline import FIGURE, second_sentence, with_second_baseline
from utils.config.settings import Settings
from utils.engine.engine_choice import EngineFigures, FasterEngine

PLAIN = FasterEngine("plain", 1.25)
SLOW = EngineFigures(step_seconds=0.05, costs=((2, 1.1), (5, 1.2), (9, 1.5)), prefill=400.0, threads=1, verified=True)


def report_of(conclusion: list[str]) -> Report:
    return Report("race", "", Settings(), (), iter(()), lambda findings: conclusion)


def row(strategy: str, speedup: float | None) -> Finding:
    return Finding((), {"strategy": strategy, "speedup": speedup})


def test_the_second_figure_is_divided_by_the_ratio_of_decode_steps() -> None:
    sentence = second_sentence({"target": [1.0], "speculative": [1.5], "ngram": [1.25, 2.0]}, PLAIN)
    assert "1.25x as fast in the plain engine" in sentence
    assert "speculative 1.20x" in sentence and "ngram 1.00x to 1.60x" in sentence and "target " not in sentence


@pytest.mark.parametrize(("speedups", "other"), [({"ngram": [1.5]}, None), ({"target": [1.0]}, PLAIN), ({}, PLAIN)])
def test_there_is_no_sentence_without_a_faster_engine_or_a_speedup(speedups: Any, other: Any) -> None:
    assert second_sentence(speedups, other) == ""


def test_findings_and_the_conclusion_of_a_report_have_it() -> None:
    findings = [row("target", 1.0), row("speculative", 1.5), row("ngram", None), Finding((), {"mode": "width"})]
    report, changed = with_second_baseline(report_of(["faster"]), findings, PLAIN)
    assert [finding.figures.get(FIGURE, "absent") for finding in changed] == [0.8, 1.2, None, "absent"]
    first, second = report.conclude(changed)
    assert first == "faster" and "1.20x" in second
    same, unchanged = with_second_baseline(report_of(["faster"]), findings, None)
    assert same.conclude(findings) == ["faster"] and unchanged == findings


def slowed(pair: Any, factor: float) -> None:
    """Store figures in which the engine in use is this much slower than another one."""
    faster = replace(SLOW, step_seconds=SLOW.step_seconds / factor)
    pair.engine.table = {"plain": SLOW, "invariant": faster}


@pytest.mark.parametrize(("factor", "is_reported"), [(1.25, True), (1.02, False)])
def test_prompts_reports_and_records_have_it(factor: float, is_reported: bool, view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", table_pair()
    session = open_session(view, pair, records=file)
    slowed(pair, factor)
    for line in ("/length 20", "Hello there"):
        session.handle(line)
    shown = view.take()[0]
    # The texts of random models repeat themselves, so at least one strategy has a speed-up.
    assert ("1.25x as fast in the invariant engine" in shown) is is_reported
    rows = records_of(file)
    for record in rows:
        estimate = record["speedup_vs_baseline"] / factor if is_reported else None
        assert record[FIGURE] == pytest.approx(estimate) if is_reported else record[FIGURE] is None
        other = record["engine"]["faster_baseline"]
        assert other == ({"name": "invariant", "factor": pytest.approx(1.25)} if is_reported else None)
    view.take()
    session.handle("/race 2")
    record = records_of(file)[-1]
    assert (FIGURE in record["findings"][0]) is is_reported
    assert any("1.25x as fast" in line for line in record["conclusion"]) is is_reported
    assert ("1.25x as fast" in view.take()[0]) is is_reported
