"""Trials: the time of a whole model from the times of a few of its layers, and engines measured in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from decoder_families import tiny_model
from fake_engines import row, started, whole_llama
from fixed_speeds import FixedProbe, FixedSpeeds
from tiny import tiny_llama, tiny_mamba

from utils.decode.layer_cut import layer_kinds
from utils.engine import trials
from utils.engine.engine_choice import COMPARED_WIDTHS, choose
from utils.engine.invariant import InvariantEngine
from utils.engine.trials import ENOUGH, MAX_TURNS, MIN_TURNS, Meter, SlicePlan, Trials
from utils.engine.weight_format import EngineWeights

FIXED = {"full": 4.0, "sliding": 1.0, "dense": 2.0}  # seconds of a layer by its kind


def layers_time(kinds: Sequence[str]) -> float:
    """Of a pass over these layers, with embedding and output head."""
    return 10.0 + sum(FIXED[kind] for kind in kinds)


@pytest.mark.parametrize(
    ("kinds", "order"),
    [
        (["full"] * 2, (0, 1)),
        (["full"] * 32, (0, 1, 2)),
        (["sliding"] * 5 + ["full"], (0, 5, 1, 2)),
        (["sliding", "full"] * 6, (0, 1, 2, 4, 3, 5)),
        (["dense"] + ["full", "sliding", "sliding"] * 7, (0, 1, 2, 4, 7, 3, 5)),
    ],
)
def test_the_time_of_a_whole_model_follows_from_slices(kinds: list[str], order: tuple[int, ...]) -> None:
    plan = SlicePlan.for_kinds(kinds, 2)
    assert plan.order == order
    seconds = {depth: layers_time([kinds[index] for index in order[:depth]]) for depth in plan.factors}
    assert plan.total(seconds) == pytest.approx(layers_time(kinds))
    assert sum(plan.factors.values()) == pytest.approx(1)


def test_noise_cannot_make_a_layer_faster_than_nothing() -> None:
    plan = SlicePlan.for_kinds(["full"] * 32, 2)
    assert plan.total({1: 5.0, 3: 4.0}) == 5.0
    assert SlicePlan.for_kinds(["full"], 2).total({1: 5.0}) == 5.0


def test_kinds_of_layers_are_told_apart_by_their_windows() -> None:
    model = tiny_model("gemma3_text")  # sliding, full, sliding
    assert len({*layer_kinds(model)}) == 2
    plan = SlicePlan.of(model)
    assert plan.order == (0, 1, 2) and plan.factors == {3: 1.0}
    assert SlicePlan.of(tiny_mamba()) == SlicePlan((), {0: 1.0})


@torch.no_grad()
def test_a_slice_has_the_layers_of_its_order() -> None:
    model = tiny_llama(num_hidden_layers=6)
    plan = SlicePlan((3, 1), {1: -1.0, 2: 1.0})
    part = plan.slice_of(model)
    own = [layer.mlp.up_proj.weight for layer in part.model.layers]
    assert [weight is model.model.layers[index].mlp.up_proj.weight for weight, index in zip(own, (3, 1), strict=True)]
    assert {depth: cut.config.num_hidden_layers for depth, cut in plan.parts(part).items()} == {1: 1, 2: 2}


class LayeredProbe(FixedProbe):
    """A pass takes a fixed time and a time for each layer, both by engine."""

    def __init__(self, speeds: FixedSpeeds, name: str, layers: int) -> None:
        super().__init__(speeds, name)
        self.layers = layers

    def forward(self, width: int) -> None:
        self.speeds.now += layered(self.name, self.layers, width)

    def prefill(self, count: int) -> int:
        self.speeds.now += layered(self.name, self.layers, count // 32)
        return count


# name: seconds of embedding and head, and of a layer
LAYERED = {"plain": (0.004, 0.002), "invariant": (0.030, 0.0004), "flat": (0.002, 0.0015)}


def layered(name: str, layers: int, width: int) -> float:
    fixed, layer = LAYERED[name]
    return fixed + layer * layers * (1 + 0.1 * (width - 1))


def layered_trials(layers: int, **options: Any) -> Trials:
    builders, meter = {name: row(promise="") for name in LAYERED}, layered_meter(LayeredProbe)
    return Trials(tiny_llama(num_hidden_layers=layers), builders, EngineWeights(), [1], meter=meter, **options)


def layered_meter(probe: Any) -> Meter:
    """A clock that only these probes advance."""
    speeds = FixedSpeeds(lambda *arguments: 0.0)
    return Meter(lambda: speeds.now, lambda part, name: probe(speeds, name, part.config.num_hidden_layers))


@pytest.mark.parametrize(("layers", "best"), [(4, "flat"), (40, "invariant")])
def test_predictions_from_a_few_layers_are_those_of_the_whole_model(layers: int, best: str) -> None:
    """The engine with the slowest slice is the fastest one for many layers."""
    measured = layered_trials(layers)
    table, deepest = measured.run(), len(measured._plan.order)
    for name, figures in table.items():
        step = layered(name, layers, 1)
        assert figures.step_seconds == pytest.approx(step)
        if figures.costs:
            expected = {width: layered(name, layers, width) / step for width in COMPARED_WIDTHS}
            assert dict(figures.costs) == pytest.approx(expected)
            assert figures.prefill == pytest.approx(128 * deepest / (layers * layered(name, deepest, 4)))
    assert min(table, key=lambda name: table[name].step_seconds) == best


def test_the_buffer_that_empties_caches_is_as_large_as_the_layers_that_are_left_out() -> None:
    long, short = layered_trials(40), layered_trials(3)
    for each in (long, short):
        each.run()
    block = sum(part.numel() for part in long.model.model.layers[0].parameters())
    assert long._buffer.numel() == (40 - len(long._plan.order)) * block and short._buffer.numel() == 0


@pytest.mark.parametrize("layers", [1, 2, 4])
@torch.no_grad()
def test_trials_leave_the_model_as_it_was(layers: int) -> None:
    """A model of one layer cannot be cut."""
    model, ids = tiny_llama(num_hidden_layers=layers), torch.tensor([[5, 6, 7]])
    before, names, weights = model(ids).logits, [*vars(model)], [*model.parameters()]
    measured = Trials(model, {"invariant": InvariantEngine}, EngineWeights(), [1])
    assert measured.run()["invariant"].step_seconds > 0
    assert torch.equal(model(ids).logits, before) and model.config._attn_implementation == "sdpa"
    assert [*vars(model)] == names and all(map(torch.Tensor.is_set_to, model.parameters(), weights))


def turns(calls: list[tuple[str, int, int]]) -> list[str]:
    """The engines in the order in which a verify pass was measured."""
    return [name for name, _, width in calls if width == COMPARED_WIDTHS[1]]


@pytest.mark.parametrize(("step", "count"), [(0.001, MAX_TURNS), (ENOUGH, MIN_TURNS)])
def test_engines_are_measured_in_turns_until_it_takes_long(step: float, count: int, rows: Callable[..., None]) -> None:
    rows(first=row(), second=row())
    engine, speeds = started({"plain": 1.5 * step, "first": step, "second": 1.05 * step})
    assert engine.use("auto", 1).kind == "first"
    order = ["plain", "first", "second"]
    assert turns(speeds.calls) == [name for turn in range(count) for name in order[:: -1 if turn % 2 else 1]]


@pytest.mark.parametrize(("second", "count", "last"), [(0.0012, MAX_TURNS, MAX_TURNS), (0.0022, MIN_TURNS, 1)])
def test_an_engine_that_is_far_slower_is_measured_in_one_turn(
    second: float, count: int, last: int, rows: Callable[..., None]
) -> None:
    """One that has no other left to be compared with is measured in few turns."""
    rows(first=row(), second=row())
    engine, speeds = started({"plain": 0.01, "first": 0.001, "second": second})
    assert engine.use("auto", 1).kind == "first" and engine.table["plain"].costs
    counts = {name: turns(speeds.calls).count(name) for name in ("plain", "first", "second")}
    assert counts == {"plain": 1, "first": count, "second": last}


def test_a_machine_that_is_busy_most_of_the_time_does_not_decide(rows: Callable[..., None]) -> None:
    """Half of all passes take up to twice as long. The engines are 6 % apart."""
    rows(first=row(), second=row())
    model, right = whole_llama(), 0
    for seed in range(20):
        random, times = Random(seed), {"plain": 0.03, "first": 0.0106, "second": 0.010}

        def speed(name: str, threads: int, width: int, random: Random = random, times: Any = times) -> float:
            return times[name] * (1 + 0.1 * (width - 1)) * (1 + random.random() * (random.random() < 0.5))

        measured = Trials(model, {name: row() for name in times}, EngineWeights(), [1])
        measured.meter = FixedSpeeds(speed).meter()
        table = measured.run()
        right += table["second"].step_seconds < table["first"].step_seconds
    assert right >= 18


@pytest.mark.parametrize("threads", [[1], [1, 2]])
def test_large_models_do_not_give_up_equal_bits_because_the_machine_is_busy(threads: list[int]) -> None:
    """The time that a layer adds is multiplied by the number of layers, so that errors are, too."""
    builders, model, right = {"plain": row(promise=""), "invariant": row()}, tiny_llama(num_hidden_layers=24), 0
    speed = {"plain": (0.02, 0.012), "invariant": (0.02, 0.01)}
    for seed in range(20):
        with mock.patch.dict(LAYERED, speed), mock.patch.object(trials, "EXTRA_BYTES", 0):
            measured = Trials(model, builders, EngineWeights(), threads, meter=busy_meter(Random(seed)))
            right += choose(measured.run()).name == "invariant"
    assert right >= 18


def busy_meter(random: Random) -> Meter:
    """On its clock every second pass takes twice as long."""

    class BusyProbe(LayeredProbe):
        def forward(self, width: int) -> None:
            for _ in range(random.choice([1, 2])):
                super().forward(width)

    return layered_meter(BusyProbe)


def test_more_threads_are_not_tried_after_a_number_that_is_clearly_slower() -> None:
    speeds = FixedSpeeds(lambda name, threads, width: {1: 1.0, 2: 0.8, 3: 0.95, 4: 0.1}[threads])
    measured = Trials(whole_llama(), {"plain": row()}, EngineWeights(), [1, 2, 3, 4], meter=speeds.meter())
    assert measured.run()["plain"].threads == 2
    warm_up = 3  # passes with each number of threads
    assert sum(threads == 4 for _, threads, _ in speeds.calls) == warm_up


@pytest.mark.parametrize(
    ("slowness", "one_thread", "turns", "fast_turns"), [(1.9, 1.2, 4, 4), (2.1, 1.2, 1, 4), (1.9, 1.4, 2, 2)]
)
def test_numbers_of_threads_that_are_far_slower_are_tried_once(
    slowness: float, one_thread: float, turns: int, fast_turns: int
) -> None:
    """After the turn that warms up, and all numbers once with an engine that is far slower than another one."""
    times = {"plain": 0.01 * slowness, "fast": 0.01}
    speeds = FixedSpeeds(lambda name, threads, width: times[name] * (one_thread if threads == 1 else 1))
    measured = Trials(whole_llama(), {name: row() for name in times}, EngineWeights(), [1, 2], meter=speeds.meter())
    table = measured.run()
    assert {name: table[name].threads for name in times} == dict.fromkeys(times, 2)
    one = {name: sum(call[:2] == (name, 1) for call in speeds.calls) for name in times}
    assert one == {"plain": 3 * turns, "fast": 3 * fast_turns}, "passes with one thread"


def test_wide_passes_decide_the_number_of_threads_where_decode_steps_are_equal() -> None:
    speeds = FixedSpeeds(lambda name, threads, width: 1.0 if width == 1 else 3.0 / threads)
    measured = Trials(whole_llama(), {"plain": row()}, EngineWeights(), [1, 2], meter=speeds.meter())
    assert measured.run()["plain"].threads == 2


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 3.0, 2: 5.0, 4: 6.0}, 1),
        ({1: 3.0, 2: 2.0, 4: 1.5}, 4),
        ({1: 3.0, 2: 2.0, 4: 1.98}, 2),
        ({1: 3.0, 2: 2.95, 4: 2.0}, 4),
    ],
)
def test_the_smallest_number_of_threads_that_no_larger_one_clearly_beats(seconds: dict[int, float], best: int) -> None:
    assert trials.fewest_threads(seconds) == best


@pytest.mark.parametrize("slowed", [1, 2])
def test_a_short_disturbance_does_not_decide_the_number_of_threads(slowed: int) -> None:
    """As a busy core, or threads that are used for the first time."""
    passes = {1: 0, 2: 0}

    def speed(name: str, threads: int, width: int) -> float:
        passes[threads] += 1
        return (10 if threads == slowed and passes[threads] <= 8 else 1) / threads / 1024

    measured = Trials(whole_llama(), {"plain": row()}, EngineWeights(), [1, 2], meter=FixedSpeeds(speed).meter())
    assert measured.run()["plain"].threads == 2
