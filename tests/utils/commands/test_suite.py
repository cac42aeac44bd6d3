"""/race FILE: its figures by task, the order of runs, what is left out, what Ctrl-C keeps, and its conclusion."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
from fakes import Screen, open_session, records_of, with_speculative
from recordings import before_each_run, interrupt_after

from utils.comparison.strategies import STRATEGIES, Job
from utils.decode.steps import FinishReason, Step
from utils.errors import UserError
from utils.metrics.results import Generation, pooled
from utils.prompts.prompt_files import Prompt, read_prompts
from utils.repl.repl_session import Verdict

TEXTS = {"Hello there": "code", "Once upon a time": "story", "def f(x):": "code"}
NAMES = ["speculative", "ngram", "target"]
SPECULATIVE = STRATEGIES[0]


def prompts_file(folder: Path, rows: list[Any]) -> Path:
    path = folder / "prompts.jsonl"
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return prompts_file(tmp_path, [{"prompt": text, "task": task} for text, task in TEXTS.items()])


def suited(
    view: Screen, folder: Path, prompts: Path, *lines: str, **options: Any
) -> tuple[dict[tuple[str, str], dict[str, Any]], str]:
    """Rows by (task, strategy), and the conclusion."""
    file = folder / "records.jsonl"
    session = open_session(view, records=file, **options)
    for line in (*lines, f"/race {prompts}"):
        assert session.handle(line) is Verdict.DONE, view.take()
    report = records_of(file)[-1]
    return {(row["task"], row["strategy"]): row for row in report["findings"]}, "\n".join(report["conclusion"])


def test_tasks_and_texts_are_read(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "task": " maths \n 2 "},
        {"prompt": "b", "category": "code"},
        {"prompt": "c", "task": 3},
        "d\\ne",
        "",
        '{"prompt": "f"}',
    ]
    expected = [
        Prompt("a", "maths 2"),
        Prompt("b", "code"),
        Prompt("c", "all"),
        Prompt("d\ne", "all"),
        Prompt("f", "all"),
    ]
    assert list(read_prompts(prompts_file(tmp_path, lines))) == expected


def test_figures_are_those_of_the_prompts_themselves(view: Screen, tmp_path: Path, prompts: Path) -> None:
    settings = ("/length 10", "/drafter on", "/beams 2", "/processor multinomial 1", "/verify coupled")
    rows, conclusion = suited(view, tmp_path, prompts, *settings)
    names = ["speculative", "ngram", "target", "drafter", "beam"]
    assert list(rows) == [(task, name) for task in ("code", "story", "all") for name in names]
    session, single = open_session(view, records=tmp_path / "single.jsonl"), tmp_path / "single.jsonl"
    for line in (*settings, *TEXTS):
        assert session.handle(line) is Verdict.DONE
    runs = [run | {"task": TEXTS[run["prompt"]]} for run in records_of(single)]
    for (task, name), row in rows.items():
        part = [run for run in runs if run["strategy"] == name and task in (run["task"], "all")]
        assert row["prompts"] == len(part) == {"code": 2, "story": 1, "all": 3}[task]
        for figure in ("new_tokens", "drafted", "accepted"):
            total = None if part[0][figure] is None else sum(run[figure] for run in part)
            assert row[figure] == total, (task, name, figure)
        if part[0]["target_forwards"] is not None:
            assert row["tokens_per_target_forward"] == row["new_tokens"] / sum(run["target_forwards"] for run in part)
        assert row["pooled_tokens_per_second"] == row["new_tokens"] / row["seconds"]
        assert row["speedup"] == pytest.approx(geometric_mean(row["speedups"])) and len(row["speedups"]) == len(part)
        texts = 0 if name in ("drafter", "beam") else len(part)
        assert (row["same_texts"], row["compared_texts"]) == (texts, texts)
    assert rows["all", "speculative"]["accepted"] > 0 and rows["all", "target"]["speedup"] == 1
    assert conclusion.count("text identical on 3 of 3") == 2 and "/verify" not in conclusion
    shown = view.take()[0]
    row = rows["code", "speculative"]
    assert f"{row['acceptance_rate']:.3f}" in shown and "same 3/3" in shown


def test_strategies_take_turns_at_going_first_and_the_remaining_time_is_shown(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    before_each_run(monkeypatch, lambda strategy, settings: order.append(strategy.name))
    rows = [{"prompt": text, "task": task} for text, task in TEXTS.items()]
    suited(view, tmp_path, prompts_file(tmp_path, ["too long " * 99, *rows]), "/length 4")
    first, second, third = NAMES
    assert order == [first, second, third, second, third, first, third, first, second], (
        "only prompts that can run count"
    )
    estimated = re.findall(r"(\d) of 4, about \d+ s", view.take()[1])
    assert estimated == ["2", "3", "4"]


def test_prompts_without_a_task_are_one_group_and_part_of_all(view: Screen, tmp_path: Path) -> None:
    rows, _ = suited(
        view, tmp_path, prompts_file(tmp_path, ["Hello", "There"]), "/length 3", "/speculative off", "/ngram off"
    )
    assert list(rows) == [("all", "target")]
    mixed = prompts_file(tmp_path, ["Hello", {"prompt": "There", "category": "b"}])
    rows, conclusion = suited(view, tmp_path, mixed, "/length 3", "/speculative off", "/ngram off")
    assert {task: row["prompts"] for (task, _), row in rows.items()} == {"b": 1, "all": 2}
    assert "No enabled strategy drafts" in conclusion


def test_what_cannot_run_is_left_out_and_the_rest_continues(view: Screen, tmp_path: Path) -> None:
    def picky(job: Job) -> Iterator[Step]:
        if len(job.prompt) > 60:
            raise UserError("Too long for me.")
        yield from SPECULATIVE.steps(job)

    path = prompts_file(tmp_path, ["x" * 900, "Hello", "y" * 70])
    rows, conclusion = suited(view, tmp_path, path, "/length 4", strategies=with_speculative(picky))
    assert {name: row["prompts"] for (_, name), row in rows.items()} == {"speculative": 1, "ngram": 2, "target": 2}
    messages = view.take()[1]
    assert messages.count("left out") == 2 and "Too long for me." in messages
    assert "2 of 3 prompts" in conclusion
    session = open_session(view)
    assert session.handle(f"/race {prompts_file(tmp_path, ['x' * 900])}") is Verdict.FAILED
    assert "none of the prompts" in view.take()[1]


def test_repeats_of_a_file_are_groups_of_their_prompts(
    view: Screen, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    file = tmp_path / "records.jsonl"
    session = open_session(view, records=file)
    session.handle("/length 4")
    before_each_run(monkeypatch, lambda strategy, settings: order.append(strategy.name))
    assert session.handle(f"/race 2 {prompts}") is Verdict.DONE
    # Each prompt in another order in each repeat.
    assert order == [name for start in (0, 1, 2, 1, 2, 0) for name in NAMES[start:] + NAMES[:start]]
    report = records_of(file)[-1]
    assert report["record"] == "suite" and report["prompt"] == str(prompts)
    rows = {(row["task"], row["strategy"]): row for row in report["findings"]}
    row = rows["all", "speculative"]
    assert row["prompts"] == row["compared_texts"] == row["same_texts"] == 3 and len(row["speedups"]) == 6
    assert {len(pair) for pair in row["speedups_by_prompt"]} == {2}
    assert sorted(value for pair in row["speedups_by_prompt"] for value in pair) == sorted(row["speedups"])
    assert rows["all", "target"]["verdict"] == "baseline" and row["interval"][0] < row["speedup"] < row["interval"][1]
    assert "/race 2" in view.take()[0]


def test_a_prompt_is_refused_once_in_all_repeats(view: Screen, tmp_path: Path) -> None:
    session = open_session(view)
    assert session.handle("/length 4") is Verdict.DONE
    assert session.handle(f"/race 3 {prompts_file(tmp_path, ['x' * 900, 'Hello'])}") is Verdict.DONE
    assert view.take()[1].count("rompt 1 is left out") == 1


def test_ctrl_c_keeps_the_finished_prompts(
    view: Screen, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(monkeypatch, 5)  # within the second prompt
    session = open_session(view, records=tmp_path / "records.jsonl")
    session.handle("/length 4")
    assert session.handle(f"/race {prompts}") is Verdict.INTERRUPTED
    report = records_of(tmp_path / "records.jsonl")[-1]
    assert not report["finished"] and [(row["task"], row["prompts"]) for row in report["findings"]] == [("code", 1)] * 3
    assert "1 of 3 prompts" in " ".join(report["conclusion"])


def test_a_text_that_may_differ_and_one_that_must_not(view: Screen, tmp_path: Path, prompts: Path) -> None:
    rows, conclusion = suited(view, tmp_path, prompts, "/length 12", "/processor multinomial 1")
    assert "speculative: same distribution of texts" in conclusion
    assert "3 of 3" in conclusion and "not on prompt" not in conclusion, "those of the n-gram drafts must be the same"
    assert rows["all", "speculative"]["same_texts"] < 3

    def wrong(job: Job) -> Iterator[Step]:
        for step in SPECULATIVE.steps(job):
            yield replace(step, token=(step.token or 0) ^ 1) if len(job.prompt) > 48 else step

    rows, conclusion = suited(view, tmp_path, prompts, "/length 6", strategies=with_speculative(wrong))
    numbers = rows["all", "speculative"]["other_texts_at_prompts"]
    assert numbers and f"speculative: text identical on {3 - len(numbers)} of 3" in conclusion
    assert f"not on prompt {', '.join(map(str, numbers))}: " in conclusion


def test_without_the_target_speeds_are_compared(view: Screen, tmp_path: Path, prompts: Path) -> None:
    rows, conclusion = suited(view, tmp_path, prompts, "/length 3", "/target off", "/drafter on")
    assert all(row["speedup"] is None and row["compared_texts"] == 0 for row in rows.values())
    assert "/target on" in conclusion and "drafter" not in conclusion


def test_pooled_rates_weigh_by_length() -> None:
    short = Generation((Step((1, 2), 1, 3),), 1.0, 0.5, FinishReason.LENGTH)
    long = Generation(tuple(Step((1,), 1, 3) for _ in range(9)), 3.0, 0.5, FinishReason.STOP)
    total = pooled([short, long])
    assert (len(total.tokens), total.seconds, total.target_forwards) == (20, 4.0, 10)
    assert (total.accepted, total.drafted) == (10, 11)


def test_invalid_files_are_refused_before_anything_runs(view: Screen, tmp_path: Path) -> None:
    session = open_session(view)
    empty = prompts_file(tmp_path, ["", " "])
    for line, words in (
        ("/race limit=1", "/race prompts.jsonl"),
        (f"/race {tmp_path / 'none'}", str(tmp_path / "none")),
        (f"/race {empty}", str(empty)),
    ):
        assert session.handle(line) is Verdict.FAILED and words in view.take()[1], line
    broken = prompts_file(tmp_path, ["Hello", '{"words": "x"}'])
    assert session.handle(f"/race {broken}") is Verdict.FAILED
    messages = view.take()[1]
    assert "line 2" in messages and "warming" not in messages
