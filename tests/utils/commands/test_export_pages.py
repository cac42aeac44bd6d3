"""/export report.html: everything that was measured, with exact figures, and any text as plain text."""

from __future__ import annotations

import base64
import gc
import hashlib
import re
import weakref
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fakes import Screen, open_session, records_of, screen, tiny_pair, with_speculative
from recordings import interrupt_after

from utils.comparison import session_state
from utils.comparison.run_texts import TextPiece, marked_text
from utils.comparison.session_state import ShownResult
from utils.comparison.strategies import STRATEGIES
from utils.decode.steps import Step
from utils.errors import UserError
from utils.repl.repl_session import ReplSession
from utils.repl.runner import Verdict
from utils.screen import report_page as report_page_module
from utils.screen.report_page import html_page, report_page, verbatim

HOSTILE = "<script>alert(1)</script> \x1b[31mred `a|b` **bold** [x](http://evil) </pre></td> & &amp; \"quoted\" 'x'"
VOID = {"meta", "br", "path", "circle", "rect"}


class Page(HTMLParser):
    """The texts of a page by tag, and its attributes. Raises AssertionError where tags are not balanced."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(source)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.stack += [] if tag in VOID else [tag]
        if tag in ("td", "pre", "p"):
            self.texts.append((tag, ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.stack.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        for tag in ("td", "pre", "p"):
            if tag in self.stack:
                self.texts[-1] = (tag, self.texts[-1][1] + data)
                return
        self.texts.append((self.stack[-1] if self.stack else "", data))

    def all(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def exported(session: ReplSession, path: Path) -> str:
    assert session.handle(f"/export {path}") is Verdict.DONE
    return path.read_text(encoding="utf-8")


class Exported(NamedTuple):
    """A session's report, and what it was made from."""

    html: str
    page: Page
    records: list[dict[str, Any]]
    results: Sequence[ShownResult]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("exports")
    session = open_session(screen(), records=folder / "records.jsonl")
    for line in ("/length 30", "/gamma 3", "one two one two", "/race 2", "/processor multinomial 1"):
        assert session.handle(line) is Verdict.DONE
    assert session.send(HOSTILE) is Verdict.DONE
    assert session.handle("/whatif") is Verdict.DONE
    html = exported(session, folder / "x.html")
    return Exported(html, Page(html), records_of(folder / "records.jsonl"), session.harness.state.results)


def test_the_page_is_whole_and_needs_nothing_else(exports: Exported) -> None:
    source, page = exports.html, exports.page
    assert source.startswith("<!DOCTYPE html>") and not page.all("script")
    tags = {tag for tag, _, _ in page.attributes}
    assert not tags & {"script", "link", "img", "iframe", "object", "a", "base", "form"}
    assert not [
        row for row in page.attributes if row[1] in ("src", "href", "xlink:href", "style") or row[1][:2] == "on"
    ]
    assert "http" not in re.sub(r"http://evil|http-equiv", "", source) and not re.search(r"url\(|@import", source)
    (policy,) = (value for _, name, value in page.attributes if name == "content" and "default-src" in value)
    (style,) = page.all("style")
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'" in policy
    assert len({value for _, name, value in page.attributes if name == "id"}) == 0, "ids of charts would clash"


def test_any_text_is_shown_as_text(exports: Exported) -> None:
    shown = HOSTILE.replace("\x1b", "␛")
    assert "\x1b" not in exports.html and "<script" not in exports.html
    assert any(text.lstrip("\n") == shown for text in exports.page.all("pre"))


def test_every_result_of_the_session_is_in_it(exports: Exported) -> None:
    page = exports.page
    headings = page.all("h2")
    assert [text.split(".")[0] for text in headings if text[0].isdigit()] == ["1", "2", "3", "4"]
    assert "/race" in " ".join(headings) and "/whatif" in " ".join(headings) and "Answer" in headings
    race = next(row for row in exports.records if row["record"] == "race")
    assert all(line in page.all("p") for line in race["conclusion"])
    assert sum(tag == "svg" and name == "role" for tag, name, _ in page.attributes) == 4  # one each, race and whatif
    words = " ".join(page.all("td"))
    assert all(word in words for word in ("tiny-target", "tiny-drafter", "torch", "float32", "multinomial 1"))


def test_figures_are_those_of_the_records(exports: Exported) -> None:
    cells = exports.page.all("td")
    for run in (row for row in exports.records if row["record"] == "generation"):
        assert {f"{run['tokens_per_second']:.1f}", f"{run['tokens_per_target_forward']:.2f}"} <= set(cells)
        if run["drafted"]:
            assert f"{run['acceptance_rate']:.3f}" in cells
            assert any(f"{run['draft_seconds']:.3f} s drafting" in text for text in exports.page.all("p"))
    race = next(row for row in exports.records if row["record"] == "race")
    assert len(race["findings"]) == 3


def test_texts_are_whole_and_accepted_drafts_are_marked(exports: Exported) -> None:
    source, kept = exports.html, exports.results
    shown = [text.removeprefix("\n") for text in exports.page.all("pre")]
    for result in kept:
        for row in result.records:
            if row["record"] == "generation":
                text = "".join(piece.text for piece in result.texts[row["strategy"]])
                assert text == row["text"] and (visible_in(shown, text) or row["strategy"] == "target")
    accepted = sum(row["accepted"] or 0 for result in kept for row in result.records if row["record"] == "generation")
    assert accepted and source.count("<mark>") and source.count("<mark>") <= accepted


def visible_in(shown: list[str], text: str) -> bool:
    return re.sub(r"[^\w ]", "", text) in [re.sub(r"[^\w ]", "", part) for part in shown]


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, tokens: list[int], **options: Any) -> str:
        return "".join(map(chr, tokens))


def test_marks_follow_the_steps() -> None:
    steps = [Step((97, 98, 99), 2, 100), Step((), 0, 101), Step((102,), 1, None), Step((103,), 0, 104)]
    assert marked_text(steps, Letters()) == (
        TextPiece("ab", True),
        TextPiece("de", False),
        TextPiece("f", True),
        TextPiece("h", False),
    )


def test_newlines_and_blanks_of_a_text_survive_in_html() -> None:
    (text,) = Page(html_page("x", [verbatim([TextPiece("\n\n  a  b\n", False)])])).all("pre")
    assert text == "\n\n\n  a  b\n", "the first newline is not part of the text"


def test_an_interrupted_report_is_named(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(view)
    for line in ("/length 4", "Hello"):
        assert session.handle(line) is Verdict.DONE
    interrupt_after(monkeypatch, 7)
    assert session.handle("/race 5") is Verdict.INTERRUPTED
    source = exported(session, tmp_path / "x.html")
    assert "(interrupted)" in source and "finished parts" in source


def test_other_models_are_another_setup(view: Screen, tmp_path: Path) -> None:
    def load(request: Any, report: Any) -> Any:
        pair = tiny_pair()
        pair.target_name = "other-target"
        return pair

    session = open_session(view, load=load)
    for line in ("/length 4", "Hello", "/load target=other", "Hello"):
        assert session.handle(line) is Verdict.DONE, view.take()
    page = Page(exported(session, tmp_path / "x.html"))
    assert {"Setup 1", "Setup 2"} <= set(page.all("h2"))
    assert any("setup 1." in text for text in page.all("p")) and any("setup 2." in text for text in page.all("p"))
    assert any("other-target" in text for text in page.all("td"))


def test_prompts_that_were_interrupted_at_once(view: Screen, tmp_path: Path) -> None:
    def steps(job: Any) -> Any:
        if "stop" in job.pair.tokenizer.decode(job.prompt):
            raise KeyboardInterrupt
        yield from STRATEGIES[0].steps(job)

    session = open_session(view, strategies=with_speculative(steps))
    assert session.handle("stop") is Verdict.INTERRUPTED
    assert session.handle(f"/export {tmp_path / 'a.json'}") in (Verdict.DONE, Verdict.FAILED)
    assert session.handle("/length 4") is Verdict.DONE and session.handle("Hello") is Verdict.DONE
    assert session.handle("stop") is Verdict.INTERRUPTED
    page = Page(exported(session, tmp_path / "x.html"))
    assert any("interrupted" in text for text in page.all("h3")) or "Hello" in " ".join(page.all("h2"))


def test_results_do_not_keep_models_that_were_replaced(view: Screen) -> None:
    session = open_session(view, load=lambda request, report: tiny_pair())
    for line in ("/length 4", "Hello", "/race 1", "/whatif", "/why"):
        assert session.handle(line) is Verdict.DONE, view.take()
    old = [weakref.ref(session.pair.target), weakref.ref(session.pair.drafter)]
    assert session.handle("/load target=other") is Verdict.DONE
    gc.collect()
    assert len(session.harness.state.results) == 4 and [model() for model in old] == [None, None]


def test_results_without_a_finished_run_are_no_page() -> None:
    with pytest.raises(UserError):
        report_page([ShownResult([])], "today")


def test_a_long_session_keeps_its_last_results(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (session_state, report_page_module):
        monkeypatch.setattr(module, "MAX_RESULTS", 2)
    session = open_session(view)
    for line in ("/length 2", "first", "second", "third"):
        assert session.handle(line) is Verdict.DONE
    page = Page(exported(session, tmp_path / "x.html"))
    assert any("Earlier results" in text for text in page.all("p"))
    assert "second" in " ".join(page.all("h2")) and "first" not in " ".join(page.all("h2"))
