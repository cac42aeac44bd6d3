"""Ranges accept exactly the allowed numbers, and a refusal names the value, the range and the nearest valid value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from utils.bounds import SEED, TOP_P, RealRange, WholeRange, check_device
from utils.errors import UserError, check_choice


@given(st.integers(-10, 10), st.integers(-5, 5), st.one_of(st.none(), st.integers(0, 5)))
def test_a_whole_range_accepts_what_lies_in_it(value: int, low: int, width: int | None) -> None:
    allowed = WholeRange(low, None if width is None else low + width)
    if low <= value and (width is None or value <= low + width):
        assert allowed.check(value) == allowed.parse(str(value)) == value
        return
    with pytest.raises(UserError) as caught:
        allowed.check(value, "count")
    nearest = low if value < low else low + (width or 0)
    assert all(part in str(caught.value) for part in (f"count {value}", str(allowed), f"nearest is {nearest}"))


@pytest.mark.parametrize("text", ["", "x", "1_0", "1.0", "٣", "1 2", "0x1", " 1", "9" * 31])
def test_only_decimal_digits_are_whole_numbers(text: str) -> None:
    with pytest.raises(UserError, match=str(SEED)):
        SEED.parse(text)


@pytest.mark.parametrize("value", [None, 1.0, "1", float("inf")])
def test_values_of_other_types_are_not_whole_numbers(value: object) -> None:
    with pytest.raises(UserError, match="at least 0"):
        WholeRange(0).check(value)  # type: ignore[arg-type]


def test_a_real_range_may_exclude_its_lower_bound() -> None:
    assert TOP_P.parse(".5") == 0.5 and TOP_P.check(1) == 1 and RealRange("x", 0, 1).check(0) == 0
    for text in ("0", "1.01", "-1", "nan", "inf", "1_0", ""):
        with pytest.raises(UserError, match=str(TOP_P)):
            TOP_P.parse(text)
    with pytest.raises(UserError, match=str(TOP_P)):
        TOP_P.check(float("nan"))
    with pytest.raises(UserError, match=r"top-p 1\.0000001 is out of range"):
        TOP_P.parse("1.0000001")


def test_devices_and_choices() -> None:
    assert [check_device(name) for name in ("auto", "cpu", "mps", "cuda", "cuda:1")]
    for name in ("gpu", "cuda:", "cuda:x", "CPU", ""):
        with pytest.raises(UserError, match="cuda:N"):
            check_device(name)
    assert check_choice("a", ("a", "b"), "letter") == "a"
    with pytest.raises(UserError, match=r"'nuclues'.*topk, nucleus.*\bnucleus\?"):
        check_choice("nuclues", ("topk", "nucleus"), "processor")
