"""/drafter_kind and /costs: every kind gives the target's text, several kinds run side by side, and costs are measured
per kind.
"""

from dataclasses import replace

import pytest
from fakes import Screen, checked, open_session, records_of, tiny_pair
from tiny import tiny_head

from ngram_assisted import LongestMatch, SuffixAutomaton
from utils.comparison import warm_up
from utils.comparison.harness import NO_DRAFTER
from utils.comparison.strategies import STRATEGIES
from utils.comparison.warm_up import draft_seconds, with_costs
from utils.config.settings import as_json
from utils.config.value_types import COST_TABLE_EXAMPLE
from utils.metrics.costs import Costs
from utils.pairs.drafter_kinds import drafter_kind
from utils.repl.repl_session import Verdict

REPEATS = "one two three one two three one two"


@pytest.fixture
def pair():
    made = tiny_pair(num_hidden_layers=3)
    made.drafter, made.drafter_kind, made.drafter_name = tiny_head(made.target), "head", "head of tiny-target"
    return made


WORDS = ("loaded", "layers:2", "lookup", "suffix", "chain")
KINDS = ("head", *WORDS[1:])


@pytest.mark.parametrize(
    "verify", ["coupled", *(pytest.param(rule, marks=pytest.mark.full) for rule in ("rejection", "block"))]
)
def test_several_kinds_run_side_by_side_and_give_the_targets_text(view: Screen, pair, tmp_path, verify):
    file = tmp_path / "runs.jsonl"
    session = open_session(view, pair, file)
    checked(session, file, "/length 20", f"/verify {verify}", "/ngram off", f"/drafter_kind {' '.join(WORDS)}", REPEATS)
    rows = records_of(file)
    assert [(row["strategy"], row["drafter_kind"]) for row in rows[:-1]] == [
        (f"speculative {kind}", kind) for kind in KINDS
    ]
    assert rows[-1]["strategy"] == "target" and all(row["same_as_baseline"] for row in rows)
    assert all(row["drafted"] for row in rows[:-1])
    shown = view.take()[0]
    assert all(f"Speculative, {kind}" in shown for kind in KINDS)


def test_a_strategy_with_a_drafter_kind_of_its_own_has_that_kinds_costs(view: Screen, pair):
    """Without them /gamma auto would take its drafts to be free."""
    session = open_session(view, pair, draft_seconds=lambda job: 0.5)
    row = replace(STRATEGIES[0], name="cut", kind=drafter_kind("layers:2"), word="layers:2", chooses_kind=False)
    harness = replace(session.harness, strategies=(*STRATEGIES, row))
    costs = with_costs(harness, replace(session.settings, costs=None)).costs
    assert costs is not None and costs.draft_cost("layers:2") > 0 and "ngram" not in dict(costs.draft)


def test_a_single_kind_keeps_the_name_of_the_strategy(view: Screen, pair, tmp_path):
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
    ("words", "nearest"), [("", "chain"), ("sufix", "suffix"), ("suffix sufix", "suffix"), ("layers:0", "layers:K")]
)
def test_invalid_words_leave_the_setting_alone(view: Screen, pair, words, nearest):
    session = open_session(view, pair)
    assert session.handle(f"/drafter_kind {words}") is (Verdict.FAILED if words else Verdict.DONE)
    assert nearest in "".join(view.take()) and session.settings.drafter_kind == ("chain",)


def test_kinds_that_the_pair_does_not_have_leave_the_setting_alone(view: Screen, pair):
    session = open_session(view, pair, draft_seconds=draft_seconds)
    view.take()
    assert session.handle("/drafter_kind suffix layers:9") is Verdict.FAILED
    shown = "".join(view.take())  # it is refused before the other kind is measured
    assert "1..2" in shown and "measuring" not in shown and session.settings.drafter_kind == ("chain",)


def test_without_a_loaded_drafter_the_other_kinds_draft(view: Screen, tmp_path):
    file = tmp_path / "runs.jsonl"
    session = open_session(view, tiny_pair(drafter=False, num_hidden_layers=2), file)
    checked(session, file, "/drafter_kind suffix lookup layers:1", REPEATS)
    assert [row["drafter_kind"] for row in records_of(file)] == ["suffix", "lookup", "layers:1", "ngram", None]
    session.handle("/drafter_kind chain suffix")
    view.take()
    assert session.handle(REPEATS) is Verdict.DONE and NO_DRAFTER in "".join(view.take())


def test_earlier_texts_are_forgotten_between_prompts_unless_reset_is_off(view: Screen, pair, tmp_path):
    file = tmp_path / "runs.jsonl"
    session = open_session(view, pair, file)
    first = checked(session, file, "/ngram off", "/target off", "/drafter_kind suffix", REPEATS)
    assert checked(session, file, REPEATS)["accepted"] == first["accepted"]
    second = checked(session, file, "/reset_in_between off", REPEATS)
    assert second["token_ids"] == first["token_ids"] and second["accepted"] > first["accepted"]


def test_costs_are_measured_per_kind_and_stored_in_the_settings(view: Screen, pair, tmp_path):
    file = tmp_path / "runs.jsonl"
    # The fakes have a decode step of a millisecond.
    times = iter([0.125e-3, 0.5e-3, 0.25e-3, 0.375e-3, 0.75e-3, 0.625e-3])
    session = open_session(view, pair, file, draft_seconds=lambda job: next(times))
    assert session.settings.costs.draft == (("suffix", 0.125), ("head", 0.5))
    session.handle("/costs measure")
    assert session.settings.costs.draft == (("suffix", 0.25), ("head", 0.375))
    session.handle("/drafter_kind loaded layers:2")
    assert session.settings.costs.draft == (("suffix", 0.25), ("head", 0.375), ("layers:2", 0.75))
    table = as_json(session.settings)["costs"]
    session.handle("/costs verify 0.5 0.75; head 0.1; suffix 0")
    assert session.settings.costs == Costs((0.5, 0.75), (("head", 0.1), ("suffix", 0.0)))
    assert "windows" not in table
    session.handle("/costs verify 0.5 0.25; head 0.1; suffix 0")
    assert session.settings.costs == Costs((0.5, 0.25), (("head", 0.1), ("suffix", 0.0)))
    view.take()
    session.handle("/costs")
    shown = view.take()[1]
    assert "k=1: 0.50, 2: 0.25" in shown and "verify 0.5" not in shown
    session.handle(f"/costs {table}")
    assert as_json(session.settings)["costs"] == table == checked(session, file, "/length 3", "Hi")["settings"]["costs"]


@pytest.mark.parametrize(("kind", "index"), [("suffix", SuffixAutomaton), ("lookup", LongestMatch)])
def test_an_index_is_measured_on_a_text_with_short_matches(view: Screen, monkeypatch, kind, index):
    """In a text of one token every position matches all others, which takes an automaton square time."""
    texts, lengths, extend, drafts = [], [], index.extend, index.drafts
    monkeypatch.setattr(index, "extend", lambda self, tokens: (texts.append(list(tokens)), extend(self, tokens))[1])

    def recorded(self, count):
        found = drafts(self, count)
        lengths.append(found[0].length if found else 0)
        return found

    monkeypatch.setattr(index, "drafts", recorded)
    session = open_session(view, tiny_pair(max_position_embeddings=2048))
    job = replace(session.harness.job([0], replace(session.settings, gamma=8, length=16)), drafter=kind)
    assert draft_seconds(job, 1024)[0] > 0
    assert max(map(len, texts)) == 1024 and 0 < max(lengths) < 16


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
def test_invalid_cost_tables_are_refused(view: Screen, pair, text):
    session = open_session(view, pair)
    before = session.settings
    assert session.handle(f"/costs {text}") is Verdict.FAILED
    assert COST_TABLE_EXAMPLE in "".join(view.take()) and session.settings == before


def test_costs_change_the_number_of_drafts_and_not_the_text(view: Screen, pair, tmp_path):
    file = tmp_path / "runs.jsonl"
    session = open_session(view, pair, file)
    lines = ("/gamma auto", "/ngram off", "/target off", "/length 30", "/drafter_kind suffix")
    cheap = checked(session, file, *lines, "/costs verify 0 0 0; head 0; suffix 0", REPEATS)
    expensive = checked(session, file, "/costs verify 9 9 9; head 9; suffix 9", REPEATS)
    assert cheap["token_ids"] == expensive["token_ids"] and expensive["drafted"] < cheap["drafted"]
    assert checked(session, file, "/costs verify 0 0 0; head 0; suffix 0", REPEATS)["drafted"] == cheap["drafted"]


@pytest.mark.parametrize("overhead", [0.0, 0.25])
def test_a_draft_costs_what_it_adds_to_a_real_round(view: Screen, monkeypatch, overhead):
    """On a clock that only forward passes advance. overhead: seconds of a verify pass that the costs leave out, as in a
    processor whose caches hold either model, on a machine that now takes twice as long as when it was measured.
    """
    session, now = open_session(view, tiny_pair(max_position_embeddings=2048)), [0.0]
    pair = session.harness.pair
    monkeypatch.setattr(warm_up, "SLOW_STEP", 1000.0)
    pair.engine.step_seconds, pair.engine.costs = 100.0, tuple(0.1 * drafts for drafts in range(1, 17))

    def advance(model, args, kwargs):
        rows = kwargs["input_ids"].shape[1]
        verifying = 200 * (0.9 + 0.1 * rows + overhead * (1 < rows <= 3))
        now[0] += verifying if model is pair.target else 30

    for model in (pair.target, pair.drafter):
        model.register_forward_pre_hook(advance, with_kwargs=True)
    monkeypatch.setattr(warm_up, "perf_counter", lambda: now[0])
    job = session.harness.job([0], replace(session.settings, gamma=8, length=16))
    draft, after, _ = draft_seconds(replace(job, drafter="loaded"), 1024)
    assert draft == pytest.approx(after, rel=1e-3) == pytest.approx(15 + 100 * overhead, rel=1e-3)
