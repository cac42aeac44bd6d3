"""What is said in plain words about the runs of a prompt."""

import pytest

from utils.comparison.summary import ending
from utils.decode.steps import FinishReason, Step
from utils.metrics.results import Generation


def run_of(tokens: int, finish: FinishReason = FinishReason.LENGTH) -> Generation:
    return Generation((Step((), 0, 5),) * tokens, 1.0, 0.1, finish)


@pytest.mark.parametrize(
    ("finish", "words"),
    [
        (FinishReason.STOP, ()),
        (FinishReason.LENGTH, ("12", "/length")),
        (FinishReason.INTERRUPTED, ("interrupted",)),
    ],
)
def test_the_end_of_a_text_is_named_unless_it_ended_by_itself(finish: FinishReason, words: tuple[str, ...]) -> None:
    shown = ending(run_of(12, finish), 12)
    assert all(word in shown for word in words) and bool(shown) == bool(words)


def test_a_text_that_filled_the_context_does_not_advise_a_longer_length() -> None:
    assert "/length" not in ending(run_of(12), 13) and "context" in ending(run_of(12), 13)
