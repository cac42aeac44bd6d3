"""/replay of a recorded file in a new session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fakes import Screen, open_session, records_of
from recordings import Row

from utils.repl.runner import Verdict

SAMPLING = ("/length 14", "/processor multinomial 1", "Hello there")


def replayed(view: Screen, file: Path, pair: Any = None) -> tuple[list[Row], str]:
    """The rows and the conclusion of a replay in a new session, which the replay does not change."""
    again = file.with_name("again.jsonl")
    session = open_session(view, pair, records=again, draft_seconds=lambda job: 0.5)
    before = session.settings
    assert session.handle(f"/replay {file}") is Verdict.DONE, view.take()
    assert session.settings is before and not session.harness.state.storage and session.harness.state.last is None
    report = records_of(again)[-1]
    return report["findings"], "\n".join(report["conclusion"])
