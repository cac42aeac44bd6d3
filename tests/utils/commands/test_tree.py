"""/tree: runs with combs have the target's text, count their leaves, and say when combs cannot be used."""

from pathlib import Path

import pytest
from fakes import Screen, open_session, records_of

from utils.decode.steps import Leaf, Step
from utils.repl.runner import Verdict
from utils.screen.debug_rounds import round_pieces

COSTS = "/costs verify 0.01 0.01 0.01 0.01 0.01 0.01; model 0.01; leaf 0"  # nothing is measured


@pytest.mark.parametrize("decoding", [("/verify rejection",), ("/verify coupled", "/temperature 1")])
def test_runs_with_combs_have_the_targets_text(decoding: tuple[str, ...], view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    session = open_session(view, records=file)
    for line in (*decoding, "/length 20", "/gamma 3", COSTS, "Hello there"):
        assert session.handle(line) is Verdict.DONE, view.take()
    chain = records_of(file)
    for tree in ("comb", "auto"):
        for line in (f"/tree {tree}", "Hello there"):
            assert session.handle(line) is Verdict.DONE, view.take()
        runs = {row["strategy"]: row for row in records_of(file)[len(chain) :] if row["settings"]["tree"] == tree}
        before = next(row for row in chain if row["strategy"] == "speculative")
        assert runs["speculative"]["token_ids"] == runs["target"]["token_ids"] == before["token_ids"]
        if tree == "auto":  # whose leaves cost nearly nothing here
            drafts = [row["drafted"] / row["rounds"] for row in (before, runs["speculative"])]
            assert drafts[1] > drafts[0]
        assert runs["speculative"]["rounds"] <= before["rounds"]


def test_what_prevents_combs_is_said_and_chains_are_drafted(view: Screen) -> None:
    session = open_session(view)
    for line in ("/tree comb", "/cache off", "/length 6", "Hello"):
        assert session.handle(line) is Verdict.DONE
    assert "no effect: the cache is off" in " ".join("".join(view.take()).split())


def test_trees_can_be_swept(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    session = open_session(view, records=file)
    for line in ("/ngram off", "/length 8", "/gamma 2", "Hello", "/sweep tree off comb auto x1"):
        assert session.handle(line) is Verdict.DONE, view.take()
    findings = records_of(file)[-1]["findings"]
    assert {row["setting"] for row in findings} >= {"tree off", "tree comb", "tree auto"}
    assert all(row["same_as_target"] for row in findings)


def test_the_debug_view_shows_leaves() -> None:
    class Letters:
        def decode(self, ids: list[int], **options: object) -> str:
            return "".join("abcdefgh"[token] for token in ids)

    step = Step((0, 1, 2), 1, 7, leaves=(Leaf(0, 3), Leaf(1, 4)), leaf=1)
    signs = [(text[: -len('"b"')], colour) for text, colour in round_pieces(step, Letters())]
    assert [sign for sign, _ in signs] == ["+", "-", "-", "^-", "^+", "*"]
    assert [colour for _, colour in signs] == ["green", "red", "red", "red", "green", "blue"]
