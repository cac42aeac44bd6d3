"""Costs of verify passes, from a clock that the test advances."""

from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tiny import tiny_bart, tiny_llama, tiny_mamba, tiny_t5

from utils.engine import Engine, forward_timing
from utils.engine.forward_timing import ENOUGH, ForwardProbe, LongerContext, verify_costs
from utils.engine.stored_results import ResultFile, StoredResult


class TimedProbe(ForwardProbe):
    """Forward passes that take a given number of seconds by width."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.max_width, self.seconds, self.now = 17, seconds, 0.0
        self.widths: list[int] = []

    def make_room(self, width: int) -> None:
        """Nothing is full."""

    def forward(self, width: int) -> None:
        self.widths.append(width)
        self.now += self.seconds[width]


SECONDS = {1: 2.0, 2: 2.4, 3: 3.0, 5: 4.0, 9: 6.0, 17: 10.0}


def timed_costs(probe: TimedProbe, **options: Any) -> tuple[float, tuple[float, ...]]:
    """The costs on the clock of a probe."""
    with mock.patch.object(forward_timing, "perf_counter", lambda: probe.now):
        return verify_costs(probe, **options)


def scaled(factor: float) -> TimedProbe:
    return TimedProbe({width: factor * seconds for width, seconds in SECONDS.items()})


def test_costs_are_in_decode_steps_and_linear_between_the_measured_widths() -> None:
    probe = scaled(0.01)
    seconds, costs = timed_costs(probe)
    assert seconds == pytest.approx(0.02)
    expected = [0.2, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, *(2.25 + 0.25 * step for step in range(8))]
    assert costs == pytest.approx(expected)


def test_a_disturbed_pass_does_not_make_a_wider_one_look_cheaper() -> None:
    """Costs that fall are averaged with those that they fall below."""
    costs = timed_costs(TimedProbe({1: 0.02, 2: 0.028, 3: 0.022, 5: 0.03, 9: 0.026, 17: 0.04}))[1]
    assert costs[:9] == pytest.approx([0.25, 0.25, 0.325, 0.4, 0.4, 0.4, 0.4, 0.4, 0.475])
    assert costs[-1] == pytest.approx(1.0)
    costs = timed_costs(TimedProbe({1: 0.02, 2: 0.018, 3: 0.019, 5: 0.015, 9: 0.026, 17: 0.022}))[1]
    assert costs[:4] == (0.0,) * 4 and costs[7:] == pytest.approx([0.2] * 9)
    costs = timed_costs(TimedProbe({1: 0.02, 2: 0.028, 3: 0.03, 5: 0.02, 9: 0.026, 17: 0.022}))[1]
    assert costs == pytest.approx([0.26] * 16)


@pytest.mark.parametrize(("disturbed", "rounds"), [(None, 2), (1, 4), (5, 4)])
def test_widths_of_a_slow_model_are_measured_again_after_a_disturbance(disturbed: int | None, rounds: int) -> None:
    """Which shows in a narrow pass that took longer than a wide one."""

    class DisturbedProbe(TimedProbe):
        def forward(self, width: int) -> None:
            super().forward(width)
            self.now += 0.4 * (width == disturbed and self.widths[1:].count(width) <= 2)

    probe = DisturbedProbe({width: 0.05 * seconds for width, seconds in SECONDS.items()})
    step, costs = timed_costs(probe)
    assert step == pytest.approx(0.1) and costs[3] == pytest.approx(1.0)
    assert probe.widths[1:].count(1) == probe.widths.count(5) == rounds


def test_steps_that_are_slower_after_a_wide_pass_do_not_make_verify_passes_look_cheap() -> None:
    class HotProbe(TimedProbe):
        hot = 0.0  # until when

        def forward(self, width: int) -> None:
            before = self.now
            super().forward(width)
            self.now += 0.2 * (self.now - before) * (width == 1 and before < self.hot)
            self.hot = self.now + 0.03 if width > 4 else self.hot

    step, costs = timed_costs(HotProbe({width: 0.003 * seconds for width, seconds in SECONDS.items()}))
    assert step == pytest.approx(0.006) and costs[3] == pytest.approx(1.0)


def test_in_a_longer_context_few_widths_are_measured() -> None:
    """What attention adds there grows evenly with the width, while the other costs rise in steps."""
    short, long = scaled(0.01), scaled(0.01)
    long.seconds = {width: seconds + 0.002 * width for width, seconds in short.seconds.items()}
    _, costs = timed_costs(short)
    step, longer = timed_costs(long, shorter=costs)
    assert set(long.widths) == {1, 9} and step == pytest.approx(0.022) and len(longer) == len(costs)
    # Exact at the measured width. Elsewhere an estimate, because the steps of the kernels weigh less there.
    assert longer[7] == pytest.approx((0.06 + 0.018) / 0.022 - 1)
    for count, width in ((1, 2), (2, 3), (4, 5), (16, 17)):
        assert 1 + longer[count - 1] == pytest.approx(long.seconds[width] / 0.022, rel=0.06)


@pytest.mark.parametrize("step", [0.01, 0.06, 0.25])
def test_measuring_takes_a_few_seconds(step: float) -> None:
    """Of a flat table, such as that of a model of 1.7 billion parameters on two cores."""
    costs = {1: 1.0, 2: 1.3, 3: 1.35, 5: 1.5, 9: 1.9, 17: 3.2}
    short, long = (TimedProbe({width: step * grown * cost for width, cost in costs.items()}) for grown in (1, 1.1))
    table = timed_costs(short)[1]
    timed_costs(long, shorter=table)
    assert short.now + long.now < 6 and long.now <= max(ENOUGH / 2, 2 * (long.seconds[1] + long.seconds[9]))
    assert all(short.widths.count(width) >= 2 for width in set(short.widths)), "one pass may have been interrupted"
    assert 9 in short.widths and len(table) >= 8


@pytest.mark.parametrize("build", [tiny_llama, tiny_bart, tiny_mamba])
def test_any_model_can_be_measured_for_longer_than_its_context(build: Any) -> None:
    probe = ForwardProbe(build())
    for _ in range(25):
        probe.forward(9)
    assert len(verify_costs(probe)[1]) == 16


def test_the_longer_context_is_padded_and_stays_as_long() -> None:
    model, widths = tiny_llama(max_position_embeddings=8192), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    probe: ForwardProbe | None = ForwardProbe(model)
    for length in (64, 4096):
        assert probe is not None and probe.length == length
        for width in (3, 1, 5):
            probe.forward(width)
        assert probe._session._cache.get_seq_length() == length - 1
        probe = probe.longer()
    assert widths == 2 * [4, 3, 1, 5], "short prefills"


def test_a_padded_cache_gives_usable_passes_only_where_it_is_safe() -> None:
    assert not ForwardProbe(tiny_t5())._is_padded and not ForwardProbe(tiny_mamba())._is_padded
    assert ForwardProbe(tiny_mamba()).longer() is None, "reading a long text would take long"


def test_short_contexts_limit_the_width() -> None:
    probe = ForwardProbe(tiny_llama(max_position_embeddings=8))
    assert probe.max_width == 4 and probe.longer() is None
    assert len(verify_costs(probe)[1]) == 2
    assert verify_costs(ForwardProbe(tiny_llama(max_position_embeddings=2)))[1] == ()


@pytest.mark.parametrize("longer", [LongerContext(64, 1024, 0.0125, (0.3, 0.5)), None])
def test_costs_of_both_lengths_are_stored(longer: LongerContext | None, tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "results.json")
    result = StoredResult("plain", "", 1, "2026-11-23", 0.01, (0.2, 0.4), longer, {"head": (0.1, 0.2)})
    file.put("key", asdict(result))
    assert file.result("key") == result


def test_an_engine_measures_both_lengths() -> None:
    model = tiny_llama(max_position_embeddings=2048)
    engine = Engine([model])
    engine.measure()
    assert engine.longer is not None and (engine.longer.short, engine.longer.length) == (64, 2048 - 17)
    assert len(engine.longer.costs) == len(engine.costs) and engine.longer.step_seconds > 0
