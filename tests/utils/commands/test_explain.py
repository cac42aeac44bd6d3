"""Definitions of figures, texts, and the most frequent n-grams."""

from __future__ import annotations

import re

import pytest
from fakes import Screen, open_session, screen
from paths import ROOT

from utils.commands.help import FIGURES
from utils.repl.repl_session import ReplSession, Verdict
from utils.text import decode, visible

README = ROOT / "README.md"


@pytest.fixture
def ran(view: Screen) -> ReplSession:
    session = open_session(view)
    for line in ("/length 20", "/drafter on", "one two one two"):
        assert session.handle(line) is Verdict.DONE
    view.take()
    return session


def test_the_pictures_of_the_readme_exist() -> None:
    names = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert names and all((README.parent / name).stat().st_size > 5000 for name in names)


def test_explain_before_any_prompt_and_an_unknown_name(view: Screen) -> None:
    session = open_session(view)
    assert session.handle("/explain") is Verdict.DONE
    shown = view.take()[0]
    assert all(figure in shown for figure in FIGURES)
    assert session.handle("/explain acceptance") is Verdict.DONE
    view.take()
    assert session.handle("/explain c") is Verdict.DONE and "(c)" in view.take()[0]
    assert session.handle("/explain aceptance") is Verdict.FAILED and "acceptance?" in view.take()[1]


def test_texts_are_shown_with_their_first_difference(ran: ReplSession, view: Screen) -> None:
    assert ran.handle("/texts") is Verdict.DONE
    shown = view.take()[0]
    assert shown.splitlines()[0].startswith("target, speculative, ngram") and "20 tokens, length" in shown
    compared = {strategy.name: (run, comparison) for strategy, run, comparison in ran.harness.last().local}
    drafter, position = compared["drafter"][0], compared["drafter"][1].first_difference
    assert position is not None and f"differs from token {position + 1}" in shown
    shared, whole = (
        visible(decode(ran.harness.pair.tokenizer, tokens)) for tokens in (drafter.tokens[:position], drafter.tokens)
    )
    assert f"»{whole[len(shared) :]}".split()[0] in shown


def test_texts_fit_on_a_narrow_screen() -> None:
    view = screen(width=60)
    session = open_session(view)
    for line in ("/length 8", "/drafter on", "one two"):
        assert session.handle(line) is Verdict.DONE
    view.take()
    assert session.handle("/texts") is Verdict.DONE
    assert all(len(line.rstrip()) <= 60 for line in view.take()[0].splitlines())
    assert open_session(view).handle("/texts") is Verdict.FAILED
