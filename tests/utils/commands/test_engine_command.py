"""/engine: the table of measurements, and why each engine is used or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import Screen, open_session, screen, tiny_pair

from utils.commands.setting_commands import engine_notes, engine_rows
from utils.engine.engine_choice import EngineFigures
from utils.engine.layer_engine import BIT_IDENTICAL
from utils.repl.repl_session import Verdict

ROW = EngineFigures(
    promise=BIT_IDENTICAL,
    verified=True,
    threads=16,
    step_seconds=0.1234,
    costs=((2, 1.11), (5, 1.25), (9, 10.5)),
    prefill=12345.6,
    nbytes=123_456_789_012,
    measured_on="2026-11-22",
)
PLAIN = replace(ROW, promise="", verified=False, step_seconds=0.1)


def table_of(pair: Any, **rows: EngineFigures) -> None:
    pair.engine.table = rows


def shown_lines(pair: Any, width: int) -> list[str]:
    view = screen(width)
    session = open_session(view, pair)
    view.take()
    assert session.handle("/engine") is Verdict.DONE
    return view.take()[0].splitlines()


def test_each_engine_has_a_line_that_fits_eighty_columns() -> None:
    pair = tiny_pair()
    session = open_session(screen(), pair)
    table_of(pair, plain=PLAIN, invariant=ROW)
    view = screen(80)
    session._renderer = view.renderer
    assert session.handle("/engine") is Verdict.DONE
    lines = view.take()[0].splitlines()
    assert max(map(len, lines)) <= 80
    line = next(line for line in lines if line.startswith("invariant"))
    assert line.split() == ["invariant", "123.4", "1.11", "1.25", "10.50", "12346", "123.5", "GB", "16", "equal"]
    used = next(line for line in lines if line.startswith("plain *"))
    assert used.split()[-2:] == ["can", "differ"]


def test_an_engine_that_was_not_compared_shows_its_present_costs(view: Screen) -> None:
    pair = tiny_pair()
    open_session(view, pair)
    rows = {cells[0]: cells for cells in engine_rows(pair.engine)}
    assert rows["plain *"][1:5] == ("1.0", "1.10", "1.40", "1.80")
    assert set(rows["invariant"][1:]) == {"-"}


def test_an_engine_that_was_given_up_as_slow_counts_as_compared(view: Screen) -> None:
    pair = tiny_pair()
    open_session(view, pair)
    pair.engine.state = replace(pair.engine.state, kind="invariant", verified=True)
    slow = "a decode step of plain takes 2.1 times that of invariant"
    table_of(pair, plain=replace(PLAIN, problem=slow, costs=()), invariant=ROW)
    notes = [*engine_notes(pair.engine)]
    assert f"plain: {slow}." in notes


def test_notes_give_the_expected_speeds_and_every_problem(view: Screen) -> None:
    pair = tiny_pair()
    open_session(view, pair)
    table_of(pair, plain=PLAIN, invariant=replace(ROW, step_seconds=0.08))
    notes = " ".join(engine_notes(pair.engine))
    assert "2026-11-22" in notes and notes.index("invariant 1") < notes.index("plain ") and "1.25x as fast" in notes
    assert "although" not in notes
    pair.engine.state = replace(pair.engine.state, kind="invariant", verified=True)
    table_of(pair, plain=replace(PLAIN, step_seconds=0.05), invariant=replace(ROW, step_seconds=0.055))
    assert any("invariant is used although plain is " in note for note in engine_notes(pair.engine))
    pair.engine.state = replace(pair.engine.state, kind="plain", verified=False)
    table_of(pair, plain=PLAIN, invariant=EngineFigures("the self-test failed, no memory"))
    assert "invariant: the self-test failed, no memory." in [*engine_notes(pair.engine)]


def test_an_engine_that_is_not_supported_is_listed_with_the_reason(view: Screen) -> None:
    pair = tiny_pair(kind="t5", chat=False)
    open_session(view, pair)
    assert "invariant: it is an encoder-decoder model." in [*engine_notes(pair.engine)]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_any_width_will_do(width: int) -> None:
    pair = tiny_pair()
    assert any("plain" in line for line in shown_lines(pair, width))
