"""What figures mean and came to, texts beside each other, and the fullest shelves of the storage."""

from __future__ import annotations

import re

import pytest
from fakes import Screen, screen, tiny_pair, workbench
from paths import ROOT

from utils.comparison.glossary import FIGURES
from utils.decode.steps import FinishReason
from utils.metrics.results import Comparison, Generation
from utils.repl.repl_session import Workbench
from utils.repl.runner import Verdict
from utils.text import decode, visible

README = ROOT / "README.md"


@pytest.fixture
def ran(view: Screen) -> Workbench:
    bench = workbench(view)
    for line in ("/length 20", "/drafter on", "one two one two"):
        assert bench.handle(line) is Verdict.DONE
    view.take()
    return bench


def test_every_figure_is_on_the_page() -> None:
    page = " ".join(README.read_text(encoding="utf-8").replace("`", "").replace("\\|", "|").split())
    for figure in FIGURES:
        assert f"| {figure.name} | {figure.meaning} |" in page, figure.name


def test_the_pages_pictures_are_there() -> None:
    named = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert len(named) == 2 and all((README.parent / name).stat().st_size > 5000 for name in named)


def test_fractions_are_those_of_the_runs(ran: Workbench, view: Screen) -> None:
    shown = {figure.name: _told(ran, view, figure.name) for figure in FIGURES}
    for strategy, run, comparison in ran._bench.last().compared:
        if strategy.drafts:
            assert shown["acceptance"][strategy.name] == f"{run.accepted}/{run.drafted} = {run.acceptance_rate:.3f}"
            assert (
                shown["drafts/round"][strategy.name] == f"{run.drafted}/{len(run.steps)} = {run.drafts_per_round:.1f}"
            )
            assert shown["by place"][strategy.name].count("=") == min(6, len(run.accepted_by_position))
        else:
            assert strategy.name not in shown["acceptance"] and strategy.name not in shown["declined"]
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
    assert shown["text"]["ngram"] == "20 of 20 tokens are the target's" and "of 20 tokens" in shown["text"]["drafter"]
    assert shown["p"] == {}


def _told(bench: Workbench, view: Screen, name: str) -> dict[str, str]:
    assert bench.handle(f"/explain {name}") is Verdict.DONE
    rows, message = view.take()
    assert message == ""
    (first, meaning), *told = (re.split(r"\s{2,}", row.strip(), maxsplit=1) for row in rows.splitlines())
    assert first == name and meaning == next(figure.meaning for figure in FIGURES if figure.name == name)
    return {row[0]: row[1] for row in told}


def test_figures_without_a_denominator() -> None:
    empty = Generation((), 0.0, None, FinishReason.INTERRUPTED)
    bench = workbench(screen(), tiny_pair())
    for strategy in bench._bench.variants(bench.settings):
        for figure in FIGURES:
            told = figure.fraction(strategy, empty, Comparison())
            assert "= -" in told or "=" not in told, (figure.name, told)


def test_explain_before_any_prompt_and_an_unknown_name(view: Screen) -> None:
    bench = workbench(view)
    assert bench.handle("/explain") is Verdict.DONE and "accepted drafts / drafts" in view.take()[0]
    assert bench.handle("/explain acceptance") is Verdict.DONE
    view.take()
    assert bench.handle("/explain c") is Verdict.DONE and "a draft (c)" in view.take()[0]
    assert bench.handle("/explain aceptance") is Verdict.FAILED and "Did you mean acceptance?" in view.take()[1]


def test_texts_stand_beside_each_other(ran: Workbench, view: Screen) -> None:
    assert ran.handle("/columns") is Verdict.DONE
    heading, about, *texts = view.take()[0].splitlines()
    assert heading.split() == ["target,", "speculative,", "ngram", "drafter"]
    drafter, place = next(
        (run, told.first_difference) for strategy, run, told in ran._bench.last().compared if strategy.name == "drafter"
    )
    assert place is not None and f"20 tokens, length, another from token {place + 1}" in about
    shared, whole = (
        visible(decode(ran._pair.tokenizer, tokens)) for tokens in (drafter.tokens[:place], drafter.tokens)
    )
    right = "".join(text[heading.index("drafter") :] for text in texts)
    assert "".join(right.split()) == "".join(f"{shared}»{whole[len(shared) :]}".split())


def test_columns_that_have_no_room_go_below() -> None:
    view = screen(width=60)
    bench = workbench(view)
    for line in ("/length 8", "/drafter on", "one two"):
        assert bench.handle(line) is Verdict.DONE
    view.take()
    assert bench.handle("/columns") is Verdict.DONE
    shown = view.take()[0]
    assert "ngram" in shown.splitlines()[0] and "drafter" not in shown.splitlines()[0] and "drafter" in shown
    assert all(len(line.rstrip()) <= 60 for line in shown.splitlines())
    assert workbench(view).handle("/columns") is Verdict.FAILED


def test_the_most_used_n_grams(ran: Workbench, view: Screen) -> None:
    assert ran.handle("/ngrams 5") is Verdict.DONE
    rows, message = view.take()
    storage, tokenizer = ran._bench.memory.storage, ran._pair.tokenizer
    counts = sorted((count for _, found in storage.contexts() for count in found.values()), reverse=True)
    assert [int(row.split("x")[0]) for row in rows.splitlines()] == counts[:5] and f"{len(storage)} n-grams" in message
    top = [
        (count, context, token)
        for context, found in storage.contexts()
        for token, count in found.items()
        if count == counts[0]
    ]
    spoken = {" ".join('"' + tokenizer.decode([part]) + '"' for part in (*context, token)) for _, context, token in top}
    assert any(words in rows.splitlines()[0] for words in spoken)
    assert workbench(view).handle("/ngrams") is Verdict.FAILED and ran.handle("/ngrams 0") is Verdict.FAILED
