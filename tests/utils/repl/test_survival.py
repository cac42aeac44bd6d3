"""What a session survives: Ctrl-C anywhere, refused and broken strategies, no memory, prompts and files that cannot be used."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import Screen, records_of, tiny_pair, workbench

import infer
from utils.comparison.strategies import Job
from utils.decode.steps import Step
from utils.errors import UserError
from utils.repl.runner import Verdict


def interrupting(job: Job) -> Iterator[Step]:
    """A strategy that is interrupted after two tokens."""
    yield Step((), 0, 5)
    yield Step((), 0, 6)
    raise KeyboardInterrupt


def failing(job: Job) -> Iterator[Step]:
    """A strategy that is refused."""
    raise UserError("This one cannot run.")
    yield


def broken(job: Job) -> Iterator[Step]:
    """A strategy with a bug."""
    raise RuntimeError("a bug")
    yield


def exhausting(job: Job) -> Iterator[Step]:
    """A strategy that runs out of memory, as torch says it on a CPU."""
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
    )
    yield


def table_with(steps) -> tuple:
    return tuple(replace(row, steps=steps) if row.name == "ngram" else row for row in infer.STRATEGIES)


def test_ctrl_c_keeps_what_was_made_skips_the_rest_and_the_session_lives(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    bench = workbench(view, records=file, strategies=table_with(interrupting))
    assert bench.handle("Hello") is Verdict.INTERRUPTED
    rows = records_of(file)
    assert [(row["strategy"], row["finish"]) for row in rows] == [("speculative", "length"), ("ngram", "interrupted")]
    assert rows[1]["token_ids"] == [5, 6] and rows[1]["same_as_target"] is None
    assert "interrupted" in view.take()[0]
    bench.handle("/ngram off")
    assert bench.handle("Hello") is Verdict.DONE


def test_a_refused_strategy_says_why_and_the_others_run(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    bench = workbench(view, records=file, strategies=table_with(failing))
    assert bench.handle("Hello") is Verdict.FAILED
    results, messages = view.take()
    assert messages == "This one cannot run.\n" and "Target only" in results
    assert [row["strategy"] for row in records_of(file)] == ["speculative", "target"]


def test_a_bug_shows_its_traceback_and_the_session_lives(view: Screen) -> None:
    bench = workbench(view, strategies=table_with(broken))
    assert bench.handle("Hello") is Verdict.FAILED
    assert "a bug" in view.take()[1]
    bench.handle("/ngram off")
    assert bench.handle("Hello") is Verdict.DONE


def test_running_out_of_memory_is_a_sentence_and_the_session_lives(view: Screen) -> None:
    bench = workbench(view, strategies=table_with(exhausting))
    assert bench.handle("Hello") is Verdict.FAILED
    message = view.take()[1]
    assert message.startswith("Out of memory") and "Traceback" not in message
    bench.handle("/ngram off")
    assert bench.handle("Hello") is Verdict.DONE


def test_prompts_that_cannot_be_run_are_refused_once(view: Screen) -> None:
    bench = workbench(view)
    assert bench.handle("word " * 400) is Verdict.FAILED
    results, messages = view.take()
    assert results == "" and messages.count("\n") == 1 and "has a context of 256" in messages
    for name in ("speculative", "ngram", "target"):
        bench.handle(f"/{name} off")
    view.take()
    assert bench.handle("Hello") is Verdict.FAILED
    assert "turn one on" in view.take()[1]


def test_a_bug_in_one_strategy_leaves_the_others_and_their_records(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    bench = workbench(view, records=file, strategies=table_with(broken))
    assert bench.handle("Hello") is Verdict.FAILED
    assert [row["strategy"] for row in records_of(file)] == ["speculative", "target"]


def test_an_interrupt_while_something_is_printed_keeps_what_was_made(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "runs.jsonl"
    bench = workbench(view, records=file)
    calls: list[int] = []

    def figures(*arguments: object, **options: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(view.renderer, "figures", figures)
    assert bench.handle("Hello") is Verdict.INTERRUPTED
    assert [(row["strategy"], row["finish"]) for row in records_of(file)] == [
        ("speculative", "length"),
        ("ngram", "length"),
    ]


def test_an_interrupt_while_warming_up_is_one(view: Screen) -> None:
    with pytest.raises(KeyboardInterrupt):
        workbench(view, strategies=table_with(interrupting)).warm_up()


def test_prompts_with_broken_characters_are_run_with_them_replaced(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    bench = workbench(view, records=file)
    assert bench.handle("a\ud800b \x00 \u202e") is Verdict.DONE
    assert records_of(file)[0]["prompt"] == "a?b \x00 \u202e"


def test_a_prompt_beyond_the_drafters_context_is_said(view: Screen) -> None:
    pair = tiny_pair()
    pair.drafter = tiny_pair(max_position_embeddings=16).drafter
    bench = workbench(view, pair)
    assert bench.handle("Hello there, this is a longer prompt") is Verdict.DONE
    assert "the drafter a context of 16" in view.take()[1]


def test_records_that_cannot_be_written_are_an_error_at_once(tmp_path: Path, view: Screen) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        workbench(view, records=tmp_path / "missing" / "runs.jsonl")
