"""Causes of a fall of the speed-up: the figures of a run against a hand-computed example, swaps, and false alarms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from local_runs import local_run
from simulations import FEWER as RESAMPLES

from utils.commands.ladder import (
    ACCEPTANCE,
    DRAFTING,
    FEWER,
    SWAPS,
    VERIFYING,
    RoundModel,
    cause_effects,
    main_cause,
)
from utils.comparison.arms import Run
from utils.comparison.strategies import STRATEGIES
from utils.decode.steps import FinishReason, Step
from utils.metrics import intervals
from utils.metrics.results import Generation, RoundTiming
from utils.servers.address import ServerAddress
from utils.servers.kinds.completion import Piece, ServerAcceptance, ServerCompletion

ROWS = {row.name: row for row in STRATEGIES}


def target_run(tokens: int, step: float = 1.0, prefill: float = 5.0) -> Run:
    steps = tuple(Step((), 0, token) for token in range(tokens))
    times = tuple(RoundTiming(0, 0, step + prefill * (token == 0)) for token in range(tokens))
    return local_run(
        ROWS["target"], Generation(steps, prefill + step * tokens, prefill + step, FinishReason.LENGTH, times)
    )


def drafting_run(rounds: list[tuple[int, int]], timings: list[RoundTiming]) -> Run:
    """Rounds of (drafted, accepted)."""
    steps = tuple(Step(tuple(range(drafted)), accepted, 9) for drafted, accepted in rounds)
    seconds = sum(timing.total for timing in timings)
    made = Generation(steps, seconds, timings[0].total, FinishReason.LENGTH, tuple(timings))
    return local_run(ROWS["speculative"], made)


def timing(drafting: float, verifying: float, other: float = 0.0, drafts: int = 0) -> RoundTiming:
    return RoundTiming(drafting, verifying, drafting + verifying + other, drafts)


def test_the_figures_of_a_run() -> None:
    """Five rounds: the first reads the prompt, the third drafts nothing, and in the fourth the drafter reads it."""
    rounds = [(2, 2), (2, 1), (0, 0), (2, 0), (1, 1)]
    times = [timing(0.4, 7.0), timing(0.4, 1.3, 0.1), timing(0.1, 1.0), timing(4.4, 1.4), timing(0.2, 1.2)]
    model = RoundModel.of(drafting_run(rounds, times), target_run(9))
    assert model is not None
    assert model.rates == ((4 / 5, 3 / 4), (2 / 3, 1 / 2)) and model.drafts == 7 / 5
    # The later four passes take 0.9 decode steps more, and the first one is taken to be like them.
    assert model.verify == pytest.approx(0.9 * 5 / 4 / 7)
    assert model.draft == pytest.approx((0.4 + 0.4 + 0.1 + 4.4 + 0.2) / 7)  # with reading, and what was in vain
    assert model.other == pytest.approx(0.1 / 5)
    tokens = 1 + (4 / 5) * (3 / 4) * (1 + (2 / 3) * (1 / 2))
    assert tokens == pytest.approx(9 / 5), "the tokens of a round"
    assert model.speedup == pytest.approx(tokens / (1 + (0.9 * 5 / 4 + 5.5 + 0.1) / 5))


def test_a_run_without_drafts_has_only_other_times() -> None:
    times = [timing(0.1, 6.0), timing(0.1, 1.0), timing(0.1, 1.0, 0.3)]
    model = RoundModel.of(drafting_run([(0, 0)] * 3, times), target_run(3))
    assert model is not None and (model.rates, model.drafts, model.verify, model.draft) == ((), 0, 0, 0)
    assert model.other == pytest.approx((0.3 + 0.3) / 3)


def test_a_swap_changes_one_cause_only() -> None:
    short = RoundModel(((1.0, 0.8), (1.0, 0.5)), 2.0, 0.1, 0.2, 0.0)
    long = RoundModel(((0.5, 0.4),), 0.5, 0.3, 0.45, 0.0)
    assert short.speedup == pytest.approx((1 + 0.8 + 0.4) / 1.6)
    # The second position was never tried in the long context, so it gets the acceptance of the first.
    assert SWAPS[ACCEPTANCE](short, long).speedup == pytest.approx((1 + 0.4 + 0.16) / 1.6)
    assert SWAPS[VERIFYING](short, long).speedup == pytest.approx(2.2 / 2.0)
    assert SWAPS[DRAFTING](short, long).speedup == pytest.approx(2.2 / 2.1)
    assert SWAPS[FEWER](short, long).speedup == pytest.approx((1 + 0.5 * 0.8) / 1.15)
    nothing = RoundModel((), 0.0, 0.0, 0.0, 0.0)
    assert SWAPS[FEWER](short, nothing).speedup == 1.0
    for name in (ACCEPTANCE, VERIFYING, DRAFTING):
        assert SWAPS[name](short, nothing) == short, "without drafts these are not known"


def test_the_figures_of_a_server() -> None:
    """12 tokens in 5 forward passes, at twice the tokens/s of the baseline: a pass takes 1.2 decode steps."""

    def run(name: str, pace: float, drafts: ServerAcceptance | None) -> Run:
        pieces = tuple(Piece("x", (1,), seconds=pace * place) for place in range(1, 13))
        made = ServerCompletion("x", pieces, FinishReason.LENGTH, "", 12 * pace, usage_tokens=12, acceptance=drafts)
        return Run.of_server(ServerAddress(name, "http://127.0.0.1:1", baseline="plain"), made)

    found = ServerAcceptance(10, 7, rounds=5, forwards=5, by_position=((4, 5), (3, 4)))
    model = RoundModel.of(run("spec", 0.5, found), run("plain", 1.0, None))
    assert model is not None and model.rates == ((1.0, 4 / 5), (1.0, 3 / 4))
    assert model.drafts == 2 and model.verify == pytest.approx(0.1) and model.draft == 0
    assert model.speedup == pytest.approx(2.0)
    assert RoundModel.of(run("spec", 0.5, ServerAcceptance(10, 7, valid=False)), run("plain", 1.0, None)) is None


def simulated(random: np.random.Generator, rate: float, cost: float) -> Any:
    """The result of one text: 25 rounds of 3 drafts, whose acceptance differs from text to text; times vary by 10 %."""
    rate = float(np.clip(random.normal(rate, 0.05), 0, 1))
    accepted = [int(np.argmin([*(random.random(3) < rate), False])) for _ in range(25)]
    noise = np.exp(0.1 * random.standard_normal((25, 2)))
    times = [timing(0.3 * a, (1 + 3 * cost) * b, drafts=3) for a, b in noise]
    ours = drafting_run([(3, count) for count in accepted], times)
    return ours, target_run(60, float(np.exp(0.02 * random.standard_normal())))


def effects(random: np.random.Generator, rate: float = 0.6, cost: float = 0.1) -> dict[str, Any]:
    """The effects over five texts, where acceptance and the cost of verifying are those of the long context."""
    results: list[list[Any]] = [[], []]
    for number in range(5):
        for place, (own_rate, own_cost) in enumerate(((0.6, 0.1), (rate, cost))):
            ours, theirs = simulated(random, own_rate, own_cost)
            item = SimpleNamespace(number=number)
            results[place].append(SimpleNamespace(item=item, repeat=0, ours=(ours,), theirs=(theirs,)))
    return cause_effects(*results)


def named(found: dict[str, Any]) -> str | None:
    cause = main_cause([{"causes": {}}, {"causes": found}])
    return None if cause is None else cause[0]


def test_false_alarms_are_rare_and_real_falls_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 simulated ladders without a change, 3 % name a cause, so 3 of 25 are exceeded with a probability below
    1 %.
    """
    monkeypatch.setattr(intervals, "RESAMPLES", RESAMPLES)
    random = np.random.default_rng(5)
    assert sum(named(effects(random)) is not None for _ in range(25)) <= 3
    assert sum(named(effects(random, rate=0.3)) == ACCEPTANCE for _ in range(10)) >= 8
    assert sum(named(effects(random, cost=0.3)) == VERIFYING for _ in range(10)) >= 8


def test_contexts_are_tested_from_the_longest() -> None:
    """A cause that is not distinguishable at 4k ends the search, whatever is at 2k."""
    falls, flat = {"factor": 0.7, "interval": [0.6, 0.8]}, {"factor": 0.97, "interval": [0.9, 1.1]}
    rows = [{"context": context, "causes": {}} for context in (1, 2, 4, 8, 16)]
    for row, effect in zip(rows[1:], (falls, flat, falls, falls), strict=True):
        row["causes"] = {ACCEPTANCE: effect, DRAFTING: flat, VERIFYING: flat, FEWER: flat}
    cause = main_cause(rows)
    assert cause is not None and (cause[0], cause[1]["context"]) == (ACCEPTANCE, 4)
    rows[-1]["causes"][ACCEPTANCE] = {"factor": 0.96, "interval": [0.95, 0.97]}  # too small to mention
    assert main_cause(rows) is None
