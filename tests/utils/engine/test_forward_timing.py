"""What a wider window costs, from a clock that the test moves."""

from typing import Any

import pytest
from tiny import tiny_llama, tiny_mamba, tiny_t5

from utils.engine.forward_timing import Pace, window_costs


class Paced(Pace):
    """Forwards that take as many seconds as they are told."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.widest, self.seconds, self.now = 17, seconds, 0.0

    def make_room(self, width: int) -> None:
        self.now += 100

    def forward(self, width: int) -> None:
        self.now += self.seconds[width]


def test_costs_are_in_plain_steps_and_between_the_widths_on_a_line() -> None:
    pace = Paced({1: 2.0, 2: 2.4, 3: 3.0, 5: 4.0, 9: 6.0, 17: 10.0})
    seconds, costs = window_costs(pace, lambda: pace.now)
    assert seconds == 2.0
    assert [round(cost, 3) for cost in costs] == [
        0.2,
        0.5,
        0.75,
        1.0,
        1.25,
        1.5,
        1.75,
        2.0,
        *(2.25 + 0.25 * step for step in range(8)),
    ]


@pytest.mark.parametrize("build", [tiny_llama, tiny_t5, tiny_mamba])
def test_any_model_has_a_pace_also_with_a_short_context(build: Any) -> None:
    pace = Pace(build())
    for _ in range(40):
        pace.forward(9)
    assert len(window_costs(pace)[1]) == 16


def test_a_context_of_eight_tokens_is_enough() -> None:
    pace = Pace(tiny_llama(max_position_embeddings=8))
    assert pace.widest == 4
    assert len(window_costs(pace)[1]) == 2
    assert window_costs(Pace(tiny_llama(max_position_embeddings=2)))[1] == ()
