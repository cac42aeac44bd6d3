"""/replay: recorded runs give the same results again. Differences, and records that cannot run again, are named."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from fakes import Screen, open_session, records_of, screen, tiny_pair
from recordings import Row, edited, interrupt_after, recorded

from utils.commands import compare
from utils.commands.compare import SAME
from utils.commands.experiments.reruns import DIFFERENT, KEPT_STORAGE
from utils.repl.repl_session import Verdict

SAMPLING = ("/length 14", "/processor multinomial 1", "Hello there")


@pytest.fixture(autouse=True)
def same_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions may otherwise choose different numbers of threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@cache
def _sampled() -> str:
    with TemporaryDirectory() as folder:
        return recorded(screen(), Path(folder), *SAMPLING).read_text()


def sampled(folder: Path) -> Path:
    """A file with the records of a session that processed SAMPLING."""
    file = folder / "runs.jsonl"
    file.write_text(_sampled())
    return file


def replayed(view: Screen, file: Path, pair: Any = None) -> tuple[list[Row], str]:
    """The rows and the conclusion of a replay in a new session, which the replay does not change."""
    again = file.with_name("again.jsonl")
    session = open_session(view, pair, records=again, draft_seconds=lambda job: 0.5)
    before = session.settings
    assert session.handle(f"/replay {file}") is Verdict.DONE, view.take()
    assert session.settings is before and not session.harness.state.storage and session.harness.state.last is None
    report = records_of(again)[-1]
    return report["findings"], "\n".join(report["conclusion"])


def test_a_different_seed_is_noticed(view: Screen, tmp_path: Path) -> None:
    file = edited(sampled(tmp_path), lambda row: row["settings"].update(seed=43))
    rows, conclusion = replayed(view, file)
    assert all(row["first_difference"] is not None for row in rows) and conclusion.count("texts: 0 of 1") == 3
    assert f"token {rows[0]['first_difference'] + 1}" in view.take()[0]
    assert compare.UNEXPLAINED in conclusion


def test_a_different_gamma_is_noticed(view: Screen, tmp_path: Path) -> None:
    file = edited(recorded(view, tmp_path, "/length 14", "Hello there"), lambda row: row["settings"].update(gamma=3))
    rows, conclusion = replayed(view, file)
    assert [row["drafted"][0] == row["drafted"][1] for row in rows] == [False, False, True]
    assert conclusion.count("texts: 1 of 1") == 3 and conclusion.count("acceptance: ") == 2
    row = rows[0]
    assert f"{row['accepted'][0]}/{row['drafted'][0]} -> {row['accepted'][1]}/{row['drafted'][1]}" in view.take()[0]


def test_a_different_token_is_noticed_at_its_position(view: Screen, tmp_path: Path) -> None:
    def change(row: Row) -> None:
        row["token_ids"][5] ^= 1

    rows, _ = replayed(view, edited(sampled(tmp_path), change))
    assert [row["first_difference"] for row in rows] == [5, 5, 5] and view.take()[0].count("token 6") == 3


def test_different_circumstances_are_named_once_each(view: Screen, tmp_path: Path) -> None:
    def change(row: Row) -> None:
        row["versions"]["torch"] = "1.0"
        row["models"] |= {"target": "older", "memory": 7, "drafter_memory": 8}
        row["engine"] |= {"threads": 99, "reason": "another"}
        if row["strategy"] == "ngram":
            row["versions"]["numpy"] = "0.9"
            row["drafter_kind"] = "other"

    rows, conclusion = replayed(view, edited(sampled(tmp_path), change))
    lines = conclusion.split(f"{DIFFERENT}\n")[1].splitlines()
    changes = [
        ("torch", "1.0"),
        ("target", "older", "tiny-target"),
        ("threads", "99"),
        ("numpy", "0.9", "1 of 3"),
        ("ngram", "other", "1 of 3"),
    ]
    assert len(lines) == len(changes)
    assert all(word in line for line, words in zip(lines, changes, strict=True) for word in words)
    assert all(row["same_text"] for row in rows)


def test_settings_that_are_not_supported_here_are_named(view: Screen, tmp_path: Path) -> None:
    def change(row: Row) -> None:
        row["settings"] |= {"length": 100_000, "wings": 2, "gamma": "", "verify": None}
        del row["settings"]["top_k_filler"]

    rows, conclusion = replayed(view, edited(recorded(view, tmp_path, "/length 128", "/gamma auto", "Hello"), change))
    sentences = {line.split(":")[0]: line for line in conclusion.splitlines() if line.startswith("setting ")}
    for name, *words in (
        ("wings",),
        ("length", "100000", "1 to 256", "128"),
        ("gamma", "auto"),
        ("verify", "'none'", "rejection"),
        ("top_k_filler", "3"),
    ):
        assert all(word in sentences[f"setting {name}"] for word in words), sentences
    assert all(row["first_difference"] is None for row in rows)


def test_records_that_cannot_run_again_are_left_out_with_a_reason(view: Screen, tmp_path: Path) -> None:
    changes: dict[str, Row] = {"ngram": {"strategy": "ngrams"}, "target": {"finish": "interrupted"}}

    def change(row: Row) -> None:
        row |= changes.get(row.get("strategy", ""), {})

    file = edited(recorded(view, tmp_path, *SAMPLING, "/race 1", "/whatif", "/race 1"), change)
    session = open_session(view, tiny_pair(drafter=False))
    assert session.handle(f"/replay {file}") is Verdict.FAILED
    message = view.take()[1]
    assert "line 1: No drafter" in message and "line 2: " in message and "Did you mean ngram?" in message
    changes["ngrams"] = {"strategy": "ngram"}
    rows, conclusion = replayed(view, edited(file, change))
    assert [row["strategy"] for row in rows] == ["speculative", "ngram"] and "the run was interrupted" in conclusion
    assert "1 record of whatif" in conclusion and "2 records of race" in conclusion


def test_a_conversation_is_replayed_turn_by_turn(view: Screen, tmp_path: Path) -> None:
    lines = ("/turns on", "/processor multinomial 1", "/verify coupled", "one two", "three", "four")
    file = recorded(view, tmp_path, *lines)
    runs = records_of(file)
    assert [run["turn"] for run in runs] == [0, 0, 0, 1, 1, 1, 2, 2, 2] and len(runs[-1]["history"]) == 4
    rows, _ = replayed(view, file)
    assert [row["first_difference"] for row in rows] == [None] * 9
    forgotten = edited(file, lambda row: row.update(history=[]))
    assert any(row["first_difference"] is not None for row in replayed(view, forgotten)[0][3:])


def test_an_empty_history_is_the_first_turn(view: Screen, tmp_path: Path) -> None:
    file = edited(sampled(tmp_path), lambda row: row.update(history=[], turn=0))
    assert [row["first_difference"] for row in replayed(view, file)[0]] == [None] * 3


def test_storages_kept_between_prompts_are_named(view: Screen, tmp_path: Path) -> None:
    file = recorded(view, tmp_path, "/length 14", "/reset_in_between off", "a b a b", "a b a b")
    rows, conclusion = replayed(view, file)
    assert [row["first_difference"] for row in rows] == [None] * 6
    assert f"{KEPT_STORAGE} (4 of 6 comparisons)" in conclusion
    assert rows[4]["accepted"][0] != rows[4]["accepted"][1], "the second time the storage held the answer"


def test_missing_circumstances_are_named(view: Screen, tmp_path: Path) -> None:
    file = recorded(view, tmp_path, "/length 8", "Hello")
    rows, conclusion = replayed(view, edited(file, lambda row: row.update(versions={}, engine={})))
    assert all(line in conclusion for line in ("versions: not recorded in A", "engine: not recorded in A"))
    assert SAME not in conclusion and [row["first_difference"] for row in rows] == [None] * 3


def test_a_different_chat_template_is_named(view: Screen, tmp_path: Path) -> None:
    pair = tiny_pair()
    pair.tokenizer.chat_template = "New: " + pair.tokenizer.chat_template
    rows, conclusion = replayed(view, sampled(tmp_path), pair)
    assert len(rows) == 3 and "the prompt has a different number of tokens" in conclusion


def test_invalid_files_are_refused(view: Screen, tmp_path: Path) -> None:
    session, empty, binary = open_session(view), tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe")
    for line, words in (
        ("/replay", "/replay runs.jsonl"),
        (f"/replay {tmp_path / 'none'}", str(tmp_path / "none")),
        (f"/replay {binary}", "UTF-8"),
        (f"/replay {empty}", str(empty)),
    ):
        assert session.handle(line) is Verdict.FAILED and words in view.take()[1], line


def test_ctrl_c_keeps_the_finished_rows(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sampled(tmp_path)
    interrupt_after(monkeypatch, 4)  # two runs of each record, the first of them to warm up
    session = open_session(view, records=tmp_path / "again.jsonl")
    assert session.handle(f"/replay {file}") is Verdict.INTERRUPTED
    report = records_of(tmp_path / "again.jsonl")[-1]
    assert len(report["findings"]) == 2 and "1 of 3 records" in " ".join(report["conclusion"])
    assert "1 of 3 (speculative)" in view.take()[1]


SESSIONS = {
    "greedy": (
        "/drafter on",
        "/beams 3",
        "Hello\\nthere",
        "/gamma auto",
        "Once upon a time",
        "/chat off",
        "/gamma 2",
        "a b a b a b",
    ),
    "rules": (
        "/drafter on",
        "/processor multinomial 1",
        "Hello",
        "/verify coupled",
        "Hello",
        "/verify block",
        "/gamma auto",
        "Hello",
    ),
    "processors": (
        "/processor nucleus 0.8 0.9",
        "Hi",
        "/processor topk 1.5 20",
        "/seed 7",
        "Hi",
        "/processor topknucleus 0.7 40 0.9",
        "/cache",
        "Hi",
    ),
    "drafters": (
        "/processor multinomial 0.9",
        "/drafter_kind loaded suffix chain lookup",
        "/gamma auto",
        "a b a b",
        "/gamma 3",
        "a b",
    ),
    "storages": (
        "/ngram kind onelevel 4",
        "/ngram candidates 1",
        "a a a",
        "/system Be brief.",
        "b",
        "/system none",
        "/special on",
        "<|im_end|>x",
    ),
}


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(lines, marks=pytest.mark.full if name in ("processors", "storages") else (), id=name)
        for name, lines in SESSIONS.items()
    ],
)
def test_a_replay_gives_the_same_results(lines: tuple[str, ...], view: Screen, tmp_path: Path) -> None:
    file = recorded(view, tmp_path, "/length 8", *lines, draft_seconds=lambda job: 0.001)
    rows, conclusion = replayed(view, file)
    runs = records_of(file)
    assert [row["lines"] for row in rows] == [[[number], [number]] for number in range(1, len(runs) + 1)]
    assert [row["strategy"] for row in rows] == [run["strategy"] for run in runs] and len(rows) >= 9
    assert all(row["same_text"] and row["first_difference"] is None for row in rows), view.take()[0]
    for row, run in zip(rows, runs, strict=True):
        assert row["accepted"] == [run["accepted"]] * 2 and row["drafted"] == [run["drafted"]] * 2
        (before,), (now,) = row["tokens_per_second"]
        assert row["ratios"] == [pytest.approx(now / before)] and before == run["tokens_per_second"]
    assert SAME in conclusion and conclusion.count("texts: ") == len({run["strategy"] for run in runs})
