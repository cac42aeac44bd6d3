"""The table of costs at two context lengths: between them times are linear, and older tables have only one."""

import pytest

from utils.config.value_types import COST_TABLE, Limits
from utils.errors import UserError
from utils.metrics.costs import MAX_SHARE, Costs

LONG = Costs.of([0.5, 0.9], {"head": 0.05}, length=1064, step=1.25)
COSTS = Costs.of([0.2, 0.4, 0.5], {"head": 0.06, "suffix": 0.01}, {"head": 4.0}, length=64, longer=LONG)


def parse(text: str) -> Costs | None:
    return COST_TABLE.parse(text, None, Limits())


def test_at_the_measured_lengths_the_costs_are_the_measured_ones() -> None:
    assert COSTS.at(64) == Costs(COSTS.verify, COSTS.draft, COSTS.read, 64)
    assert COSTS.at(3).verify == COSTS.verify, "not extrapolated to shorter texts"
    assert COSTS.at(1064).verify[:2] == pytest.approx(LONG.verify)
    assert COSTS.at(1064).draft_cost("head") == pytest.approx(0.05)


@pytest.mark.parametrize("length", [64, 200, 564, 1064, 2000])
def test_times_grow_linearly_with_the_context(length: int) -> None:
    costs, share = COSTS.at(length), (length - 64) / 1000
    step = 1 + share * 0.25  # in decode steps of the short context
    for drafts in (1, 2):
        long = 1.25 * (1 + LONG.verify_cost(drafts))
        expected = (1 - share) * (1 + COSTS.verify_cost(drafts)) + share * long
        assert step * (1 + costs.verify_cost(drafts)) == pytest.approx(expected)
    assert step * costs.draft_cost("head") == pytest.approx((1 - share) * 0.06 + share * 1.25 * 0.05)
    assert step * costs.reading_cost("head", 500) == pytest.approx(2.0)


def test_far_beyond_the_longer_context_costs_stay_the_same() -> None:
    end = 64 + int(1000 * MAX_SHARE)
    assert COSTS.at(10 * end).verify == COSTS.at(end).verify != COSTS.at(end - 100).verify
    falling = Costs.of([0.5], {"head": 0.5}, length=64, longer=Costs.of([0.1], {"head": 0.0}, length=1064, step=1))
    assert falling.at(10**6).verify == (0.0,) and falling.at(10**6).draft_cost("head") == 0, "no cost is negative"


def test_one_length_is_enough() -> None:
    old = Costs((0.1, 0.3), (("head", 0.07),))
    assert old.at(5000) == old and old.reading_cost("head", 5000) == 0
    assert Costs().prefill_cost(100) == 0


def test_a_prompt_is_read_in_at_most_half_of_what_rows_of_a_verify_pass_take() -> None:
    assert Costs((0.1, 0.3)).prefill_cost(100) == pytest.approx(10)
    assert Costs((0.3, 0.3)).prefill_cost(100) == Costs((0.3, 0.1)).prefill_cost(100) == 0


def test_tables_are_shown_as_they_are_typed() -> None:
    text = "at 64; verify 0.2 0.4 0.5; head 0.06; suffix 0.01; read head 4; at 1064 1.25; verify 0.5 0.9; head 0.05"
    assert COST_TABLE.show(COSTS) == text and parse(text) == COSTS
    assert "1,064" in COSTS.text and "1.25 times" in COSTS.text and "1,000 tokens by head 4.0" in COSTS.text


@pytest.mark.parametrize("text", ["verify 0.1 0.2; head 0.07"])
def test_tables_of_older_records_have_one_length(text: str) -> None:
    assert parse(text) == Costs((0.1, 0.2), (("head", 0.07),))


@pytest.mark.parametrize(
    "text",
    [
        "at; verify 1",
        "at 64",
        "at x; verify 1",
        "at 64 1 1; verify 1",
        "at 64; verify 1; at 64; verify 1",
        "at 64; verify 1; at 32; verify 1",
        "verify 1; at 64; verify 1",
        "at 1; verify 1; at 2; verify 1; at 3; verify 1",
        "verify 1; read head",
        "verify 1; read 2",
        "at -1; verify 1",
    ],
)
def test_tables_that_are_not_written_like_this_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="measure"):
        parse(text)
