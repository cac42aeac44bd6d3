"""/suite: a file of prompts by task: its figures, its turns, what is left out, what Ctrl-C leaves, and what is said of the texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
from fakes import Screen, records_of, with_speculative, workbench

import infer
from utils.commands.experiments import suite
from utils.commands.experiments.suite import _best
from utils.comparison.reports import time_left
from utils.comparison.strategies import Job
from utils.decode.steps import FinishReason, Step
from utils.errors import UserError
from utils.metrics.results import Generation, pooled
from utils.prompts.prompt_files import Prompt, read_prompts
from utils.repl.runner import Verdict

TEXTS = {"Hello there": "code", "Once upon a time": "story", "def f(x):": "code"}


def prompts_file(folder: Path, rows: list[Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return prompts_file(tmp_path, [{"prompt": text, "task": task} for text, task in TEXTS.items()])


def suited(
    view: Screen, folder: Path, prompts: Path, *lines: str, **options: Any
) -> tuple[dict[tuple[str, str], dict[str, Any]], str]:
    """Rows by (task, strategy), and the conclusion."""
    file = folder / "records.jsonl"
    bench = workbench(view, records=file, **options)
    for line in (*lines, f"/suite {prompts}"):
        assert bench.handle(line) is Verdict.DONE, view.take()
    report = records_of(file)[-1]
    return {(row["task"], row["strategy"]): row for row in report["findings"]}, "\n".join(report["conclusion"])


def test_tasks_and_texts_are_read(tmp_path: Path) -> None:
    told = [
        {"prompt": "a", "task": " maths \n 2 "},
        {"prompt": "b", "category": "code"},
        {"prompt": "c", "task": 3},
        "d\\ne",
        "",
        '{"prompt": "f"}',
    ]
    wanted = [
        Prompt("a", "maths 2"),
        Prompt("b", "code"),
        Prompt("c", "all"),
        Prompt("d\ne", "all"),
        Prompt("f", "all"),
    ]
    assert list(read_prompts(prompts_file(tmp_path, told))) == wanted


def test_figures_are_those_of_the_prompts_themselves(view: Screen, tmp_path: Path, prompts: Path) -> None:
    settings = ("/length 10", "/drafter on", "/beams 2", "/processor multinomial 1", "/verify coupled")
    rows, conclusion = suited(view, tmp_path, prompts, *settings)
    names = ["speculative", "ngram", "target", "drafter", "beam"]
    assert list(rows) == [(task, name) for task in ("code", "story", "all") for name in names]
    bench, single = workbench(view, records=tmp_path / "single.jsonl"), tmp_path / "single.jsonl"
    for line in (*settings, *TEXTS):
        assert bench.handle(line) is Verdict.DONE
    runs = [run | {"task": TEXTS[run["prompt"]]} for run in records_of(single)]
    for (task, name), row in rows.items():
        part = [run for run in runs if run["strategy"] == name and task in (run["task"], "all")]
        assert row["prompts"] == len(part) == {"code": 2, "story": 1, "all": 3}[task]
        for figure in ("new_tokens", "drafted", "accepted"):
            wanted = None if part[0][figure] is None else sum(run[figure] for run in part)
            assert row[figure] == wanted, (task, name, figure)
        if part[0]["target_forwards"] is not None:
            assert row["tokens_per_target_forward"] == row["new_tokens"] / sum(run["target_forwards"] for run in part)
        assert row["tokens_per_second"] == row["new_tokens"] / row["seconds"]
        assert row["speedup"] == pytest.approx(geometric_mean(row["speedups"])) and len(row["speedups"]) == len(part)
        assert (row["same_texts"], row["compared_texts"]) == (
            (0, 0) if name in ("drafter", "beam") else (len(part), len(part))
        )
    assert rows["all", "speculative"]["accepted"] > 0 and rows["all", "target"]["speedup"] == 1
    assert "Texts that had to be the target's, and are: 6 of 6." in conclusion and "may differ" not in conclusion
    shown = view.take()[0]
    row = rows["code", "speculative"]
    assert f"{row['accepted']}/{row['drafted']} = {row['acceptance_rate']:.3f}" in shown and "same 3 of 3" in shown
    assert f"{min(row['speedups']):.2f} - {max(row['speedups']):.2f}" in shown


def test_every_prompt_begins_with_another_strategy_and_time_is_told(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = suite.run_alone

    def watched(bench: Any, ids: Any, strategy: Any, settings: Any) -> Generation:
        order.append(strategy.name)
        return replace(real(bench, ids, strategy, settings), seconds=5.0)

    monkeypatch.setattr(suite, "run_alone", watched)
    rows = [{"prompt": text, "task": task} for text, task in TEXTS.items()]
    suited(view, tmp_path, prompts_file(tmp_path, ["too long " * 99, *rows]), "/length 4")
    assert order == [
        "speculative",
        "ngram",
        "target",
        "ngram",
        "target",
        "speculative",
        "target",
        "speculative",
        "ngram",
    ]
    messages = view.take()[1]
    assert "2 of 4 (code) ...\n3 of 4 (story), about 30 s left ...\n4 of 4 (code), about 15 s left ..." in messages
    assert time_left(3.0, 0, 4) == ""


def test_prompts_without_a_task_are_one_group_and_count_among_all(view: Screen, tmp_path: Path) -> None:
    rows, _ = suited(
        view, tmp_path, prompts_file(tmp_path, ["Hello", "There"]), "/length 3", "/speculative off", "/ngram off"
    )
    assert list(rows) == [("all", "target")]
    mixed = prompts_file(tmp_path, ["Hello", {"prompt": "There", "category": "b"}])
    rows, told = suited(view, tmp_path, mixed, "/length 3", "/speculative off", "/ngram off")
    assert {task: row["prompts"] for (task, _), row in rows.items()} == {"b": 1, "all": 2}
    assert "b: nothing is faster than the target alone." in told


def test_what_cannot_be_run_is_left_out_and_the_rest_goes_on(view: Screen, tmp_path: Path) -> None:
    def picky(job: Job) -> Iterator[Step]:
        if len(job.prompt) > 60:
            raise UserError("Too long for me.")
        yield from infer._speculative(job)

    path = prompts_file(tmp_path, ["x" * 900, "Hello", "y" * 70])
    rows, told = suited(view, tmp_path, path, "/length 4", strategies=with_speculative(picky))
    assert {name: row["prompts"] for (_, name), row in rows.items()} == {"speculative": 1, "ngram": 2, "target": 2}
    messages = view.take()[1]
    assert messages.count("left out. ") == 2 and "speculative: left out. Too long for me." in messages
    assert "2 of 3 prompts were run." in told
    bench = workbench(view)
    assert bench.handle(f"/suite {prompts_file(tmp_path, ['x' * 900])}") is Verdict.FAILED
    assert "none of the prompts could be run" in view.take()[1]


def test_ctrl_c_keeps_the_prompts_that_were_done(
    view: Screen, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = suite.run_alone, iter(range(100))

    def interrupted(*arguments: Any) -> Generation:
        if next(count) >= 5:  # within the second prompt
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(suite, "run_alone", interrupted)
    bench = workbench(view, records=tmp_path / "records.jsonl")
    bench.handle("/length 4")
    assert bench.handle(f"/suite {prompts}") is Verdict.INTERRUPTED
    report = records_of(tmp_path / "records.jsonl")[-1]
    assert not report["finished"] and [(row["task"], row["prompts"]) for row in report["findings"]] == [("code", 1)] * 3
    assert "1 of 3 prompts were run." in report["conclusion"]


def test_a_text_that_may_differ_and_one_that_may_not(view: Screen, tmp_path: Path, prompts: Path) -> None:
    rows, told = suited(view, tmp_path, prompts, "/length 12", "/processor multinomial 1")
    assert "speculative: under /verify rejection with sampling a text may differ" in told
    assert "are: 3 of 3." in told and "Other texts" not in told, "those of the n-gram storage had to be the same"
    assert rows["all", "speculative"]["same_texts"] < 3

    def wrong(job: Job) -> Iterator[Step]:
        for step in infer._speculative(job):
            yield replace(step, token=(step.token or 0) ^ 1) if len(job.prompt) > 48 else step

    rows, told = suited(view, tmp_path, prompts, "/length 6", strategies=with_speculative(wrong))
    places = rows["all", "speculative"]["other_texts_at_prompts"]
    assert (
        places and f"Other texts: speculative at prompt {', '.join(map(str, places))}: a rounding tie perhaps" in told
    )
    assert f"are: {6 - len(places)} of 6." in told


def test_without_the_target_speeds_are_told(view: Screen, tmp_path: Path, prompts: Path) -> None:
    rows, told = suited(view, tmp_path, prompts, "/length 3", "/target off", "/drafter on")
    assert all(row["speedup"] is None and row["compared_texts"] == 0 for row in rows.values())
    assert "tokens/s; /target on gives speed-ups." in told and "Texts that" not in told and "drafter is" not in told


def test_the_best_strategy_keeps_the_targets_law() -> None:
    def row(name: str, up: float, lossless: bool = True) -> dict[str, Any]:
        return {"strategy": name, "speedup": up, "speedups": [up, 0.9], "lossless": lossless, "tokens_per_second": 1.0}

    assert _best("maths", [row("a", 1.2), row("b", 1.5), row("drafter", 9, False), row("target", 1)]) == (
        "maths: b is the fastest, 1.50x target-only, faster on 1 of 2."
    )
    assert "nothing is faster" in _best("maths", [row("a", 0.9), row("target", 1.0)])
    assert "no strategy was on" in _best("maths", [row("drafter", 9, False)])


def test_pooled_rates_weigh_by_length() -> None:
    short = Generation((Step((1, 2), 1, 3),), 1.0, 0.5, FinishReason.LENGTH)
    long = Generation(tuple(Step((1,), 1, 3) for _ in range(9)), 3.0, 0.5, FinishReason.STOP)
    total = pooled([short, long])
    assert (total.tokens_per_second, total.accepted, total.drafted, total.tokens_per_target_forward) == (
        5.0,
        10,
        11,
        2.0,
    )


def test_what_it_needs(view: Screen, tmp_path: Path) -> None:
    bench = workbench(view)
    empty = prompts_file(tmp_path, ["", " "])
    for line, words in (
        ("/suite", "give a file, for example: /suite prompts.jsonl"),
        (f"/suite {tmp_path / 'none'}", "cannot be read: No such file"),
        (f"/suite {empty}", "holds no prompt"),
    ):
        assert bench.handle(line) is Verdict.FAILED and words in view.take()[1], line
    broken = prompts_file(tmp_path, ["Hello", '{"text": "x"}'])
    assert bench.handle(f"/suite {broken}") is Verdict.FAILED
    messages = view.take()[1]
    assert "line 2" in messages and "warming" not in messages
