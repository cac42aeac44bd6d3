"""Definitions and values of figures, texts side by side, and the most frequent n-grams."""

from __future__ import annotations

import re

import pytest
from fakes import Screen, open_session, screen, table_pair
from local_runs import compared_run
from paths import ROOT

from utils.commands.explain import FIGURES
from utils.decode.steps import FinishReason
from utils.metrics.results import Comparison, Generation
from utils.repl.repl_session import ReplSession
from utils.repl.runner import Verdict
from utils.text import decode, token_piece, visible

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


def test_fractions_match_the_runs(ran: ReplSession, view: Screen) -> None:
    shown = {figure.name: _explained(ran, view, figure.name) for figure in FIGURES}
    for strategy, run, comparison in ran.harness.last().local:
        if strategy.drafts:
            assert shown["acceptance"][strategy.name] == f"{run.accepted}/{run.drafted} = {run.acceptance_rate:.3f}"
            assert (
                shown["drafts/round"][strategy.name] == f"{run.drafted}/{len(run.steps)} = {run.drafts_per_round:.1f}"
            )
            assert shown["by position"][strategy.name].count("=") == min(6, len(run.accepted_by_position))
        else:
            assert strategy.name not in shown["acceptance"] and strategy.name not in shown["rounds without drafts"]
        forward = (
            f"{len(run.tokens)}/{run.target_forwards} = {run.tokens_per_target_forward:.2f}"
            if strategy.uses_target
            else None
        )
        assert shown["tokens/forward"].get(strategy.name) == forward
        assert (
            shown["tokens/s"][strategy.name] == f"{len(run.tokens)}/{run.seconds:.2f} s = {run.tokens_per_second:.1f}"
        )
        assert f"= {comparison.speedup:.2f}x" in shown["speed-up"][strategy.name]
    assert "20 of 20" in shown["text"]["ngram"] and "of 20" in shown["text"]["drafter"]
    assert shown["p"] == {}


def _explained(session: ReplSession, view: Screen, name: str) -> dict[str, str]:
    assert session.handle(f"/explain {name}") is Verdict.DONE
    rows, message = view.take()
    assert message == ""
    (first, meaning), *values = (re.split(r"\s{2,}", row.strip(), maxsplit=1) for row in rows.splitlines())
    assert first == name and meaning == next(figure.meaning for figure in FIGURES if figure.name == name)
    return {row[0]: row[1] for row in values}


def test_figures_without_a_denominator() -> None:
    empty = Generation((), 0.0, None, FinishReason.INTERRUPTED)
    session = open_session(screen(), table_pair())
    for strategy in session.harness.variants(session.settings):
        for figure in FIGURES:
            value = figure.fraction(compared_run(strategy, empty, Comparison()))
            assert "= -" in value or "=" not in value, (figure.name, value)


def test_explain_before_any_prompt_and_an_unknown_name(view: Screen) -> None:
    session = open_session(view)
    assert session.handle("/explain") is Verdict.DONE
    shown = view.take()[0]
    assert all(figure.name in shown for figure in FIGURES)
    assert session.handle("/explain acceptance") is Verdict.DONE
    view.take()
    assert session.handle("/explain c") is Verdict.DONE and "(c)" in view.take()[0]
    assert session.handle("/explain aceptance") is Verdict.FAILED and "acceptance?" in view.take()[1]


def test_texts_are_shown_side_by_side(ran: ReplSession, view: Screen) -> None:
    assert ran.handle("/texts") is Verdict.DONE
    heading, about, *texts = view.take()[0].splitlines()
    assert heading.split() == ["target,", "speculative,", "ngram", "drafter"]
    compared = {strategy.name: (run, comparison) for strategy, run, comparison in ran.harness.last().local}
    drafter, position = compared["drafter"][0], compared["drafter"][1].first_difference
    assert position is not None and "20 tokens, length" in about and str(position + 1) in about
    shared, whole = (
        visible(decode(ran.pair.tokenizer, tokens)) for tokens in (drafter.tokens[:position], drafter.tokens)
    )
    right = "".join(text[heading.index("drafter") :] for text in texts)
    assert "".join(right.split()) == "".join(f"{shared}»{whole[len(shared) :]}".split())


def test_texts_that_do_not_fit_are_shown_below() -> None:
    view = screen(width=60)
    session = open_session(view)
    for line in ("/length 8", "/drafter on", "one two"):
        assert session.handle(line) is Verdict.DONE
    view.take()
    assert session.handle("/texts") is Verdict.DONE
    shown = view.take()[0]
    assert "ngram" in shown.splitlines()[0] and "drafter" not in shown.splitlines()[0] and "drafter" in shown
    assert all(len(line.rstrip()) <= 60 for line in shown.splitlines())
    assert open_session(view).handle("/texts") is Verdict.FAILED


def test_the_most_frequent_n_grams(ran: ReplSession, view: Screen) -> None:
    assert ran.handle("/ngram list 5") is Verdict.DONE
    rows, message = view.take()
    storage, tokenizer = ran.harness.state.storage, ran.pair.tokenizer
    entries = [(count, (*prefix, token)) for prefix, counts in storage.contexts() for token, count in counts.items()]
    counts = sorted((count for count, _ in entries), reverse=True)
    assert [int(row.split("x")[0]) for row in rows.splitlines()] == counts[:5] and f"{len(storage)} n-grams" in message
    most_frequent = [ngram for count, ngram in entries if count == counts[0]]
    pieces = [" ".join(token_piece(tokenizer, token) for token in ngram) for ngram in most_frequent]
    assert any(words in rows.splitlines()[0] for words in pieces)
    assert open_session(view).handle("/ngram list") is Verdict.FAILED and ran.handle("/ngram list 0") is Verdict.FAILED
