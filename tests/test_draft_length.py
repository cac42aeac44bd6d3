"""How many n-gram drafts are sent: the number with the most expected tokens per time, learnt from the run."""

from itertools import product

import pytest
from tiny import tiny_llama

from ngram_assisted import DraftLength, NGramDrafter, NGramStorage
from sampling import speculative_steps
from sampling.drafting import Verified
from utils.caching import ModelSession
from utils.decoding import Decoding
from utils.results import tokens_of

DEAR, CHEAP = (0.8, 1.1, 1.2, 1.3), (0.05, 0.1, 0.15, 0.2)


@pytest.mark.parametrize("costs", [DEAR, CHEAP, (0.3,)])
def test_the_best_number_is_the_best_of_all_numbers(costs: tuple[float, ...]) -> None:
    length = DraftLength(costs)
    for sizes in product((1, 2, 3), repeat=5):

        def rate(count: int, sizes: tuple[int, ...] = sizes) -> float:
            tokens, reached = 1.0, 1.0
            for size in sizes[:count]:
                reached *= length.chance(size)
                tokens += reached
            return tokens / (1 + length.cost(count))

        assert rate(length.best(sizes)) == max(rate(count) for count in range(6))


def test_it_stops_drafting_where_nothing_stands_and_tries_again_later() -> None:
    length = DraftLength((0.2, 0.3, 0.4))
    assert length.best([2, 2, 2]) == 3
    for _ in range(40):
        length.learn([2, 2, 2][: length.best([2, 2, 2])], 0)
    tries = []
    for _ in range(200):
        count = length.best([2, 2, 2])
        tries.append(count)
        length.learn([2] * count, 0)
    assert 0 < sum(count > 0 for count in tries) < 40  # seldom, but again and again


def test_what_stands_is_drafted_longer() -> None:
    length = DraftLength(DEAR)
    assert length.best([1] * 8) == 0
    for _ in range(30):
        length.learn([1] * 4, 4)
    assert length.best([1] * 8) == 8
    assert length.chance(1) < 1


def test_only_what_was_reached_is_evidence() -> None:
    length = DraftLength(CHEAP)
    before = length.chance(3)
    length.learn([2, 2, 3, 3], 1)  # the second failed: the others were never tried
    assert length.chance(3) == before
    assert length.chance(0) == 0  # drawn at random


def test_costs_go_on_beyond_the_last_one() -> None:
    length = DraftLength((0.1, 0.3))
    assert [round(length.cost(count), 6) for count in range(5)] == [0, 0.1, 0.3, 0.5, 0.7]
    assert DraftLength(()).best([1, 1]) == 2  # nothing could be measured


def test_the_drafter_learns_how_many_of_its_drafts_stood() -> None:
    heard: list[tuple[list[int], int]] = []

    class Ear(DraftLength):
        def learn(self, sizes, accepted):
            heard.append((list(sizes), accepted))

    storage, plan = NGramStorage(3, 64), Decoding.of(None, 9, end_ids=None, seed=0)
    drafter = NGramDrafter(storage, plan.noise, filler_top_k=1, length=Ear((0.0,)))
    drafter.begin([5, 6, 7, 8, 5, 6], [5, 6, 7, 8, 5, 6])
    draft = drafter.propose([5, 6, 7, 8, 5, 6], 3)
    assert draft.tokens == [7, 8, 5]
    drafter.commit([5, 6, 7, 8, 5, 6, 7, 8, 9], Verified(6, None, None))  # type: ignore[arg-type]
    assert heard == [([2, 2, 2], 2)]


@pytest.mark.parametrize("seed", range(4))
def test_adapting_changes_the_drafts_and_never_the_text(seed: int) -> None:
    model = tiny_llama()
    plan = Decoding.of(None, 60, end_ids=None, seed=seed)

    def run(length: DraftLength | None) -> tuple[list[int], int]:
        drafter = NGramDrafter(NGramStorage(3, 64), plan.noise, length=length)
        steps = list(speculative_steps([1, 2, seed], drafter, ModelSession(model), plan, gamma=6))
        return tokens_of(steps), sum(len(step.drafted) for step in steps)

    fixed, dear, cheap = run(None), run(DraftLength(DEAR)), run(DraftLength(CHEAP))
    assert fixed[0] == dear[0] == cheap[0]
    assert dear[1] <= cheap[1] < fixed[1] and cheap[1] > 0
