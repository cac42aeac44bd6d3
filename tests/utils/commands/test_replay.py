"""/replay: recorded runs come out the same again; what does not, and what is not as it was, is noticed and named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, records_of, tiny_pair, with_speculative, workbench

import infer
from utils.commands.experiments import replay
from utils.commands.experiments.replay import _speed
from utils.comparison.strategies import Job
from utils.decode.steps import Step
from utils.metrics.results import Generation
from utils.repl.runner import Verdict

Row = dict[str, Any]
SAMPLING = ("/length 14", "/processor multinomial 1", "Hello there")


def recorded(view: Screen, folder: Path, *lines: str, **options: Any) -> Path:
    """A file of records of these lines."""
    file = folder / "runs.jsonl"
    bench = workbench(view, records=file, **options)
    for line in lines:
        bench.handle(line)
    view.take()
    return file


def edited(file: Path, change: Callable[[Row], None]) -> Path:
    rows = records_of(file)
    for row in rows:
        change(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def replayed(view: Screen, file: Path, pair: Any = None) -> tuple[list[Row], str]:
    """The rows and the conclusion of a new session's replay, which is as it was before."""
    again = file.with_name("again.jsonl")
    bench = workbench(view, pair, records=again, draft_seconds=lambda job, kind: 0.5)
    before = bench.settings
    assert bench.handle(f"/replay {file}") is Verdict.DONE, view.take()
    assert bench.settings is before and not bench._bench.memory.storage and bench._bench.memory.last is None
    report = records_of(again)[-1]
    return report["findings"], "\n".join(report["conclusion"])


@pytest.fixture(autouse=True)
def same_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a session found to help may be others the next time."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


SESSIONS = {
    "greedy": "drafter on; beams 3; say Hello\\nthere; gamma auto; say Once upon a time; chat off; gamma 2; say a b a b a b",
    "rules": "drafter on; processor multinomial 1; say Hello; verify coupled; say Hello; verify block; gamma auto; say Hello",
    "laws": "processor nucleus 0.8 0.9; say Hi; processor topk 1.5 20; seed 7; say Hi; processor topknucleus 0.7 40 0.9; cache; say Hi",
    "drafters": "processor multinomial 0.9; drafter_kind loaded suffix chain layers:1 lookup; gamma auto; say a b a b; gamma 3; say a b",
    "storages": "set_ngramstorage onelevel 4; top_k_filler 1; say a a a; system Be brief.; say b; system none; special on; say <|im_end|>x",
}


@pytest.mark.parametrize("lines", SESSIONS.values(), ids=SESSIONS)
def test_everything_comes_out_the_same_again(lines: str, view: Screen, tmp_path: Path) -> None:
    file = recorded(
        view, tmp_path, "/length 14", *(f"/{line}" for line in lines.split("; ")), draft_seconds=lambda job, kind: 0.001
    )
    rows, told = replayed(view, file)
    runs = records_of(file)
    assert [row["line"] for row in rows] == list(range(1, len(runs) + 1)) and len(rows) >= 9
    assert [row["strategy"] for row in rows] == [run["strategy"] for run in runs]
    assert all(row["first_difference"] is None and row["same_acceptance"] is not False for row in rows), view.take()[0]
    for row, run in zip(rows, runs, strict=True):
        assert row["accepted"] == [run["accepted"]] * 2 and row["drafted"] == [run["drafted"]] * 2
        assert row["prompt_tokens"] == [run["prompt_tokens"]] * 2 and row["differences"] == []
        if run["tokens_per_target_forward"] is not None:
            assert row["tokens_per_target_forward"] == [run["tokens_per_target_forward"]] * 2
        assert row["ratio"] == pytest.approx(row["tokens_per_second"][1] / run["tokens_per_second"])
    drafting = sum(run["drafted"] is not None for run in runs)
    assert f"{len(rows)} of {len(rows)} texts are the same." in told and f"same in {drafting} of {drafting}." in told
    assert "settings are as they were" in told and "one run each" in told


def test_another_seed_is_noticed(view: Screen, tmp_path: Path) -> None:
    file = edited(recorded(view, tmp_path, *SAMPLING), lambda row: row["settings"].update(seed=43))
    rows, told = replayed(view, file)
    assert all(row["first_difference"] is not None for row in rows) and "0 of 3 texts are the same." in told
    assert f"differs at token {rows[0]['first_difference'] + 1}" in view.take()[0]
    assert "Nothing that is recorded explains it" in told


def test_another_number_of_drafts_is_noticed(view: Screen, tmp_path: Path) -> None:
    file = edited(recorded(view, tmp_path, "/length 14", "Hello there"), lambda row: row["settings"].update(gamma=3))
    rows, told = replayed(view, file)
    assert [row["same_acceptance"] for row in rows] == [False, False, None]
    assert "3 of 3 texts are the same." in told and "Acceptance is the same in 0 of 2." in told
    row = rows[0]
    assert f"{row['accepted'][0]}/{row['drafted'][0]} -> {row['accepted'][1]}/{row['drafted'][1]}" in view.take()[0]


def test_another_token_is_noticed_at_its_place(view: Screen, tmp_path: Path) -> None:
    def change(row: Row) -> None:
        row["token_ids"][5] ^= 1

    rows, _ = replayed(view, edited(recorded(view, tmp_path, *SAMPLING), change))
    assert [row["first_difference"] for row in rows] == [5, 5, 5] and view.take()[0].count("differs at token 6") == 3


def test_other_circumstances_are_named_once_each(view: Screen, tmp_path: Path) -> None:
    def change(row: Row) -> None:
        row["versions"]["torch"] = "1.0"
        row["models"] |= {"target": "older", "memory": 7, "drafter_memory": 8}
        row["engine"] |= {"threads": 99, "reason": "another"}
        if row["strategy"] == "ngram":
            row["versions"]["numpy"] = "0.9"
            row["drafter_kind"] = "other"

    rows, told = replayed(view, edited(recorded(view, tmp_path, *SAMPLING), change))
    lines = told.split("What is not as it was:\n")[1].splitlines()
    assert len(lines) == 5 and lines[0].startswith("versions, torch: 1.0 then, ") and lines[0].endswith(" now")
    assert lines[1] == "models, target: older then, tiny-target now" and lines[2].startswith(
        "engine, threads: 99 then, "
    )
    assert lines[3].startswith("versions, numpy: 0.9 then") and lines[3].endswith("(1 of 3 records)")
    assert lines[4] == "ngram drafts by: other then, ngram now (1 of 3 records)"
    assert all(row["first_difference"] is None for row in rows)


def test_settings_that_cannot_be_taken_over_are_told(view: Screen, tmp_path: Path) -> None:
    def change(row: Row) -> None:
        row["settings"] |= {"length": 100_000, "wings": 2, "cache": 1, "gamma": "", "verify": None}
        del row["settings"]["top_k_filler"]

    rows, told = replayed(view, edited(recorded(view, tmp_path, "/length 35", "/gamma auto", "Hello"), change))
    for words in (
        "setting wings: not known here",
        "setting length: 100000 is out of range: 1 to 256; it is 35 instead",
        "setting cache: '1' is no value of it; it is on instead",
        "setting gamma: '' is no value of it; it is auto instead",
        "setting verify: 'None' is no value of it; it is rejection instead",
        "setting top_k_filler: not recorded; it is 3 instead",
    ):
        assert words in told.splitlines(), told
    assert all(row["first_difference"] is None for row in rows)


def test_what_cannot_be_run_again_is_left_out_with_a_reason(view: Screen, tmp_path: Path) -> None:
    changes: dict[str, Row] = {"ngram": {"strategy": "ngrams"}, "target": {"finish": "interrupted", "token_ids": []}}

    def change(row: Row) -> None:
        row |= changes.get(row.get("strategy", ""), {})

    file = edited(recorded(view, tmp_path, *SAMPLING, "/race 1", "/whatif", "/race 1"), change)
    rows, told = replayed(view, file, tiny_pair(drafter=False))
    assert [bool(row["left_out"]) for row in rows] == [True] * 3 and len(rows) == 3
    assert "No drafter is loaded" in rows[0]["left_out"] and "interrupted before its first token" in rows[2]["left_out"]
    assert "Did you mean ngram?" in rows[1]["left_out"]
    assert "3 of 3 records were left out" in told and "texts are the same" not in told
    assert (
        "Records of reports, which are not replayed: race 2, whatif 1." in told
        and "models, drafter: tiny-drafter then, none now" in told
    )


def test_a_conversation_is_replayed_turn_by_turn(view: Screen, tmp_path: Path) -> None:
    lines = ("/turns on", "/processor multinomial 1", "/verify coupled", "one two", "three", "four")
    file = recorded(view, tmp_path, *lines)
    told = records_of(file)
    assert [row["turn"] for row in told] == [0, 0, 0, 1, 1, 1, 2, 2, 2] and len(told[-1]["history"]) == 4
    rows, _ = replayed(view, file)
    assert [row["first_difference"] for row in rows] == [None] * 9 and all(
        row["prompt_tokens"][0] == row["prompt_tokens"][1] for row in rows
    )
    forgotten = edited(file, lambda row: row.update(history=[]))
    assert any(row["first_difference"] is not None for row in replayed(view, forgotten)[0][3:])


def test_an_empty_history_is_no_conversation(view: Screen, tmp_path: Path) -> None:
    file = edited(recorded(view, tmp_path, *SAMPLING), lambda row: row.update(history=[], turn=0))
    assert "3 of 3 texts are the same." in replayed(view, file)[1]


def interrupted_after(count: int) -> Callable[[Job], Iterator[Step]]:
    def steps(job: Job) -> Iterator[Step]:
        for number, step in enumerate(infer._speculative(job)):
            if number == count and job.settings.length > 4:  # not while warming up
                raise KeyboardInterrupt
            yield step

    return steps


def test_an_interrupted_run_is_compared_as_far_as_it_went(view: Screen, tmp_path: Path) -> None:
    file = recorded(
        view,
        tmp_path,
        "/length 30",
        "/processor multinomial 1",
        "Hello",
        strategies=with_speculative(interrupted_after(4)),
    )
    (run,) = records_of(file)
    assert run["finish"] == "interrupted" and run["rounds"] == 4 and 0 < run["accepted"] < run["drafted"]
    rows, told = replayed(view, file)
    assert rows[0]["first_difference"] is None and rows[0]["same_acceptance"] is True and rows[0]["ratio"] is None
    assert rows[0]["drafted"] == [run["drafted"]] * 2 and "Speed" not in told
    assert "same, as far as it went" in view.take()[0]
    rows, _ = replayed(view, edited(file, lambda row: row["settings"].update(seed=1)))
    assert rows[0]["first_difference"] is not None
    file.unlink()
    file = recorded(view, tmp_path, "/length 30", "Hello", strategies=with_speculative(interrupted_after(0)))
    assert "before its first token" in replayed(view, file)[0][0]["left_out"]


def test_storages_that_were_kept_are_said(view: Screen, tmp_path: Path) -> None:
    file = recorded(view, tmp_path, "/length 14", "/reset_in_between off", "a b a b", "a b a b")
    rows, told = replayed(view, file)
    assert (
        "6 of 6 texts are the same." in told
        and "recorded with /reset_in_between off" in told
        and "(2 of 6 records)" in told
    )
    assert rows[4]["same_acceptance"] is False, "the second time the storage knew the answer"


def test_a_text_that_was_edited_and_what_was_not_recorded_are_told(view: Screen, tmp_path: Path) -> None:
    file = edited(
        recorded(view, tmp_path, "/length 8", "Hello"), lambda row: row.update(text="mine", versions={}, engine={})
    )
    told = replayed(view, file)[1]
    assert (
        "is not that of its token ids here" in told
        and "versions: not recorded" in told
        and "engine: not recorded" in told
    )
    assert "as they were" not in told and "3 of 3 texts are the same." in told


def test_another_template_is_said(view: Screen, tmp_path: Path) -> None:
    pair = tiny_pair()
    pair.tokenizer.chat_template = "New: " + pair.tokenizer.chat_template
    rows, told = replayed(view, recorded(view, tmp_path, *SAMPLING), pair)
    assert "the prompt gives another number of tokens: another chat template or tokenizer" in told
    assert all(now == then + 5 for then, now in (row["prompt_tokens"] for row in rows))


def test_what_it_needs(view: Screen, tmp_path: Path) -> None:
    bench, empty, prompts = workbench(view), tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    prompts.write_bytes(b"\xff\xfe")
    for line, words in (
        ("/replay", "give a file, for example: /replay runs.jsonl"),
        (f"/replay {tmp_path / 'none'}", "cannot be read: No such file"),
        (f"/replay {prompts}", "cannot be read: it is not UTF-8 text"),
        (f"/replay {empty}", "holds no record of a generation"),
    ):
        assert bench.handle(line) is Verdict.FAILED and words in view.take()[1], line


def test_ctrl_c_keeps_the_rows_that_were_done(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = recorded(view, tmp_path, *SAMPLING)
    real, count = replay.run_alone, iter(range(100))

    def interrupted(*arguments: Any, **options: Any) -> Generation:
        if next(count) == 4:  # two runs each, one of them to warm up
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(replay, "run_alone", interrupted)
    bench = workbench(view, records=tmp_path / "again.jsonl")
    assert bench.handle(f"/replay {file}") is Verdict.INTERRUPTED
    report = records_of(tmp_path / "again.jsonl")[-1]
    assert len(report["findings"]) == 2 and "1 of 3 records were not reached." in report["conclusion"]
    assert "1 of 3 (speculative) ..." in view.take()[1]


def test_a_speed_is_noise_where_runs_do_not_agree_or_machines_are_no_steadier() -> None:
    assert _speed([]) == []
    assert "median 2.00 (1.90 - 2.10), faster; one run each" in _speed([1.9, 2.0, 2.0, 2.0, 2.1])[0]
    assert "too few to tell" in _speed([1.9, 2.0, 2.1, 2.0])[0]
    assert "slower" in _speed([0.5] * 5)[0] and "within noise" in _speed([1.1, 1.12, 1.12, 1.12, 1.13])[0]
    assert "within noise" in _speed([0.5, 0.6, 1.9, 2.0, 2.1])[0] and "faster" in _speed([0.9, 1.9, 2.0, 2.1, 2.2])[0]
