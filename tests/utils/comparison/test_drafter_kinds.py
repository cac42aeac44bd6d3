"""/drafter_kind: every kind drafts in the same loop for the same text, several run side by side, costs are measured
per kind.
"""

import pytest
from fakes import Screen, checked, open_session, records_of, tiny_pair
from tiny import tiny_head

from utils.comparison.warm_up import draft_seconds
from utils.config.settings import as_json
from utils.metrics.costs import Costs
from utils.repl.runner import Verdict

REPEATS = "one two three one two three one two"


@pytest.fixture
def pair():
    made = tiny_pair(num_hidden_layers=4)
    made.drafter, made.drafter_kind, made.drafter_name = tiny_head(made.target), "head", "head of tiny-target"
    return made


KINDS = ("head", "layers:2", "lookup", "suffix", "chain")


@pytest.mark.parametrize("verify", ["rejection", "coupled", "block"])
def test_all_kinds_run_side_by_side_and_give_the_targets_text(view: Screen, pair, tmp_path, verify):
    file = tmp_path / "runs.jsonl"
    session = open_session(view, pair, file)
    checked(session, file, f"/verify {verify}", "/ngram off", f"/drafter_kind {' '.join(KINDS)}", REPEATS)
    rows = records_of(file)
    assert [(row["strategy"], row["drafter_kind"]) for row in rows[:-1]] == [
        (f"speculative {kind}", kind) for kind in KINDS
    ]
    assert rows[-1]["strategy"] == "target" and all(row["same_as_target"] for row in rows)
    assert all(row["drafted"] for row in rows[:-1])
    shown = view.take()[0]
    assert all(f"Speculative, {kind}" in shown for kind in KINDS)


def test_one_kind_keeps_the_strategys_name(view: Screen, pair, tmp_path):
    file = tmp_path / "runs.jsonl"
    session = open_session(view, pair, file)
    checked(session, file, "/drafter_kind suffix", REPEATS)
    assert [(row["strategy"], row["drafter_kind"]) for row in records_of(file)[:2]] == [
        ("speculative", "suffix"),
        ("ngram", "ngram"),
    ]
    checked(session, file, "/drafter_kind loaded", REPEATS)
    assert records_of(file)[3]["drafter_kind"] == "head"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("", "drafter_kind: loaded"),
        ("sufix", "Did you mean suffix"),
        ("layers:", "layers:4"),
        ("layers:0", "layers:4"),
        ("layers:x", "layers:4"),
        ("layers:k", "layers:4"),
    ],
)
def test_words_that_mean_nothing(view: Screen, pair, words, answer):
    session = open_session(view, pair)
    session.handle(f"/drafter_kind {words}")
    assert answer in "".join(view.take()) and session.settings.drafter_kind == ("loaded",)


def test_kinds_that_this_pair_has_not_got_leave_the_settings_alone(view: Screen, pair):
    session = open_session(view, pair, draft_seconds=draft_seconds)
    assert session.handle("/drafter_kind model") is Verdict.FAILED
    assert "is head, not model" in "".join(view.take()) and session.settings.drafter_kind == ("loaded",)
    assert session.handle("/drafter_kind layers:9") is Verdict.FAILED
    assert "it has 4 layers" in "".join(view.take()) and session.settings.drafter_kind == ("loaded",)


def test_without_a_loaded_drafter_the_others_still_draft(view: Screen, tmp_path):
    file = tmp_path / "runs.jsonl"
    session = open_session(view, tiny_pair(drafter=False), file)
    checked(session, file, "/drafter_kind suffix lookup layers:1", REPEATS)
    assert [row["drafter_kind"] for row in records_of(file)] == ["suffix", "lookup", "layers:1", "ngram", None]
    session.handle("/drafter_kind chain suffix")
    view.take()
    assert session.handle(REPEATS) is Verdict.DONE and "No drafter is loaded" in "".join(view.take())


def test_suffixes_are_forgotten_between_prompts_unless_they_are_kept(view: Screen, pair, tmp_path):
    file = tmp_path / "runs.jsonl"
    session = open_session(view, pair, file)
    first = checked(session, file, "/ngram off", "/target off", "/drafter_kind suffix", REPEATS)
    assert checked(session, file, REPEATS)["accepted"] == first["accepted"]
    kept = checked(session, file, "/reset_in_between off", REPEATS)
    assert kept["token_ids"] == first["token_ids"] and kept["accepted"] > first["accepted"]


def test_costs_are_measured_per_kind_and_written_into_the_settings(view: Screen, pair, tmp_path):
    file = tmp_path / "runs.jsonl"
    times = iter([0.5, 0.25, 0.125, 0.75])
    session = open_session(view, pair, file, draft_seconds=lambda job: next(times))
    pair.engine.step_seconds = 1.0
    assert dict(session.settings.costs.draft)["head"] > 0
    session.handle("/costs measure")
    assert session.settings.costs.draft == (("head", 0.25),)
    session.handle("/drafter_kind head suffix")
    assert session.settings.costs.draft == (("head", 0.25), ("suffix", 0.125))
    table = as_json(session.settings)["costs"]
    session.handle("/costs windows 0.5 0.75; head 0.1; suffix 0")
    assert session.settings.costs == Costs((0.5, 0.75), (("head", 0.1), ("suffix", 0.0)))
    session.handle(f"/costs {table}")
    assert as_json(session.settings)["costs"] == table == checked(session, file, "/length 3", "Hi")["settings"]["costs"]


@pytest.mark.parametrize(
    "text",
    [
        "windows x",
        "head 0.1",
        "windows 1; head",
        "windows 1; head 2 3",
        "windows -1",
        "windows nan",
        ";",
        "windows 1e9",
    ],
)
def test_tables_that_are_none(view: Screen, pair, text):
    session = open_session(view, pair)
    before = session.settings
    assert session.handle(f"/costs {text}") is Verdict.FAILED
    assert "windows 0.1 0.15 0.2; head 0.07" in "".join(view.take()) and session.settings == before


def test_a_table_of_costs_decides_how_much_is_drafted_not_what_is_said(view: Screen, pair, tmp_path):
    file = tmp_path / "runs.jsonl"
    session = open_session(view, pair, file)
    lines = ("/gamma auto", "/ngram off", "/target off", "/length 30", "/drafter_kind suffix")
    cheap = checked(session, file, *lines, "/costs windows 0 0 0; head 0; suffix 0", REPEATS)
    dear = checked(session, file, "/costs windows 9 9 9; head 9; suffix 9", REPEATS)
    assert cheap["token_ids"] == dear["token_ids"] and dear["drafted"] < cheap["drafted"]
    assert checked(session, file, "/costs windows 0 0 0; head 0; suffix 0", REPEATS)["drafted"] == cheap["drafted"]
