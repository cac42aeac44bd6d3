"""/why: the account of a run adds up, the term that binds is named, and the screen shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import Screen, records_of, tiny_pair, workbench

from utils.commands.experiments.why import Account, _advice, _best, binding
from utils.decode.steps import FinishReason, Step
from utils.metrics.costs import Costs
from utils.metrics.results import Generation
from utils.metrics.stopwatch import Lap
from utils.repl.runner import Verdict

COSTS = Costs((0.1, 0.2, 0.3))


def generation(rounds: list[tuple[int, int]], lap: Lap) -> Generation:
    """By (drafted, accepted) of each round."""
    steps = tuple(Step(tuple(range(drafted)), accepted, 9) for drafted, accepted in rounds)
    return Generation(
        steps, 10.0, 1.0, FinishReason.LENGTH, tuple(replace(lap, drafts=drafted) for drafted, _ in rounds)
    )


def test_the_account_of_a_run() -> None:
    run = generation([(2, 1), (0, 0), (3, 3)], Lap(1.0, 2.0, 4.0))
    account = Account.of(run, Costs(COSTS.windows, (("model", 0.25),)), "model")
    assert (account.tokens, account.forwards, account.drafting) == (7, 3, 5 * 0.25)
    assert account.windows == pytest.approx(0.2 + 0.0 + 0.3) and account.other == 0.25
    assert account.steps == pytest.approx(3 + 0.5 + 1.25)
    # drafts that were not proposed took their time too
    unsent = replace(run, laps=tuple(replace(lap, drafts=lap.drafts + 1) for lap in run.laps))
    assert Account.of(unsent, Costs(COSTS.windows, (("model", 0.25),)), "model").drafting == 8 * 0.25, (
        "drafts that were not proposed took their time too"
    )


@pytest.mark.parametrize(
    ("rounds", "lap", "costs", "draft", "words"),
    [
        ([(0, 0), (0, 0), (1, 1)], Lap(1, 2, 3), COSTS, 0.1, "declined 67% of the rounds"),
        ([(2, 2)] * 4, Lap(1, 1, 4), COSTS, 0.01, "outside the models: 50%"),
        ([(4, 1)] * 4, Lap(1, 2, 3), Costs((0.5, 0.9, 1.3, 1.7)), 0.1, "a window of 5 tokens costs 2.7 steps"),
        ([(2, 1)] * 4, Lap(1, 2, 3), COSTS, 0.4, "a draft costs 0.40 of a step, and a round has 2.0"),
        ([(2, 0)] * 3 + [(2, 1)], Lap(1, 2, 3), Costs((0.0, 0.0)), 0.01, "few drafts stand: 1 of 8"),
        ([(2, 2)] * 4, Lap(1, 2, 3), Costs((0.0, 0.0)), 0.01, "nothing in particular: 3.0 tokens a round"),
    ],
)
def test_what_binds(rounds: list[tuple[int, int]], lap: Lap, costs: Costs, draft: float, words: str) -> None:
    run = generation(rounds, lap)
    priced = Costs(costs.windows, (("model", draft),))
    assert words in binding(Account.of(run, priced, "model"), run, priced, draft)


def test_drafts_of_a_chain_are_billed_by_who_made_them(view: Screen, tmp_path: Path) -> None:
    bench = workbench(
        view, records=tmp_path / "records.jsonl", draft_seconds=lambda job, kind: 0.5 if kind.loads else 0.0
    )
    for line in (
        "/length 24",
        "/gamma 4",
        "/drafter_kind loaded chain suffix",
        "one two one two three",
        "/why",
        "/whatif",
    ):
        assert bench.handle(line) is Verdict.DONE, view.take()
    why, whatif = (record["findings"] for record in records_of(tmp_path / "records.jsonl")[-2:])
    model, chain, suffix = (
        next(row for row in why if row["strategy"].endswith(kind)) for kind in ("model", "chain", "suffix")
    )
    # where the suffixes decline the model drafts, and takes its time
    assert suffix["draft_cost"] == 0 < chain["draft_cost"] <= model["draft_cost"], (
        "where the suffixes decline the model drafts, and takes its time"
    )
    assert chain["predicted"] < suffix["predicted"]
    speeds = {row["drafter"]: row["tokens_per_second"] for row in whatif if row["gamma"] == 4}
    assert speeds["model"] <= speeds["chain"] < speeds["suffix"] / 10


def test_the_gamma_that_promises_most() -> None:
    free, lap = Costs((0.0,)), Lap(1, 1, 2)
    assert _best(generation([(1, 1), (1, 0)] * 4, lap), free, 0.6) == (0, 1.0)
    best, rate = _best(generation([(2, 1)] * 9 + [(2, 0)], lap), free, 0.2)
    assert best == 1 and rate == pytest.approx(1.9 / 1.2)
    assert _best(generation([(3, 3)] * 3, lap), free, 0.0) == (0, 1.0), "too few rounds to tell"
    assert _best(generation([(3, 3)] * 4, lap), free, 0.0) == (3, 4.0), "and what was never tried is not promised"
    declining = generation([(0, 0)] * 6 + [(1, 1)] * 2, lap)
    assert _best(declining, free, 0.0) == (1, 1.25), "a round without drafts has none that stands"


def test_the_advice_follows_from_the_figures() -> None:
    figures = {"best_gamma": 3, "best_rate": 1.5, "rate": 1.2, "by_position": [0.5]}
    assert _advice(figures) == "try /gamma 3, by these figures 1.50 tokens per step"
    assert "promises more" in _advice(figures | {"rate": 1.49}) and "nothing was drafted" in _advice(
        figures | {"by_position": []}
    )
    assert _advice(figures | {"best_gamma": 0, "best_rate": 1.0, "rate": 0.8}) == "no /gamma would pay"


def test_the_screen_and_the_record(view: Screen, tmp_path: Path) -> None:
    bench = workbench(view, records=tmp_path / "records.jsonl")
    for line in ("/length 16", "/gamma 2", "Hello", "/why"):
        assert bench.handle(line) is Verdict.DONE, view.take()
    shown = view.take()[0]
    for words in (
        "speed-up, predicted",
        "time drafting",
        "stood, by place",
        "speculative: ",
        "ngram: ",
        "/whatif tells every gamma",
    ):
        assert words in shown
    report = records_of(tmp_path / "records.jsonl")[-1]
    rows = report["findings"]
    assert [row["strategy"] for row in rows] == ["speculative", "ngram"] and all(row["predicted"] > 0 for row in rows)
    for row in rows:
        assert min(row["seconds"].values()) >= 0 and row["binds"]


def test_what_it_needs(view: Screen) -> None:
    bench = workbench(view, tiny_pair())
    assert bench.handle("/why") is Verdict.FAILED and "a prompt is needed" in view.take()[1]
    for line in ("/speculative off", "/ngram off", "/length 4", "Hello"):
        bench.handle(line)
    assert bench.handle("/why") is Verdict.FAILED and "/speculative on" in view.take()[1]
    for line in ("/ngram on", "/target off", "Hello"):
        bench.handle(line)
    assert bench.handle("/why") is Verdict.FAILED and "/target on" in view.take()[1]
