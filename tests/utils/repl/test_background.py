"""The warm-up behind the prompt: nothing else touches the models meanwhile, and no measured run pays for it."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from threading import Event, Timer, current_thread, main_thread
from typing import Any
from unittest import mock

import pytest
import torch
from fakes import Screen, open_session, table_pair

from utils import screen
from utils.comparison import warm_up
from utils.comparison.strategies import STRATEGIES
from utils.config.settings import Settings
from utils.decode.model_session import ModelSession
from utils.engine import EngineState
from utils.errors import UserError
from utils.repl import loaded_pair
from utils.repl.loaded_pair import BackgroundTask
from utils.repl.repl_session import ReplSession, Verdict
from utils.repl.status import EXAMPLE, first_screen


def steps_recorded(made: list[str], gate: Event, decode: Callable[..., Any]) -> Callable[..., Any]:
    """A decoder that records in which thread it begins, and that waits for the gate in the warm-up."""

    def steps(job: Any) -> Any:
        warming = len(job.prompt) == 4 and set(job.prompt) == {0}
        made.append(("warm-up" if warming else "run") + ("" if current_thread() is main_thread() else " behind"))
        if warming:
            gate.wait(30)
        yield from decode(job)
        made.append("end")

    return steps


def recording_session(view: Screen, made: list[str], gate: Event, *, interactive: bool) -> ReplSession:
    table = [replace(row, steps=steps_recorded(made, gate, row.steps)) for row in STRATEGIES if row.name == "target"]
    session = open_session(view, strategies=table)
    session._tools = replace(session._tools, interactive=interactive)
    session.handle("/length 3")
    return session


def test_a_line_waits_for_the_warm_up_behind_the_prompt(view: Screen) -> None:
    made: list[str] = []
    gate = Event()
    session = recording_session(view, made, gate, interactive=True)
    session.introduce()
    assert session._loaded.warming.is_alive() and session.status()
    gate.set()
    assert session.handle("hello") is Verdict.DONE
    assert made == ["warm-up behind", "end", "run", "end"]
    assert session.handle("hello") is Verdict.DONE and made.count("warm-up behind") == 1


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("/quit", Verdict.QUIT),
        ("exit", Verdict.QUIT),
        pytest.param("/exit", Verdict.QUIT, marks=pytest.mark.full),
        ("/help gamma", Verdict.DONE),
    ],
)
def test_a_command_that_uses_no_model_does_not_wait_for_the_warm_up(view: Screen, line: str, verdict: Verdict) -> None:
    made: list[str] = []
    gate = Event()
    session = recording_session(view, made, gate, interactive=True)
    session.introduce()
    view.take()
    try:
        with mock.patch.object(BackgroundTask, "wait", side_effect=UserError("it waits")):
            assert session.handle(line) is verdict, view.take()
            assert session._loaded.warming.is_alive()
            assert session.handle("/gamma 3") is Verdict.FAILED, "anything else waits"
    finally:
        gate.set()
        session.close()


def test_without_a_prompt_to_wait_at_the_first_run_is_warmed_up_for(view: Screen) -> None:
    made: list[str] = []
    gate = Event()
    gate.set()
    session = recording_session(view, made, gate, interactive=False)
    session.introduce()
    assert session.handle("/gamma 3") is Verdict.DONE and not made
    for _ in range(2):
        assert session.handle("hello") is Verdict.DONE
    assert made == ["warm-up", "end", "run", "end", "run", "end"]


def test_ctrl_c_while_a_line_waits_drops_the_line_only(view: Screen) -> None:
    made: list[str] = []
    gate = Event()
    session = recording_session(view, made, gate, interactive=True)
    session.introduce()
    with mock.patch.object(BackgroundTask, "wait", side_effect=KeyboardInterrupt):
        assert session.handle("hello") is Verdict.INTERRUPTED
    gate.set()
    assert session.handle("hello") is Verdict.DONE and made[-2:] == ["run", "end"]


def test_the_end_of_the_session_ends_the_warm_up(view: Screen) -> None:
    made: list[str] = []
    gate = Event()
    session = recording_session(view, made, gate, interactive=True)
    session.introduce()
    warming = session._loaded.warming
    warming._stopped.set()
    gate.set()
    session.close()
    assert warming._ended.is_set() and made == ["warm-up behind"], "it ended before the run did"


def test_a_warm_up_that_is_stopped_begins_no_further_run(view: Screen) -> None:
    session = open_session(view)
    with mock.patch.object(ModelSession, "feed_rows") as begun:
        warm_up.warm_up(session.harness, session.settings, lambda: True)
    assert not begun.called


def test_an_error_of_the_warm_up_is_shown_once(view: Screen) -> None:
    session = open_session(view)
    session._tools = replace(session._tools, interactive=True)
    with mock.patch.object(loaded_pair, "warm_up", side_effect=MemoryError):
        session.introduce()
        assert session.handle("/gamma 3") is Verdict.FAILED
    assert session.handle("/gamma 3") is Verdict.DONE


def test_an_interrupted_first_warm_up_is_done_again() -> None:
    work = mock.Mock(side_effect=[KeyboardInterrupt, None])
    task = BackgroundTask(work)
    task.is_planned = True
    with pytest.raises(KeyboardInterrupt):
        task.finish()
    task.finish()
    task.finish()
    assert work.call_count == 2


def test_an_interrupted_wait_does_not_end_the_thread() -> None:
    """Otherwise the next line would use the models beside it."""
    gate = Event()
    task = BackgroundTask(lambda stopped: gate.wait() and None)
    task.start()
    Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        task.wait()
    assert task.is_alive()
    gate.set()
    task.wait()
    task.join()


def test_the_thread_has_the_number_of_threads_of_the_engine() -> None:
    counts: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    task = BackgroundTask(lambda stopped: counts.append(torch.get_num_threads()))
    task.start()
    task.wait()
    torch.set_num_threads(before)
    assert counts == [1]


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("state", [{}, {"tested_on": "2026-11-22"}, {"verified": False, "reason": "its layers differ"}])
def test_the_first_screen_is_short_and_says_what_is_guaranteed(width: int, state: dict[str, Any]) -> None:
    pair = table_pair()
    verified = {"kind": "invariant", "weights": "float32", "verified": True, "threads": 1}
    pair.engine.state = EngineState(**verified | state)
    lines = first_screen(pair, Settings(), 6.4, width)
    text = "\n".join(lines)
    rows = sum(max(1, -(-len(line) // width)) for line in lines)
    assert rows <= 11
    assert all(part in text for part in ("tiny-target", EXAMPLE, "/verdict", "/why", "/whatif", "/help", "6 s"))
    assert ("guaranteed" in text) is pair.engine.state.verified and state.get("tested_on", "") in text
    assert state.get("reason", "") in text


@pytest.mark.parametrize(("terminal", "term"), [(True, "xterm"), (False, "xterm"), (True, "dumb")])
def test_the_line_during_the_imports_is_for_terminals_only(
    terminal: bool, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [StringIO(), StringIO()]
    for stream, name in zip(streams, ("stdin", "stdout"), strict=True):
        monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
        monkeypatch.setattr(f"sys.{name}", stream)
    monkeypatch.setenv("TERM", term)
    screen.show_importing()
    screen.show_importing(screen.CLEAR_LINE)
    shown = terminal and term != "dumb"
    assert streams[1].getvalue() == (screen.IMPORTING + screen.CLEAR_LINE if shown else "")
