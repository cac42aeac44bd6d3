"""/lossless: it finds nothing wrong with what is right, and notices what is not."""

from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Restless, Screen, checked, records_of, tiny_pair, with_speculative, workbench
from tiny import tiny_llama, tiny_mamba

import infer
from utils.comparison.strategies import Job
from utils.config.settings import Settings
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.logits_processor import MultinomialProcessor
from utils.metrics.results import tokens_of

PROMPT = [5, 9, 13, 9, 5, 9, 13, 2]


def test_lossless_finds_nothing_wrong_with_what_is_right(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    bench = workbench(view, records=file)
    lines = ("/drafter on", "/length 4", "Hello", "/processor topk 1.5 12")
    for rule in ("rejection", "coupled", "block"):
        record = checked(bench, file, *lines, f"/verify {rule}", "/lossless 400")
        assert record["record"] == "lossless" and record["finished"] and record["settings"]["verify"] == rule
        rows = {row["strategy"]: row for row in record["findings"]}
        assert list(rows) == ["speculative", "ngram", "target", "drafter"]
        for name in ("speculative", "ngram", "target"):
            assert rows[name]["p_value"] > 1e-3 and rows[name]["draws"] == 400 and rows[name]["freedom"] >= 5
            assert rows[name]["verdict"] == "no difference seen"
        assert rows["drafter"]["verdict"] == "another law, as it should be: not the target's"
        assert rows["ngram"]["statistic"] == rows["target"]["statistic"]  # the very same draws
        assert (rows["speculative"]["statistic"] == rows["target"]["statistic"]) == (rule == "coupled")
    assert "p-value" in view.take()[0]


def test_lossless_under_greedy_counts_matches(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    record = checked(workbench(view, records=file), file, "/length 2", "Hello", "/lossless 7")
    assert [(row["matches"], row["draws"], row["cells"], row["p_value"]) for row in record["findings"]] == [
        (7, 7, 1, None)
    ] * 3
    results = view.take()[0]
    assert "7/7" in results and "all match" in results


def test_too_few_draws_are_no_verdict(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    record = checked(
        workbench(view, records=file), file, "/processor multinomial 2", "/length 2", "Hello", "/lossless 6"
    )
    assert {row["verdict"] for row in record["findings"]} == {"too few draws for a test"}
    assert "needs two tokens that are expected five times each" in record["conclusion"][0]


def hotter(job: Job) -> Any:
    """A strategy with a mistake: it samples at another temperature."""
    yield from infer.STRATEGIES[2].steps(
        replace(job, settings=replace(job.settings, processor=MultinomialProcessor(3.0)))
    )


def test_lossless_notices_a_strategy_with_another_law(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    bench = workbench(view, records=file, strategies=with_speculative(hotter))
    record = checked(bench, file, "/processor multinomial 1", "/length 2", "Hello", "/lossless 500")
    wrong, *right = record["findings"]
    assert wrong["p_value"] < 1e-8 and wrong["verdict"] == "NOT the target's law: please report"
    assert all(row["verdict"] == "no difference seen" for row in right)


def test_an_impossible_draw_is_noticed_at_once(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    bench = workbench(view, records=file, strategies=with_speculative(hotter))
    record = checked(bench, file, "/processor topk 1 2", "/length 2", "Hello", "/lossless 40")
    assert record["findings"][0]["p_value"] == 0.0 and record["findings"][0]["matches"] < 40


@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize("cache", [True, False])
def test_draws_over_a_prompt_read_once_are_those_of_fresh_runs(kind: str, cache: bool) -> None:
    """The shortcut of /lossless against whole runs, strategy by strategy and seed by seed."""
    pair = tiny_pair(kind=kind, chat=False)
    settings = replace(Settings(), processor=MultinomialProcessor(1.0), cache=cache, length=5)
    read: dict[Any, ModelSession] = {}
    for strategy in infer.STRATEGIES[:4]:
        for seed in range(12):
            runs = []
            for shared in (read, None):
                storage = infer.make_storage(settings, 300)
                job = Job(PROMPT, pair, replace(settings, seed=seed), storage, read=shared)
                runs.append([step.tokens for step in islice(strategy.steps(job), 2)])
            assert runs[0] == runs[1]
    assert len(read) == 4


def test_draws_are_made_under_as_many_seeds(view: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def noted(job: Job) -> Any:
        seeds.append(job.settings.seed)
        yield from infer.STRATEGIES[2].steps(job)

    bench = workbench(view, strategies=with_speculative(noted))
    for line in ("/length 1", "Hello", "/seed 4294967290", "/ngram off", "/target off", "/lossless 12"):
        bench.handle(line)
    assert seeds[1:] == [(4294967290 + draw) % 2**32 for draw in range(12)]


def test_rounding_that_decides_is_not_held_against_a_strategy(view: Screen, tmp_path: Path) -> None:
    """Windows that flip every greedy choice: each strategy follows the law as it computed it."""
    file, pair = tmp_path / "runs.jsonl", tiny_pair()
    pair.target = Restless(pair.target, by_rows=2.0)
    record = checked(
        workbench(view, pair, records=file),
        file,
        "/length 2",
        "Hello",
        "/lossless 30",
        "/processor topk 1 5",
        "/lossless 300",
    )
    for row in records_of(file)[-2]["findings"] + record["findings"]:
        assert "NOT" not in row["verdict"], row


def test_a_drafter_that_cannot_read_the_prompt_is_no_obstacle(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", tiny_pair()
    pair.drafter = tiny_llama(seed=1, vocab_size=300, max_position_embeddings=8)
    record = checked(workbench(view, pair, records=file), file, "/length 2", "Hello there", "/lossless 5")
    assert [row["strategy"] for row in record["findings"]] == ["speculative", "ngram", "target"]


def test_a_job_without_a_rewindable_cache_says_so() -> None:
    pair = SimpleNamespace(target=tiny_mamba(seed=0))
    with pytest.raises(UserError, match="recurrent state"):
        Job([1], pair, Settings(), None, read={}).session("target")


def test_positions_of_a_run_read_once_continue_the_noise() -> None:
    """Two rounds over a prompt read once are the first two of the whole text."""
    pair = tiny_pair(chat=False)
    settings = replace(Settings(), processor=MultinomialProcessor(1.0), verify="coupled")
    jobs = [Job(PROMPT, pair, settings, None, read=read) for read in ({}, None)]
    texts = [tokens_of(infer.STRATEGIES[0].steps(job)) for job in jobs]
    assert all(one == other for one, other in pairwise(texts))
