"""The number of threads: the fastest one, or what the environment asks for."""

from collections.abc import Iterator

import pytest
import torch

from utils.engine import threads


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
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
def test_the_smallest_number_that_no_larger_one_clearly_beats(seconds: dict[int, float], best: int) -> None:
    assert threads.fewest(seconds) == best


@pytest.mark.parametrize(("available", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])])
def test_candidates_are_the_powers_of_two_and_all(available: int, counts: list[int]) -> None:
    assert threads.candidate_counts(available) == counts


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # PyTorch has read it at its start
    assert threads.requested_threads() == threads.available_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert threads.requested_threads() is None


def test_an_error_restores_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt), threads.restored_on_error():
        torch.set_num_threads(before + 1)
        raise KeyboardInterrupt
    assert torch.get_num_threads() == before
