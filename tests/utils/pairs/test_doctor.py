"""The convention doctor finds a wrong reading, leaves a right one alone, and recognises a drafter of another target."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from trained_drafter import LAYERS, PROMPT, RIGHT, SIZE, random_drafter, target_model, text_of, trained

from utils.errors import UserError
from utils.models.feature_drafter import Conventions
from utils.pairs import doctor
from utils.pairs.doctor import (
    GROUP,
    LEAST_GROUPS,
    SIGNIFICANCE,
    examine,
    other_readings,
    own_text,
    shifted_layers,
    sign_flip_test,
)
from utils.pairs.doctor import _significance as significance

pytestmark = pytest.mark.usefixtures("readings_compared_once")


def diagnosed(conventions: Conventions) -> Any:
    target, text, drafter = trained()
    drafter.conventions = conventions
    found = examine(drafter, target, text, PROMPT)
    assert drafter.conventions == conventions
    return found


def test_a_right_reading_is_left_alone():
    found = diagnosed(RIGHT)
    assert found.better is None and found.reads_target
    assert found.readings[0].agreement[0] > 0.9


@pytest.mark.parametrize(
    "wrong",
    [
        replace(RIGHT, feature_layers=(1, 3, 4)),
        pytest.param(replace(RIGHT, norm_before_residual=True), marks=pytest.mark.full),
        pytest.param(replace(RIGHT, feature_layers=(3, 5, 6)), marks=pytest.mark.full),
        pytest.param(replace(RIGHT, norm_output=False), marks=pytest.mark.full),
    ],
)
def test_a_wrong_reading_is_replaced_by_the_one_it_was_trained_with(wrong):
    found = diagnosed(wrong)
    assert found.better is not None and found.better.conventions == RIGHT and found.reads_target


def test_a_drafter_of_another_target_is_recognised():
    _, _, drafter = trained()
    drafter.conventions = RIGHT
    other = target_model(seed=5)
    found = examine(drafter, other, text_of(other), PROMPT)
    assert found.better is None and not found.reads_target


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((2, 4, 5), {(3, 5, 6), (1, 3, 4)}),
        ((1, 4, 8), {(0, 3, 7), (1, 4, 9)}),  # 8 is after the final norm, 9 before it
        ((2, 5, 9), {(1, 4, 7), (2, 5, 8)}),
        ((0, 2, 7), {(1, 3, 9), (1, 3, 8)}),
        ((-1,), {(7,), (9,)}),
    ],
)
def test_shifted_layers_stay_within_the_target(layers, expected):
    assert set(shifted_layers(layers, LAYERS).values()) == expected


@pytest.mark.full
def test_two_wrong_conventions_are_corrected_by_two_examinations():
    first = diagnosed(replace(RIGHT, feature_layers=(3, 5, 6), norm_output=False))
    assert first.better is not None and diagnosed(first.better.conventions).better.conventions == RIGHT


def test_readings_are_compared_on_the_drafts_that_all_of_them_have():
    deep, shallow = torch.tensor([[1, 0, 1]] * 40), torch.tensor([[1, 0]] * 40)
    assert significance(deep, shallow) == significance(shallow, deep) == 1.0


def test_the_sign_flip_test_is_exact():
    assert sign_flip_test([1, 1, 1]) == 1 / 8 and sign_flip_test([1, 1, -1]) == 4 / 8 and sign_flip_test([]) == 1.0
    differences = [3, -1, 2, 2, 0]
    sums = [
        sum(sign * each for sign, each in zip(signs, differences, strict=True)) for signs in product((1, -1), repeat=5)
    ]
    assert sign_flip_test(differences) == sum(total >= 6 for total in sums) / 32


def test_false_alarms_are_as_rare_as_stated(monkeypatch):
    """Other readings are as good as the present one, and neighbouring positions depend on each other."""
    target, text, drafter = trained()
    drafter.conventions = RIGHT
    generator, alarms, runs = torch.Generator().manual_seed(0), 0, 300

    def lucky(self: Any, drafter: Any, conventions: Conventions, *, moved: int = 0) -> torch.Tensor:
        luck = torch.rand(64 + 3, 3, generator=generator)
        return (luck.unfold(0, 4, 1).amin(-1) < 0.1).long()  # each position shares three of its four causes

    monkeypatch.setattr(doctor.OwnText, "hits", lucky)
    monkeypatch.setattr(doctor, "_hidden_states", lambda *arguments: {})
    for _ in range(runs):
        found = examine(drafter, target, text, PROMPT, report=str)
        alarms += found.better is not None
    assert len(found.readings) == 1 + len(other_readings(drafter))
    assert alarms <= 3 * SIGNIFICANCE * runs  # a probability below 0.001 if the rate is the stated one


def test_a_text_that_goes_round_in_circles_raises_no_false_alarm():
    """A repeated passage would count the same lucky draft again and again."""
    for seed in range(3):
        drafter = random_drafter(seed)
        text = [*range(PROMPT), *range(20, 20 + SIZE // 4), *[1, 2, 3, 4, 5, 6, 7] * 25]
        with pytest.raises(UserError, match="are needed"):
            examine(drafter, target_model(), text, PROMPT)
    varied = torch.randint(SIZE, (GROUP * LEAST_GROUPS + 8,), generator=torch.Generator().manual_seed(1)).tolist()
    found = examine(drafter, target_model(), [*varied, *[1, 2, 3, 4, 5, 6, 7] * 25], PROMPT)
    assert found.positions < len(varied) + 7 and found.better is None


@pytest.mark.full  # one of another target's text is in utils/commands/test_pair_doctor.py
def test_a_random_drafter_is_neither_corrected_nor_said_to_fit():
    target = target_model()
    found = examine(random_drafter(0), target, text_of(target), PROMPT)
    assert found.better is None and not found.reads_target


def test_own_text_is_what_the_target_says_and_is_counted():
    target, lines = target_model(), []
    text = own_text(target, [1, 2, 3], 5, lines.append)
    assert text[:3] == [1, 2, 3] and len(text) == 8 and len(lines) == 5
