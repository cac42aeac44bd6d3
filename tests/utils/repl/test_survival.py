"""A session survives Ctrl-C, strategies that fail, a lack of memory, and unusable prompts and files."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import Screen, open_session, records_of, table_pair

from utils.comparison.records import RecordFile
from utils.comparison.strategies import STRATEGIES, Job
from utils.decode.steps import Step
from utils.errors import UserError
from utils.repl import repl_session
from utils.repl.repl_session import OUT_OF_MEMORY, Verdict
from utils.screen.renderer import Text


def interrupting(job: Job) -> Iterator[Step]:
    """A strategy that is interrupted after two tokens."""
    yield Step((), 0, 5)
    yield Step((), 0, 6)
    raise KeyboardInterrupt


def failing(job: Job) -> Iterator[Step]:
    """A strategy that cannot run."""
    raise UserError("This one cannot run.")
    yield


def broken(job: Job) -> Iterator[Step]:
    """A strategy with a bug."""
    raise RuntimeError("a bug")
    yield


def exhausting(job: Job) -> Iterator[Step]:
    """A strategy that runs out of memory, with the message of torch on a CPU."""
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
    )
    yield


def table_with(steps) -> tuple:
    return tuple(replace(row, steps=steps) if row.name == "ngram" else row for row in STRATEGIES)


def test_ctrl_c_keeps_partial_results_and_skips_the_rest(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file, strategies=table_with(interrupting))
    assert session.handle("Hello") is Verdict.INTERRUPTED
    rows = records_of(file)
    assert [(row["strategy"], row["finish"]) for row in rows] == [("speculative", "length"), ("ngram", "interrupted")]
    assert rows[1]["token_ids"] == [5, 6] and rows[1]["same_as_baseline"] is None
    assert "interrupted" in view.take()[0]
    session.handle("/ngram off")
    assert session.handle("Hello") is Verdict.DONE


def test_a_strategy_that_cannot_run_is_explained_and_the_others_run(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file, strategies=table_with(failing))
    assert session.handle("Hello") is Verdict.FAILED
    results, messages = view.take()
    assert messages == "This one cannot run.\n" and "Target only" in results
    assert [row["strategy"] for row in records_of(file)] == ["speculative", "target"]


def test_a_bug_shows_its_traceback_and_the_session_goes_on(view: Screen) -> None:
    session = open_session(view, strategies=table_with(broken))
    assert session.handle("Hello") is Verdict.FAILED
    assert "a bug" in view.take()[1]
    session.handle("/ngram off")
    assert session.handle("Hello") is Verdict.DONE


def test_running_out_of_memory_is_one_sentence_and_the_session_goes_on(view: Screen) -> None:
    session = open_session(view, strategies=table_with(exhausting))
    assert session.handle("Hello") is Verdict.FAILED
    message = view.take()[1]
    assert message == f"{OUT_OF_MEMORY}\n"
    session.handle("/ngram off")
    assert session.handle("Hello") is Verdict.DONE


def test_an_unusable_prompt_is_refused_once(view: Screen) -> None:
    session = open_session(view)
    assert session.handle("word " * 400) is Verdict.FAILED
    results, messages = view.take()
    assert results == "" and messages.count("\n") == 1 and "256" in messages
    for name in ("speculative", "ngram", "target"):
        session.handle(f"/{name} off")
    view.take()
    assert session.handle("Hello") is Verdict.FAILED
    assert "/target on" in view.take()[1]


def test_a_bug_in_one_strategy_leaves_the_others_and_their_records(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file, strategies=table_with(broken))
    assert session.handle("Hello") is Verdict.FAILED
    assert [row["strategy"] for row in records_of(file)] == ["speculative", "target"]


def test_an_interrupt_while_a_run_is_shown_keeps_its_result(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file)

    def stream(text: Text, **options: bool) -> None:
        if "= same text" in text.plain:
            raise KeyboardInterrupt

    monkeypatch.setattr(view.renderer, "stream", stream)
    assert session.handle("Hello") is Verdict.INTERRUPTED
    assert [(row["strategy"], row["finish"]) for row in records_of(file)] == [
        ("speculative", "length"),
        ("ngram", "length"),
    ]


def test_a_second_ctrl_c_ends_the_comparison_and_keeps_the_records(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is computed why texts differ: the table is there once, and so are the records."""
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(repl_session, "divergence_of", interrupted)
    session.handle("/processor multinomial 1.5")
    assert session.handle("Hello") is Verdict.INTERRUPTED
    results, messages = view.take()
    assert results.count("tokens/s") == 1 and "was stopped" in messages
    assert [row["strategy"] for row in records_of(file)] == ["speculative", "ngram", "target"]
    session.handle("/processor greedy")
    assert session.handle("Hello") is Verdict.DONE


def test_a_reason_that_several_strategies_share_is_given_once(view: Screen) -> None:
    strategies = tuple(replace(row, steps=failing) if row.drafts else row for row in STRATEGIES)
    session = open_session(view, strategies=strategies)
    assert session.handle("Hello") is Verdict.FAILED
    message = view.take()[1]
    assert message.count("This one cannot run.") == 1 and "same reason as speculative" in message


def test_an_interrupt_while_warming_up_is_raised(view: Screen) -> None:
    with pytest.raises(KeyboardInterrupt):
        open_session(view, strategies=table_with(interrupting))._loaded.warm_up()


def test_invalid_characters_in_a_prompt_are_replaced(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file)
    assert session.handle("a\ud800b \x00 \u202e") is Verdict.DONE
    assert records_of(file)[0]["prompt"] == "a?b \x00 \u202e"


def test_a_prompt_beyond_the_drafters_context_is_reported(view: Screen) -> None:
    pair = table_pair()
    pair.drafter = table_pair(max_position_embeddings=16).drafter
    session = open_session(view, pair)
    assert session.handle("Hello there, this is a longer prompt") is Verdict.DONE
    assert "16" in view.take()[1]


def test_a_report_whose_records_cannot_be_written_is_shown(
    tmp_path: Path, view: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(view, records=tmp_path / "runs.jsonl")
    session.handle("Hello")
    view.take()

    def full(file: RecordFile, rows: object) -> None:
        raise UserError("no space left")

    monkeypatch.setattr(RecordFile, "append", full)
    assert session.handle("/race 2") is Verdict.FAILED
    shown, messages = view.take()
    assert "baseline" in shown and "no space left" in messages
    assert session.handle(f"/export {tmp_path / 'race.csv'}") is Verdict.DONE


def test_a_records_file_that_cannot_be_written_is_an_error_at_once(tmp_path: Path, view: Screen) -> None:
    with pytest.raises(UserError, match="runs.jsonl"):
        open_session(view, records=tmp_path / "missing" / "runs.jsonl")
