"""/audit: honest models pass, and models and strategies that are not deterministic are detected."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes import Restless, Screen, checked, open_session, records_of, table_pair, tiny_pair, with_speculative
from tiny import tiny_mamba

from utils.commands.checks import EQUAL_TEXTS, NO_DIFFERENCE
from utils.comparison.strategies import STRATEGIES, Job, Strategy
from utils.repl.repl_session import Verdict


@pytest.mark.parametrize("kind", ["llama", pytest.param("t5", marks=pytest.mark.full)])
def test_an_audit_of_honest_models(kind: str, view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, tiny_pair(kind=kind, chat=False), records=file)
    record = checked(session, file, "/processor multinomial 0.9", "/beams 2", "/gamma 6", "/audit 3")
    assert record["record"] == "audit" and record["finished"] and record["prompt"].startswith("Repeat this list")
    rows = {row["mode"]: row for row in record["findings"]}
    assert list(rows) == ["texts", "logits"]
    assert all(row["trials"] == 3 and row["unique_outputs"] == 1 for row in rows.values())
    assert list(rows["texts"]["unique_by_strategy"]) == ["speculative", "ngram", "target", "beam"]
    logits = rows["logits"]
    assert logits["largest_logit_difference"] < 1e-3 and logits["argmax_flips"] == 0 and logits["positions"] >= 3
    assert logits["widest_window"] == 7
    deterministic, promise = record["conclusion"]
    assert "float32, cpu" in deterministic and "3 runs" in deterministic and EQUAL_TEXTS in promise
    assert "logits: 3 " in view.take()[1]


def test_an_audit_uses_the_last_prompt_and_the_widest_verify_pass(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    record = checked(open_session(view, records=file), file, "/length 3", "Hi", "/gamma 40", "/audit 1")
    assert record["prompt"] == "Hi" and record["findings"][1]["unique_outputs"] == 1
    assert record["findings"][1]["widest_window"] == 41


def test_a_model_that_is_not_deterministic_is_detected(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", table_pair()
    pair.target = Restless(pair.target, by_call=0.4)
    record = checked(open_session(view, pair, records=file), file, "/audit 4")
    rows = {row["mode"]: row for row in record["findings"]}
    assert rows["texts"]["unique_outputs"] > 1
    (conclusion,) = record["conclusion"]
    assert conclusion.startswith("Not deterministic")


def test_verify_widths_that_flip_choices_are_detected(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", table_pair()
    pair.target = Restless(pair.target, by_rows=0.5)
    record = checked(open_session(view, pair, records=file), file, "/audit 4")
    logits = record["findings"][1]
    assert logits["largest_logit_difference"] == pytest.approx(3.0, abs=0.01)
    assert logits["argmax_flips"] > 0 and logits["unique_outputs"] > 1
    assert (
        f"flipped {logits['argmax_flips']} of " in record["conclusion"][1]
        and EQUAL_TEXTS not in record["conclusion"][1]
    )


def test_a_strategy_whose_text_depends_on_the_order_of_runs_is_detected(view: Screen, tmp_path: Path) -> None:
    file, ran = tmp_path / "runs.jsonl", ["target"]

    def depends_on_order(row: Strategy, job: Job) -> Any:
        before, ran[0] = ran[0], row.name
        yield from row.steps(replace(job, settings=replace(job.settings, seed=7 if before == "speculative" else 8)))

    rows = tuple(replace(row, steps=partial(depends_on_order, row)) for row in STRATEGIES[:3])
    record = checked(open_session(view, records=file, strategies=rows), file, "/processor multinomial 1.5", "/audit 6")
    assert record["findings"][0]["unique_outputs"] > 1 and record["conclusion"][0].startswith("Not deterministic")


def test_caches_that_move_logits_are_detected(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", table_pair()
    pair.target = Restless(pair.target, by_cache=0.5)
    record = checked(open_session(view, pair, records=file), file, "/audit 2")
    rows = {row["mode"]: row for row in record["findings"]}
    assert rows["logits"]["largest_logit_difference"] == pytest.approx(3.0, abs=0.01)
    assert rows["texts"]["unique_outputs"] == 1


def test_refused_strategies_are_left_out_and_the_others_checked(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", tiny_pair(drafter=False)
    pair.target = tiny_mamba(seed=0, vocab_size=300)
    session = open_session(view, pair, records=file)
    record = checked(session, file, "/audit 1")
    assert record["findings"][0]["unique_by_strategy"] == {"target": 1}
    assert "ngram left out" in view.take()[1]
    for line in ("/length 2", "Hello"):  # the n-gram strategy refuses the prompt
        session.handle(line)
    record = checked(session, file, "/processor multinomial 1", "/lossless 5")
    assert [row["strategy"] for row in record["findings"]] == ["target"]
    assert "ngram: left out" in view.take()[1]
    record = checked(session, file, "/cache off", "/audit 1")
    assert "logits" in [row["mode"] for row in record["findings"]]


def test_without_an_enabled_strategy_there_is_nothing_to_check(view: Screen) -> None:
    session = open_session(view)
    for line in ("/length 1", "Hello", "/speculative off", "/ngram off", "/target off"):
        session.handle(line)
    view.take()
    for line in ("/audit 1", "/lossless 1"):
        assert session.handle(line) is Verdict.FAILED
        assert "/target on" in view.take()[1]
    session.handle("/beams 2")
    view.take()
    assert session.handle("/lossless 1") is Verdict.FAILED
    assert "beam search" in view.take()[1]


def test_a_recurrent_target_is_audited_without_the_modes_that_rewind(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", tiny_pair(drafter=False)
    pair.target = tiny_mamba(seed=0, vocab_size=300)
    session = open_session(view, pair, records=file)
    record = checked(session, file, "/ngram off", "/audit 2")
    assert [row["mode"] for row in record["findings"]] == ["texts"]
    assert all(row["unique_outputs"] == 1 for row in record["findings"])
    messages = view.take()[1]
    assert "logits: left out" in messages and "recurrent" in messages
    record = checked(session, file, "/processor multinomial 1", "/length 2", "Hello", "/lossless 60")
    assert [row["verdict"] for row in record["findings"]] == [NO_DIFFERENCE]


def test_an_interrupted_report_keeps_its_findings(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    calls: list[int] = []

    def tiring(job: Job) -> Any:
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        yield from STRATEGIES[2].steps(job)

    session = open_session(view, records=file, strategies=with_speculative(tiring))
    assert session.handle("/audit 4") is Verdict.INTERRUPTED
    record = records_of(file)[-1]
    assert [(row["mode"], row["trials"]) for row in record["findings"]] == [("texts", 3)]
    assert not record["finished"]
    assert session.handle("/gamma 3") is Verdict.DONE
    calls.clear()
    for line in ("Hi", "/processor multinomial 1"):
        session.handle(line)
    assert session.handle("/lossless 20") is Verdict.INTERRUPTED
    assert [(row["strategy"], row["draws"]) for row in records_of(file)[-1]["findings"]] == [("speculative", 2)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/audit 0", "1 to 10000"),
        ("/audit many", "'many'"),
        ("/lossless", "prompt"),
        ("/lossless 1e6", "'1e6'"),
        ("/texts now", "'now'"),
    ],
)
def test_bad_input_is_one_sentence(line: str, words: str, view: Screen) -> None:
    assert open_session(view).handle(line) is Verdict.FAILED
    message = view.take()[1]
    assert words in message and message.startswith(line.split()[0]) and message.count("\n") == 1
