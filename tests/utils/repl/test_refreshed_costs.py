"""Costs of an earlier start: measured again behind the prompt if they do not fit any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
from fakes import Screen, open_session

from utils.comparison.harness import Harness
from utils.config.settings import Settings
from utils.engine import engine, forward_timing
from utils.metrics.costs import Costs
from utils.repl.loaded_pair import LoadedPair
from utils.repl.repl_session import ReplSession


@pytest.fixture
def session(view: Screen) -> ReplSession:
    opened = open_session(view)
    opened.harness.pair.engine.has_stored_costs = True
    return opened


def now(busy: float, wide: float = 1.0) -> Callable[..., bool]:
    """The check with forward passes that take `busy` times as long, wide ones `wide` times more."""

    def changed(probe: object, step_seconds: float, costs: tuple[float, ...]) -> bool:
        clock, probe = [0.0], mock.Mock(max_width=17)

        def forward(width: int) -> None:
            clock.append(clock[-1] + busy * step_seconds * (1 + 0.1 * (width - 1)) * (wide if width > 1 else 1))

        probe.forward.side_effect = forward
        with mock.patch.object(forward_timing, "perf_counter", lambda: clock[-1]):
            return forward_timing.times_have_changed(probe, step_seconds, costs)

    return changed


@pytest.mark.parametrize(
    ("busy", "wide", "again"),
    [(1.0, 1.0, False), (1.3, 1.0, False), (1.4, 1.0, True), (0.7, 1.0, True), (1.0, 1.4, True)],
)
def test_costs_that_are_off_by_a_third_are_measured_again(
    busy: float, wide: float, again: bool, session: ReplSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "times_have_changed", now(busy, wide))
    monkeypatch.setattr(engine, "verify_costs", lambda *arguments, **options: (2e-3, (0.5, 0.6)))
    before = session.settings
    session._loaded.refresh_costs(lambda: False)
    assert session.harness.pair.engine.step_seconds == (2e-3 if again else 1e-3)
    assert session.settings.costs is not None and (session.settings.costs.verify == (0.5, 0.6)) is again
    assert replace(session.settings, costs=before.costs) == before
    assert session.harness.pair.engine.has_stored_costs is not again


def test_typed_costs_and_those_of_this_start_are_left_alone(
    session: ReplSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = mock.Mock(return_value=True)
    monkeypatch.setattr(engine, "times_have_changed", check)
    loaded = session._loaded
    loaded.settings = replace(loaded.settings, costs=Costs.of((0.9,), {}))
    loaded.refresh_costs(lambda: False)
    session.harness.pair.engine.has_stored_costs = False
    loaded.refresh_costs(lambda: False)
    assert not check.called and session.settings.costs == Costs.of((0.9,), {})


def test_the_end_of_the_program_does_not_wait_for_a_measurement(
    session: ReplSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "times_have_changed", lambda *arguments: True)

    def measure(probe: object, *, report: Callable[[str], None]) -> object:
        report("measuring")
        raise AssertionError("it went on")

    monkeypatch.setattr(engine, "verify_costs", measure)
    report, before = session.harness.pair.engine.report, session.settings
    session._loaded.refresh_costs(lambda: True)
    assert session.harness.pair.engine.report == report and session.settings == before


def test_the_warm_up_does_it(view: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(view)
    session.harness.pair.engine.has_stored_costs = True
    monkeypatch.setattr(engine, "times_have_changed", lambda *arguments: True)
    monkeypatch.setattr(engine, "verify_costs", lambda *arguments, **options: (2e-3, (0.5, 0.6)))
    session._loaded.warming.start()
    session._loaded.warming.wait()
    assert session.harness.pair.engine.step_seconds == 2e-3


def test_an_interactive_start_measures_costs_behind_the_prompt(
    session: ReplSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, own = list[bool](), session.harness.pair.engine
    monkeypatch.setattr(engine, "verify_costs", lambda *arguments, **options: (2e-3, (0.5, 0.6)))

    def start(harness: Harness, settings: Settings, *, anew: bool = False) -> None:
        measured.append(not own.defers_costs)
        own.step_seconds, own.costs = (1e-3, (0.1, 0.2)) if measured[-1] else (0.0, ())

    monkeypatch.setattr(Harness, "start_engine", start)
    typed = Costs.of((0.9,), {})
    for defers, costs in ((False, None), (True, typed), (True, None)):
        loaded = LoadedPair(session.harness.pair, session._tools, Settings(costs=costs), defers_costs=defers)
    assert measured == [True, True, False] and loaded.settings.costs is None and not own.defers_costs
    loaded.measure_costs(lambda: False)
    assert loaded.settings.costs is not None and loaded.settings.costs.verify == (0.5, 0.6)
    loaded.measure_costs(lambda: pytest.fail("they are known"))
