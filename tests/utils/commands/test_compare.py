"""/compare: figures on records with known ratios, which runs are matched, and differences within noise."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, open_session, records_of
from recordings import Row, recorded

from utils.commands.compare import AT_OTHER_TIMES, NOT_COMPARED, SAME
from utils.comparison.records import match, read_records
from utils.metrics.intervals import speedup_interval
from utils.repl.repl_session import Verdict

PROMPTS = [f"prompt {number}" for number in range(6)]
SETTINGS = {"length": 128, "processor": "greedy", "seed": 42, "gamma": "auto", "drafter_kind": "loaded", "debug": "off"}
CIRCUMSTANCES: Row = {
    "models": {"target": "big", "drafter": "small", "dtype": "float32"},
    "engine": {"kind": "plain", "threads": 1},
    "versions": {"torch": "2.0"},
    "machine": {"cpu": "One", "gpus": []},
}


def record(prompt: str, speed: float, **changes: Any) -> Row:
    """A record of a generation."""
    row: Row = {
        "schema": 2,
        "record": "generation",
        "prompt": prompt,
        "history": [],
        "strategy": "speculative",
        "drafter_kind": "model",
        "text": "abc",
        "token_ids": [1, 2, 3],
        "prompt_tokens": 4,
        "finish": "length",
        "tokens_per_second": speed,
        "tokens_per_target_forward": 2.0,
        "speedup_vs_baseline": speed / 10,
        "drafted": 10,
        "accepted": 5,
        "rounds": 3,
        "settings": SETTINGS,
        **CIRCUMSTANCES,
    }
    return row | changes


def written(path: Path, rows: Sequence[Row | str]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def compared(
    view: Screen, folder: Path, first: Sequence[Row | str], second: Sequence[Row | str]
) -> tuple[list[Row], str]:
    """The rows and the conclusion."""
    a, b = written(folder / "a.jsonl", first), written(folder / "b.jsonl", second)
    session = open_session(view, records=folder / "compared.jsonl")
    assert session.handle(f"/compare {a} {b}") is Verdict.DONE, view.take()
    report = records_of(folder / "compared.jsonl")[-1]
    assert report["record"] == "compare"
    return report["findings"], "\n".join(report["conclusion"])


def changed(**settings: Any) -> Callable[[str], Row]:
    return lambda prompt: record(prompt, 10.0, settings=SETTINGS | settings)


def test_a_known_ratio_is_found(view: Screen, tmp_path: Path) -> None:
    speeds = [(10.0 + number, (10.0 + number) * (1.5 + number / 50)) for number in range(6)]
    first = [record(prompt, speed, accepted=4) for prompt, (speed, _) in zip(PROMPTS, speeds, strict=True)]
    second = [record(prompt, speed, accepted=6) for prompt, (_, speed) in zip(PROMPTS, speeds, strict=True)]
    rows, conclusion = compared(view, tmp_path, first, list(reversed(second)))
    assert [row["ratios"] for row in rows] == [[pytest.approx(1.5 + number / 50)] for number in range(6)]
    interval = speedup_interval([[ours / theirs] for theirs, ours in speeds])
    assert interval.low > 1 and f"B is faster than A: B / A is {interval.estimate:.2f} " in conclusion
    assert f"interval {interval.low:.2f} to {interval.high:.2f} over 6 prompts" in conclusion
    assert "24/60 = 0.400 in A, 36/60 = 0.600 in B" in conclusion and "6 of 6 are the same" in conclusion
    assert SAME in conclusion and AT_OTHER_TIMES in conclusion and NOT_COMPARED not in conclusion
    shown = view.take()[0]
    assert "10.0 -> 15.0" in shown and "4/10 -> 6/10" in shown


def test_the_other_way_round_it_is_slower(view: Screen, tmp_path: Path) -> None:
    slow, fast = ([record(prompt, speed) for prompt in PROMPTS] for speed in (10.0, 20.0))
    _, conclusion = compared(view, tmp_path, fast, slow)
    assert "B is slower than A: B / A is 0.50" in conclusion


def test_noise_is_no_difference(view: Screen, tmp_path: Path) -> None:
    noise = [0.9, 1.1, 1.02, 0.97, 1.05, 0.96]
    first = [record(prompt, 10.0) for prompt in PROMPTS]
    second = [record(prompt, 10.0 * factor) for prompt, factor in zip(PROMPTS, noise, strict=True)]
    _, conclusion = compared(view, tmp_path, first, second)
    assert "not distinguishable from no difference" in conclusion and "faster" not in conclusion


def test_one_run_each_is_too_few(view: Screen, tmp_path: Path) -> None:
    _, conclusion = compared(view, tmp_path, [record("x", 10.0)], [record("x", 17.0)])
    assert "about 1.70 on one prompt, with a single run in a file: too few to tell" in conclusion
    assert "faster" not in conclusion and "interval" not in conclusion


def test_the_same_file_twice_is_no_difference(view: Screen, tmp_path: Path) -> None:
    rows = [record(prompt, 10.0 + number) for number, prompt in enumerate(PROMPTS)]
    _, conclusion = compared(view, tmp_path, rows, rows)
    assert conclusion.count("not distinguishable") == 1 and SAME in conclusion


def test_repeats_of_one_prompt_give_an_interval_for_it(view: Screen, tmp_path: Path) -> None:
    first = [record("x", speed) for speed in (10.0, 11.0, 10.0, 10.5, 10.2)]
    second = [record("x", speed) for speed in (20.0, 22.0, 20.0)]
    (row,), conclusion = compared(view, tmp_path, first, second)
    # The runs that the other file lacks are averaged with one that it has.
    assert row["ratios"] == [
        pytest.approx(value) for value in (20 / (10 * 10.5) ** 0.5, 22 / (11 * 10.2) ** 0.5, 20 / 10)
    ]
    assert row["lines"] == [[1, 2, 3, 4, 5], [1, 2, 3]] and "over 3 runs of one prompt" in conclusion


def test_a_different_gamma_is_the_difference_that_is_compared(view: Screen, tmp_path: Path) -> None:
    rows, conclusion = compared(
        view, tmp_path, [*map(changed(gamma=4), PROMPTS)], [*map(changed(gamma=8, costs="x"), PROMPTS)]
    )
    assert len(rows) == 6 and "setting gamma: 4 in A, 8 in B." in conclusion and "costs" not in conclusion


def test_each_setting_meets_its_own(view: Screen, tmp_path: Path) -> None:
    first = [record("x", 10.0 * gamma, settings=SETTINGS | {"gamma": gamma}) for gamma in (1, 2, 4)]
    rows, conclusion = compared(view, tmp_path, first, [*reversed(first), record("x", 1.0, settings=SETTINGS)])
    assert [row["ratios"] for row in rows] == [[1.0]] * 3
    assert "B, line 4: the other file has no run" in conclusion


def test_runs_of_another_task_are_named_and_not_compared(view: Screen, tmp_path: Path) -> None:
    first = [
        record("x", 10.0),
        record("longer", 10.0),
        record("only here", 10.0),
        record("x", 9.0, strategy="ngram"),
        record("2", 1.0),
    ]
    second = [record("x", 10.0), record("longer", 10.0, settings=SETTINGS | {"length": 256}), record("new", 5.0)]
    rows, conclusion = compared(view, tmp_path, first, second)
    assert [row["prompt"] for row in rows] == ["x"]
    assert "A, lines 2, 3, 4, 5: the other file has no run" in conclusion
    assert "B, lines 2, 3: the other file has no run" in conclusion and NOT_COMPARED in conclusion


def test_the_target_alone_does_not_depend_on_gamma(view: Screen, tmp_path: Path) -> None:
    target = {"strategy": "target", "drafted": None, "accepted": None, "drafter_kind": None}
    first = [record("x", 10.0, **target), record("x", 11.0, **target, settings=SETTINGS | {"gamma": 2})]
    second = [record("x", 20.0, **target, settings=SETTINGS | {"gamma": 8})]
    (row,), conclusion = compared(view, tmp_path, first, second)
    assert row["tokens_per_second"] == [[10.0, 11.0], [20.0]] and SAME in conclusion
    assert "acceptance" not in conclusion


def test_every_difference_is_named_once(view: Screen, tmp_path: Path) -> None:
    other = json.loads(json.dumps(CIRCUMSTANCES))
    other["models"]["drafter"], other["versions"]["torch"], other["machine"]["cpu"] = "head", "3.0", "Two"
    other["engine"]["threads"], other["machine"]["gpus"] = 8, ["H100"]
    other["models"]["drafter_quantize"] = None  # a head has no number format of its own
    ours = {"models": CIRCUMSTANCES["models"] | {"drafter_quantize": "none"}}
    second = [record(prompt, 10.0, drafter_kind="head", **other) for prompt in PROMPTS]
    _, conclusion = compared(view, tmp_path, [record(prompt, 10.0, **ours) for prompt in PROMPTS], second)
    for line in (
        "models, drafter: small in A, head in B.",
        "versions, torch: 2.0 in A, 3.0 in B.",
        "engine, threads: 1 in A, 8 in B.",
        "machine, cpu: One in A, Two in B.",
        "machine, gpus: none in A, H100 in B.",
        "speculative, drafter kind: model in A, head in B.",
    ):
        assert conclusion.count(line) == 1, line
    assert SAME not in conclusion and "drafter_quantize" not in conclusion


def test_texts_are_compared_by_tokens_or_across_models_by_text(view: Screen, tmp_path: Path) -> None:
    second = [record("x", 10.0, token_ids=[1, 9, 3]), record("y", 10.0, token_ids=[7], models={"target": "other"})]
    rows, conclusion = compared(view, tmp_path, [record("x", 10.0), record("y", 10.0)], second)
    assert [row["same_text"] for row in rows] == [False, True]
    assert rows[0]["first_difference"] == 1 and "differs at token 2" in view.take()[0]
    assert "1 of 2 are the same" in conclusion


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "line 2: this is not valid JSON"),
        (json.dumps(record("x", 1.0) | {"token_ids": "no"}), '"token_ids" has an invalid value'),
        (json.dumps(record("x", 1.0) | {"schema": 9}), "schema 9"),
        (json.dumps(record("x", 1.0) | {"finish": "interrupted"}), "line 2: the run was interrupted"),
        (json.dumps(record("x", 0.0)), "line 2: the run has no speed"),
    ],
)
def test_a_damaged_line_is_one_sentence(view: Screen, tmp_path: Path, line: str, reason: str) -> None:
    good = record("x", 10.0)
    rows, conclusion = compared(view, tmp_path, [good, line, good], [good])
    (sentence,) = (part for part in conclusion.splitlines() if reason in part)
    assert "a.jsonl, line 2" in sentence and NOT_COMPARED in conclusion and rows[0]["lines"] == [[1, 3], [1]]


def test_many_damaged_lines_are_counted(view: Screen, tmp_path: Path) -> None:
    good = record("x", 10.0)
    _, conclusion = compared(view, tmp_path, [good, *["broken"] * 50], [good])
    assert NOT_COMPARED in conclusion and "and 30 more." in conclusion and conclusion.count("JSON") == 20


def test_real_records_match(view: Screen, tmp_path: Path) -> None:
    lines = ("/length 8", "one two", "/race 2", "/whatif", "three")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = (recorded(view, tmp_path / name, *lines) for name in ("a", "b"))
    session = open_session(view, records=tmp_path / "c.jsonl")
    assert session.handle(f"/compare '{first}' {second}") is Verdict.DONE
    report = records_of(tmp_path / "c.jsonl")[-1]
    assert [(row["prompt"], row["strategy"]) for row in report["findings"]] == [
        (prompt, strategy) for prompt in ("one two", "three") for strategy in ("speculative", "ngram", "target")
    ]
    assert all(row["same_text"] for row in report["findings"])
    assert all(len(row["tokens_per_second"][0]) == 1 for row in report["findings"])
    assert "2 records of race. 2 records of whatif." in " ".join(report["conclusion"])
    matches, problems = match(*(read_records(file).runs for file in (first, second)))
    assert len(matches) == 6 and not problems


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("", "two files"),
        ("a.jsonl", "two files"),
        ("a b c", "two files"),
        ("'a b", "quotation mark"),
        ("{0}/good {0}/missing", "missing"),
        ("{0}/good {0}/empty", "no run"),
        ("{0}/good {0}/other", "in common"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(view: Screen, tmp_path: Path, argument: str, words: str) -> None:
    for name, rows in (("good", [record("x", 1.0)]), ("empty", []), ("other", [record("y", 1.0)])):
        written(tmp_path / name, rows)
    session = open_session(view)
    assert session.handle(f"/compare {argument.format(tmp_path)}") is Verdict.FAILED
    messages = view.take()[1]
    assert words in messages and messages.count("\n") == 1


def test_one_run_compared_with_many_is_one_ratio(view: Screen, tmp_path: Path) -> None:
    """The noise of the single run is in every ratio, so they would seem to agree."""
    many = [record(PROMPTS[0], speed) for speed in (14.9, 15.0, 15.1, 15.0, 15.0)]
    rows, conclusion = compared(view, tmp_path, [record(PROMPTS[0], 10.0)], many)
    assert rows[0]["ratios"] == [pytest.approx(1.5, rel=0.01)]
    assert "faster" not in conclusion and "too few" in conclusion
    rows, _ = compared(view, tmp_path, many[:4], many[:2])
    assert len(rows[0]["ratios"]) == 2


def test_several_settings_of_one_prompt_are_not_several_prompts(view: Screen, tmp_path: Path) -> None:
    def rows_of(factor: float) -> list[Row]:
        return [
            record(prompt, factor * (10 + gamma), settings=SETTINGS | {"gamma": gamma})
            for prompt, factor in ((PROMPTS[0], 1.0), (PROMPTS[1], factor))
            for gamma in range(1, 7)
        ]

    rows, conclusion = compared(view, tmp_path, rows_of(1.0), rows_of(1.5))
    assert len(rows) == 12 and "over 2 prompts" in conclusion and "faster" not in conclusion
