"""Progress with the time left: at most once a second, and never instead of the work."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_clock import FakeClock
from fakes import Screen, open_session

from utils.comparison import records as reports
from utils.comparison.records import Countdown
from utils.repl.repl_session import Verdict


def test_the_time_left_is_shown_once_a_second() -> None:
    clock = FakeClock()
    shown: list[str] = []
    count = Countdown(shown.append, clock)
    for step in range(1, 9):
        clock.now += 0.5
        count.at(step / 8, f"{step} of 8")
    assert [text.split(",")[0] for text in shown] == ["2 of 8", "4 of 8", "6 of 8", "8 of 8"]
    assert ["3 s" in shown[0], "2 s" in shown[1], "1 s" in shown[2], "0 s" in shown[3]] == [True] * 4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/whatif", ["replaying speculative", "replaying ngram"]),
        ("/audit 2", ["texts: 1 of 2", "logits: 2 of 2"]),
        ("/lossless 4", ["speculative: 3 of 4", "target: 2 of 4"]),
        ("/race 2", ["repeat 2 of 2"]),
    ],
)
def test_long_reports_say_how_far_they_are(
    line: str, words: list[str], view: Screen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reports, "INTERVAL", 0.0)
    session = open_session(view)
    for typed in ("/length 6", "/processor multinomial 1", "Hello"):
        assert session.handle(typed) is Verdict.DONE
    view.take()
    assert session.handle(line) is Verdict.DONE
    messages = view.take()[1]
    assert all(word in messages for word in words), messages
    assert " s left" in messages
