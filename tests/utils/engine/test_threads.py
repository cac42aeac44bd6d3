"""How many threads are taken: as many as help, or what the user said."""

import pytest
import torch

from utils.engine import threads


class Clock:
    """A clock that a step of so many seconds moves."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.now = seconds, 0.0

    def __call__(self) -> float:
        return self.now

    def step(self) -> None:
        self.now += self.seconds[torch.get_num_threads()]


@pytest.fixture(autouse=True)
def _same_threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 3.0, 2: 5.0, 4: 6.0}, 1),
        ({1: 3.0, 2: 2.0, 4: 1.5}, 4),
        ({1: 3.0, 2: 2.0, 4: 1.98}, 2),
        ({1: 3.0, 2: 2.95, 4: 2.0}, 4),
    ],
)
def test_the_fewest_that_no_larger_number_beats_clearly(seconds: dict[int, float], best: int) -> None:
    clock = Clock(seconds)
    assert threads.fastest(clock.step, sorted(seconds), clock) == best
    assert torch.get_num_threads() == best


def test_counts_are_powers_of_two_and_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, counts in ((1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])):
        monkeypatch.setattr(threads, "_AVAILABLE", available)
        assert threads.thread_counts() == counts


def test_the_environment_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_AVAILABLE", 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.given_threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert threads.given_threads() is None
