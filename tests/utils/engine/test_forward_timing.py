"""Costs of verify passes, from a clock that the test advances."""

from typing import Any

import pytest
from tiny import tiny_llama, tiny_mamba, tiny_t5

from utils.engine.forward_timing import ForwardProbe, verify_costs


class TimedProbe(ForwardProbe):
    """Forward passes that take a given number of seconds by width."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.max_width, self.seconds, self.now = 17, seconds, 0.0

    def make_room(self, width: int) -> None:
        self.now += 100

    def forward(self, width: int) -> None:
        self.now += self.seconds[width]


def test_costs_are_in_decode_steps_and_linear_between_the_measured_widths() -> None:
    probe = TimedProbe({1: 2.0, 2: 2.4, 3: 3.0, 5: 4.0, 9: 6.0, 17: 10.0})
    seconds, costs = verify_costs(probe, lambda: probe.now)
    assert seconds == 2.0
    expected = [0.2, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, *(2.25 + 0.25 * step for step in range(8))]
    assert costs == pytest.approx(expected)


@pytest.mark.parametrize("build", [tiny_llama, tiny_t5, tiny_mamba])
def test_any_model_can_be_measured_for_longer_than_its_context(build: Any) -> None:
    probe = ForwardProbe(build())
    for _ in range(40):
        probe.forward(9)
    assert len(verify_costs(probe)[1]) == 16


def test_short_contexts_limit_the_width() -> None:
    probe = ForwardProbe(tiny_llama(max_position_embeddings=8))
    assert probe.max_width == 4
    assert len(verify_costs(probe)[1]) == 2
    assert verify_costs(ForwardProbe(tiny_llama(max_position_embeddings=2)))[1] == ()
