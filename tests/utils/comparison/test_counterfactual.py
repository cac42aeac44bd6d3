"""Counterfactual replay, which /whatif uses, gives the rounds of real runs: for every gamma, for auto, and for every
drafter kind.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_llama, tiny_tokenizer
from tiny_jobs import fresh, pair, replay_gammas, strategy_of

from ngram_assisted import NGramStorage
from sampling.counterfactual import chain_single_drafts
from utils.config.settings import Settings
from utils.config.value_types import ProcessorSpec
from utils.metrics.costs import Costs
from utils.metrics.results import Stopwatch, collect, tokens_of

COSTS = Costs(verify=(0.05, 0.1, 0.2, 0.3), draft=(("model", 0.1), ("head", 0.05), ("layers:1", 0.2)))
WORDS = ("loaded", "layers:1", "lookup", "suffix", "chain", "ngram")


def rounds(steps: Any) -> list[tuple[int, int, int | None]]:
    return [(len(step.drafted), step.accepted, step.token) for step in steps]


def drafted(timings: Any) -> list[tuple[int, str]]:
    """The number of computed drafts of each round, and the kind that made them."""
    return [(timing.drafts, timing.kind if timing.drafts else "") for timing in timings]


GREEDY = Settings(length=14, costs=COSTS)
COUPLED = Settings(length=11, costs=COSTS, processor=ProcessorSpec(0.8), verify="coupled", seed=3)
UNCACHED = Settings(
    length=14, costs=COSTS, processor=ProcessorSpec(0.9, top_p=0.9), verify="coupled", seed=5, cache=False
)


@pytest.mark.parametrize(
    ("kind", "settings", "gammas"),
    [
        pytest.param("model", GREEDY, (4, None), marks=pytest.mark.full),
        ("model", COUPLED, (2, None)),
        pytest.param("model", UNCACHED, (1, 7), marks=pytest.mark.full),
        pytest.param("head", GREEDY, (1, 16), marks=pytest.mark.full),
        ("head", COUPLED, (None,)),
        ("t5", GREEDY, (4,)),
        pytest.param("t5", UNCACHED, (2, None), marks=pytest.mark.full),
    ],
)
def test_the_rounds_of_every_gamma_are_those_of_real_runs(
    kind: str, settings: Settings, gammas: tuple[int | None, ...]
) -> None:
    text = tokens_of(strategy_of("lookup", pair(kind)).steps(fresh(kind, replace(settings, gamma=0))))
    words = [word for word in WORDS if kind != "t5" or word != "layers:1"]
    chosen = [strategy_of(word, pair(kind)) for word in words]
    replayed = {
        (row.drafter_label(pair(kind)), gamma): rounds(steps)
        for row, gamma, steps, _ in replay_gammas(fresh(kind, settings), chosen, text)
    }
    assert len(replayed) == 18 * len(chosen)
    for row in chosen:
        for gamma in gammas:
            real = list(row.steps(fresh(kind, replace(settings, gamma=gamma))))
            assert tokens_of(real) == text
            assert replayed[row.drafter_label(pair(kind)), gamma] == rounds(real), (row.name, gamma)
    accepted = {label: sum(count for _, count, _ in replayed[label, 4]) for label, gamma in replayed if gamma == 4}
    assert kind == "head" or (accepted["model"] > 4 and sum(map(bool, accepted.values())) > 1), accepted


@pytest.mark.parametrize(
    "drawn",
    [
        pytest.param({}, id="greedy", marks=pytest.mark.full),
        pytest.param({"processor": ProcessorSpec(0.8), "verify": "coupled", "seed": 7}, id="coupled"),
    ],
)
def test_computed_drafts_are_counted_as_in_real_runs(drawn: dict[str, Any]) -> None:
    expensive = Costs(tuple(0.15 * width for width in range(1, 9)), COSTS.draft)
    settings = Settings(length=14, costs=expensive, **drawn)
    text = tokens_of(strategy_of("lookup", pair("model")).steps(fresh("model", replace(settings, gamma=0))))
    chosen = [strategy_of(word, pair("model")) for word in WORDS]
    withheld = 0
    for row, gamma, steps, timings in replay_gammas(fresh("model", settings), chosen, text):
        if gamma in (3, None):
            watch = Stopwatch()
            job = replace(fresh("model", replace(settings, gamma=gamma)), stopwatch=watch)
            real = collect(row.steps(job), stopwatch=watch)
            assert drafted(timings) == drafted(real.timings) and rounds(steps) == rounds(real.steps), (row.name, gamma)
            withheld += sum(timing.drafts for timing in timings) - real.drafted
    assert withheld > 0, "adaptive gamma computes drafts that it does not propose"


def test_an_end_token_ends_the_rounds_as_in_real_runs() -> None:
    settings = Settings(length=20, costs=COSTS)
    whole = tokens_of(strategy_of("lookup", pair("model")).steps(fresh("model", replace(settings, gamma=0))))
    ends = SimpleNamespace(**vars(pair("model")) | {"end_ids": frozenset({whole[9]})})
    text = whole[: whole.index(whole[9]) + 1]
    for word in ("loaded", "ngram", "suffix"):
        row = strategy_of(word, ends)
        job = replace(fresh("model", settings), pair=ends)
        for _, gamma, steps, _ in replay_gammas(job, [row], text):
            if gamma in (None, 0, 1, 4, 16):
                real = list(row.steps(replace(fresh("model", replace(settings, gamma=gamma)), pair=ends)))
                assert rounds(steps) == rounds(real), (word, gamma)


def test_storages_and_texts_are_used_and_not_changed() -> None:
    settings = Settings(length=20, costs=COSTS, gamma=3)
    job = fresh("model", settings)
    rows = [strategy_of(word, pair("model")) for word in ("suffix", "ngram")]
    text = tokens_of(rows[0].steps(job))
    before = (dict(job.caches.texts)["suffix"].size, len(job.storage))
    replayed = {(row.name, gamma): rounds(steps) for row, gamma, steps, _ in replay_gammas(job, rows, text)}
    assert (job.caches.texts["suffix"].size, len(job.storage)) == before
    assert replayed[rows[0].name, 3] == rounds(rows[0].steps(job)), "the text was seen before"
    assert sum(accepted for _, accepted, _ in replayed[rows[0].name, 3]) > 8


def test_single_drafts_are_chained_to_rounds() -> None:
    assert chain_single_drafts([[1], [2], [3]], 2) == [[1, 2], [2, 3], [3, -1]]
    assert chain_single_drafts([[1], [], [3]], 3) == [[1], [], [3, -1, -1]], "a drafter that declines ends the round"


def test_drafters_with_a_different_tokenizer_are_replayed() -> None:
    target, drafter = (tiny_llama(vocab_size=300, num_hidden_layers=1) for _ in range(2))
    pair = SimpleNamespace(
        target=target,
        drafter=drafter,
        drafter_kind="model",
        tokenizer=tiny_tokenizer(),
        drafter_tokenizer=tiny_tokenizer(shift=1),
        end_ids=frozenset(),
        feature_layers=(),
    )
    row, settings = strategy_of("loaded", pair), Settings(length=10, costs=COSTS)
    job = replace(fresh("model", settings), pair=pair, storage=NGramStorage(3, 300))
    text = tokens_of(row.steps(replace(job, settings=replace(settings, gamma=0))))
    for _, gamma, steps, _ in replay_gammas(job, [row], text):
        if gamma in (None, 0, 1, 4):
            assert rounds(steps) == rounds(row.steps(replace(job, settings=replace(settings, gamma=gamma)))), gamma
