"""Reports on a terminal of 80 columns: one line per row, below a headline that names the prompt or the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import open_session, reported, screen

from utils.repl.repl_session import Verdict

PROMPT = "one two one two three"
TASKS = ("summarization of long documents", "code")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {task}", "task": task}) + "\n" for task in TASKS))
    return path


@pytest.mark.parametrize(
    "line",
    [
        "/race 1",
        "/race 5",
        "/race 2 {prompts}",
        "/sweep gamma 0 auto x1",
        "/sweep drafter_kind loaded, suffix x1",
        "/sweep processor greedy, topknucleus 0.7 40 0.95 x1",
        "/whatif",
        "/audit 1",
        "/replay {records}",
        "/lossless 3",
    ],
)
def test_a_table_has_one_line_per_row(
    line: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = reported(monkeypatch)
    view, records = screen(width=80), tmp_path / "records.jsonl"
    session = open_session(view, records=records)
    for typed in ("/length 8", "/drafter_kind loaded suffix", PROMPT, "/processor multinomial 1"):
        assert session.handle(typed) is Verdict.DONE
    assert session.handle(line.format(prompts=prompts, records=records)) is Verdict.DONE, view.take()
    report, figures = shown[-1]
    assert (PROMPT in report.headline) != ("{" in line) and report.headline.startswith(line.split()[0])
    rows = [report.cells(row) for row in report.shown(figures)]
    view.take()
    view.renderer.table(report.headings, rows, report.optional)
    lines = view.take()[0].splitlines()
    assert len(lines) <= len(rows) + 2, "\n".join(lines)
    assert [text.split()[0] for text in lines[-len(rows) :]] == [cells[0].split()[0] for cells in rows]
    assert all(len(text.rstrip()) <= 80 for text in lines)


def test_a_transposed_table_has_one_line_per_heading(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = reported(monkeypatch)
    view = screen(width=80)
    session = open_session(view)
    for typed in ("/length 24", PROMPT):
        assert session.handle(typed) is Verdict.DONE
    view.take()
    assert session.handle("/why") is Verdict.DONE
    lines = view.take()[0].splitlines()
    first = next(index for index, text in enumerate(lines) if text.startswith("strategy "))
    headings = shown[-1][0].headings
    for heading, text in zip(headings, lines[first : first + len(headings)], strict=True):
        assert text.startswith(heading) and len(text.rstrip()) <= 80
