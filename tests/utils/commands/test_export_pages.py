"""/export report.html: everything that was shown, and any text as plain text."""

from __future__ import annotations

import gc
import re
import weakref
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, open_session, screen, tiny_pair, with_speculative
from recordings import interrupt_after

from utils.comparison.strategies import STRATEGIES
from utils.repl.repl_session import ReplSession, Verdict
from utils.screen import renderer

HOSTILE = "<script>alert(1)</script> \x1b[31mred `a|b` **bold** [x](http://evil) </pre></td> & &amp; \"quoted\" 'x'"


def exported(session: ReplSession, path: Path) -> tuple[str, str]:
    """The page, and the text that it shows."""
    assert session.handle(f"/export {path}") is Verdict.DONE
    page = path.read_text(encoding="utf-8")
    return page, unescape(re.sub(r"<[^>]*>", "", page.partition("<body>")[2]))


def words(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("colour", [True, False])
def test_the_page_has_what_was_shown(colour: bool, tmp_path: Path) -> None:
    view = screen(colour=colour)
    session = open_session(view)
    for line in ("/length 12", "/debug full", "one two one two", "/race 2", "/processor multinomial 1"):
        assert session.handle(line) is Verdict.DONE
    assert session.send(HOSTILE) is Verdict.DONE
    assert session.handle("/whatif") is Verdict.DONE
    shown = re.sub(r"\x1b\[[0-9;]*m", "", view.take()[0])
    page, text = exported(session, tmp_path / "x.html")
    assert page.startswith("<!DOCTYPE html>") and "<script" not in page and "\x1b" not in page
    assert not re.search(r"(src|href)=|url\(|@import", page)
    for line in shown.splitlines():
        assert words(line) in words(text), line
    assert words(HOSTILE.replace("\x1b", "␛")) in words(text) and "/race 2 of" in text
    assert (len(set(re.findall(r"[^-]color: (#\w+)", page))) > 4) is colour


def test_an_interrupted_report_is_named(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(view)
    for line in ("/length 4", "Hello"):
        assert session.handle(line) is Verdict.DONE
    interrupt_after(monkeypatch, 7)
    assert session.handle("/race 5") is Verdict.INTERRUPTED
    assert "Stopped. Finished so far" in exported(session, tmp_path / "x.html")[1]


def test_prompts_that_were_interrupted_at_once(view: Screen, tmp_path: Path) -> None:
    def steps(job: Any) -> Any:
        if "stop" in job.pair.tokenizer.decode(job.prompt):
            raise KeyboardInterrupt
        yield from STRATEGIES[0].steps(job)

    session = open_session(view, strategies=with_speculative(steps))
    assert session.handle("stop") is Verdict.INTERRUPTED
    assert session.handle(f"/export {tmp_path / 'a.json'}") in (Verdict.DONE, Verdict.FAILED)
    assert session.handle("/length 4") is Verdict.DONE and session.handle("Hello") is Verdict.DONE
    assert "Hello" in exported(session, tmp_path / "x.html")[1]


def test_results_do_not_keep_models_that_were_replaced(view: Screen) -> None:
    session = open_session(view, load=lambda request, report: tiny_pair())
    for line in ("/length 4", "Hello", "/race 1", "/whatif", "/why"):
        assert session.handle(line) is Verdict.DONE, view.take()
    old = [weakref.ref(session.harness.pair.target), weakref.ref(session.harness.pair.drafter)]
    assert session.handle("/load target=other") is Verdict.DONE
    gc.collect()
    assert [model() for model in old] == [None, None]


def test_a_long_session_keeps_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "KEPT", 12)
    session = open_session(screen())
    for line in ("/length 2", "zebra", "second", "third", "fourth"):
        assert session.handle(line) is Verdict.DONE
    text = exported(session, tmp_path / "x.html")[1]
    assert "target" in text and "zebra" not in text
