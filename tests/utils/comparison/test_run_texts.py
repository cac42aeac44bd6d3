"""Which text a run is compared with on the screen, and where the difference begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_runs import local_run

from utils.comparison.arms import Run, relation, start_of_context
from utils.comparison.strategies import STRATEGIES
from utils.decode.steps import FinishReason, Step
from utils.metrics.results import Generation, first_difference

ROWS = {row.name: row for row in STRATEGIES}


def run_of(*tokens: int, name: str = "drafter") -> Run:
    steps = tuple(Step((), 0, token) for token in tokens)
    return local_run(ROWS[name], Generation(steps, 1.0, 0.1, FinishReason.LENGTH))


def earlier(**runs: tuple[int, ...]) -> list[Run]:
    return [run_of(*tokens, name=name) for name, tokens in runs.items()]


@pytest.mark.parametrize(
    ("tokens", "other", "sentence"),
    [
        ((1, 2, 3), "speculative", "= same text"),
        ((1, 2, 4), "ngram", "= same text as ngram"),
        ((1, 9, 4), "speculative", "differs from token 2:"),
        ((1, 2), "speculative", "the same up to token 2, where it ends"),
        ((1, 2, 3, 4), "speculative", "the same, and longer from token 4:"),
    ],
)
def test_a_text_is_compared_with_an_equal_one_or_the_first(tokens: tuple[int, ...], other: str, sentence: str) -> None:
    compared, shown = relation(run_of(*tokens), earlier(speculative=(1, 2, 3), ngram=(1, 2, 4)))
    assert (compared.name, shown) == (other, sentence)


def test_the_targets_text_comes_before_the_first_one() -> None:
    runs = earlier(speculative=(1, 2, 3), target=(1, 2, 4))
    other, sentence = relation(run_of(1, 5), runs)
    assert other.name == "target" and sentence == "differs from target from token 2:"
    both = earlier(speculative=(1, 2), target=(1, 2))
    assert relation(run_of(1, 2), both)[0].name == "target"


@given(st.text("ab \n", max_size=60), st.text("ab \n", max_size=60))
def test_the_context_of_a_difference_is_before_it_on_its_line(ours: str, theirs: str) -> None:
    start = first_difference(ours, theirs) or 0
    context = start_of_context(ours, start)
    assert context <= start and "\n" not in ours[context:start]


def test_a_few_whole_words_are_shown_before_a_difference() -> None:
    text = "one two three four five six seven eight nine"
    assert text[start_of_context(text, len(text)) :] == "four five six seven eight nine"
    assert start_of_context("x" * 100, 100) == 68
    assert start_of_context("short text", 6) == 0
