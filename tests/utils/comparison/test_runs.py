"""How runs compare with their baselines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import table_pair
from local_runs import local_run

from ngram_assisted import NGramStorage
from utils.comparison.arms import LocalArm, Run, compare_run
from utils.comparison.strategies import STRATEGIES, Job
from utils.config.settings import Settings
from utils.config.value_types import ProcessorSpec
from utils.decode.model_info import context_length
from utils.decode.steps import FinishReason, Step
from utils.metrics.results import Comparison, Generation
from utils.servers.address import ServerAddress
from utils.servers.kinds.completion import ServerCompletion

ROWS = {row.name: row for row in STRATEGIES}
SETTINGS = Settings()


def run_of(name: str, tokens: list[int], seconds: float, finish: FinishReason = FinishReason.LENGTH) -> Run:
    steps = tuple(Step((), 0, token) for token in tokens)
    return local_run(ROWS[name], Generation(steps, seconds, 0.0, finish))


def answer(
    name: str, text: str, seconds: float, *, url: str = "http://127.0.0.1:1", baseline: str | None = None
) -> Run:
    completion = ServerCompletion(text, (), FinishReason.LENGTH, "length", seconds, usage_tokens=4)
    return Run.of_server(ServerAddress(name, url, baseline=baseline), completion)


def test_strategies_are_compared_with_the_target() -> None:
    target = run_of("target", [1, 2, 3, 4], 4.0)

    def figures(run: Run, *, same_request: bool = True) -> tuple[float | None, bool | None, int | None]:
        found = compare_run(run, [run_of("ngram", [9], 1.0), target], SETTINGS, same_request=same_request)
        assert found.unit == "token"
        return found.speedup, found.same, found.first_difference

    assert figures(target) == (1.0, True, None)
    assert figures(run_of("ngram", [1, 2, 3, 4], 2.0)) == (2.0, True, None)
    assert figures(run_of("ngram", [1, 2, 9, 4], 4.0)) == (1.0, False, 2)
    assert figures(run_of("ngram", [1, 2], 1.0)) == (2.0, False, 2)
    assert figures(run_of("ngram", [1, 2], 1.0), same_request=False) == (2.0, None, None)
    assert figures(run_of("ngram", [1], 1.0, FinishReason.INTERRUPTED)) == (None, None, None)
    alone = run_of("ngram", [1], 1.0)
    assert compare_run(alone, [alone], SETTINGS) == Comparison()
    nothing = compare_run(run_of("ngram", [], 1.0), [run_of("target", [], 0.0)], SETTINGS)
    assert (nothing.speedup, nothing.same) == (None, True)


def test_runs_are_prepared_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = list[Any]()

    def timed(*_: Any, **__: Any) -> Generation:
        happened.append("timed")
        return Generation((Step((), 0, 1),), 1.0, 0.5, FinishReason.LENGTH)

    monkeypatch.setattr("utils.comparison.arms.prepare_run", lambda _, *positions: happened.append(positions))
    monkeypatch.setattr("utils.metrics.results.collect", timed)
    pair = table_pair()
    for length in (9, 10**6):  # the second one exceeds the context
        job = Job([1, 2, 3], pair, replace(SETTINGS, length=length), NGramStorage(3, 64))
        LocalArm(ROWS["target"], pair, job=job).run("", job.settings)
    assert happened == [(3, 12), "timed", (3, context_length(pair.target)), "timed"]


def test_servers_are_compared_on_their_host_and_by_greedy_texts() -> None:
    plain, spec = answer("plain", "one two", 4.0), answer("spec", "one too", 2.0, baseline="plain")
    found = compare_run(spec, [plain, spec], SETTINGS)
    assert found.speedup == 2.0
    assert (found.same, found.first_difference, found.unit) == (False, 5, "character")
    sampled = replace(SETTINGS, processor=ProcessorSpec(1.0))
    assert compare_run(spec, [plain, spec], sampled).same is None
    far = answer("spec", "one two", 2.0, url="http://10.0.0.1:1", baseline="plain")
    found = compare_run(far, [plain, far], SETTINGS)
    assert found.speedup is None and found.same is True
    assert compare_run(plain, [plain, spec], SETTINGS) == Comparison()
