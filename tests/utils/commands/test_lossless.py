"""/lossless: correct strategies pass, and a strategy with a different distribution is detected."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Restless, Screen, checked, open_session, records_of, table_pair, tiny_pair, with_speculative
from tiny import tiny_llama, tiny_mamba

from utils.commands.checks import ALL_MATCH, NO_DIFFERENCE, OTHER, RARE, TOO_FEW, WRONG, conclusion
from utils.comparison.arms import empty_storage
from utils.comparison.strategies import STRATEGIES, Job, SharedPrefills
from utils.config.settings import Settings
from utils.config.value_types import ProcessorSpec
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.metrics.results import tokens_of
from utils.repl.repl_session import Verdict

PROMPT = [5, 9, 13, 9, 5, 9, 13, 2]


@pytest.mark.parametrize(
    "rule", ["rejection", *(pytest.param(rule, marks=pytest.mark.full) for rule in ("coupled", "block"))]
)
def test_correct_strategies_pass(rule: str, view: Screen, tmp_path: Path) -> None:
    """False alarms: with new seeds a correct program would fail with probability 0.002, two p-values below 1e-3."""
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file)
    lines = ("/drafter on", "/length 4", "Hello", "/processor topk 1.5 12")
    record = checked(session, file, *lines, f"/verify {rule}", "/lossless 90")
    assert record["record"] == "lossless" and record["finished"] and record["settings"]["verify"] == rule
    rows = {row["strategy"]: row for row in record["findings"]}
    assert list(rows) == ["speculative", "ngram", "target", "drafter"]
    for name in ("speculative", "ngram", "target"):
        assert rows[name]["p_value"] > 1e-3 and rows[name]["draws"] == 90 and rows[name]["cells"] >= 6
        assert rows[name]["verdict"] == NO_DIFFERENCE
    assert rows["drafter"]["verdict"] == OTHER
    assert rows["ngram"]["p_value"] == rows["target"]["p_value"]  # exactly the same draws
    assert (rows["speculative"]["p_value"] == rows["target"]["p_value"]) == (rule == "coupled")
    assert "p-value" in view.take()[0]


@pytest.mark.parametrize("processor", ["greedy", "greedy 0.7", "multinomial 0", "nucleus 0 0.9"])
def test_greedy_decoding_has_no_distribution_to_test(processor: str, view: Screen) -> None:
    session = open_session(view)
    for line in ("/length 2", f"/processor {processor}", "Hello"):
        assert session.handle(line) is Verdict.DONE
    view.take()
    assert session.handle("/lossless 7") is Verdict.FAILED
    assert "/processor multinomial 1" in view.take()[1]


def test_where_one_token_is_possible_matches_are_counted(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    lines = ("/length 2", "/processor topk 1 1", "Hello", "/lossless 7")
    record = checked(open_session(view, records=file), file, *lines)
    names = ("matches", "draws", "cells", "p_value", "verdict")
    assert [[row[name] for name in names] for row in record["findings"]] == [[7, 7, 1, None, ALL_MATCH]] * 3


def test_too_few_draws_give_no_verdict(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    record = checked(
        open_session(view, records=file), file, "/processor multinomial 2", "/length 2", "Hello", "/lossless 6"
    )
    assert {row["verdict"] for row in record["findings"]} == {TOO_FEW}


def test_the_conclusion_names_what_is_wrong_and_what_to_do() -> None:
    def lines(**changes: Any) -> list[str]:
        row = {"strategy": "a", "support": 9, "draws": 40, "p_value": 1e-4, "verdict": RARE}
        return conclusion([row | changes])

    assert "0.0001" in lines()[0]
    assert "report" in lines(verdict=WRONG, p_value=0.0)[0]
    assert "more draws" in lines(verdict=TOO_FEW, p_value=None)[-1]
    (sentence,) = lines(verdict=NO_DIFFERENCE, p_value=0.5)
    assert "p-value" in sentence


def hotter(job: Job) -> Any:
    """A strategy with a bug: it samples at a different temperature."""
    yield from STRATEGIES[2].steps(replace(job, settings=replace(job.settings, processor=ProcessorSpec(10.0))))


def test_a_strategy_with_a_different_distribution_is_detected(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file, strategies=with_speculative(hotter))
    record = checked(session, file, "/ngram off", "/processor multinomial 1", "/length 2", "Hello", "/lossless 250")
    wrong, right = record["findings"]
    assert wrong["p_value"] < 1e-8 and wrong["verdict"] == WRONG
    assert right["verdict"] == NO_DIFFERENCE


def test_an_impossible_draw_is_detected_at_once(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file, strategies=with_speculative(hotter))
    record = checked(session, file, "/processor topk 1 2", "/length 2", "Hello", "/lossless 40")
    assert record["findings"][0]["p_value"] == 0.0 and record["findings"][0]["matches"] < 40


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        ("table", True),
        ("t5", False),
        pytest.param("llama", False, marks=pytest.mark.full),
        pytest.param("t5", True, marks=pytest.mark.full),
    ],
)
def test_draws_with_a_shared_prefill_equal_those_of_fresh_runs(
    kind: str, cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared prefill of /lossless against whole runs, by strategy and by seed."""
    pair = tiny_pair(kind=kind, chat=False)
    settings = replace(Settings(), processor=ProcessorSpec(1.0), cache=cache, length=5)
    reads: list[ModelSession] = []
    read = ModelSession.read

    def counted(session: ModelSession, prompt: list[int]) -> None:
        reads.append(session)
        read(session, prompt)

    monkeypatch.setattr(ModelSession, "read", counted)
    prefills = SharedPrefills()
    for strategy in STRATEGIES[:4]:
        for seed in range(3):
            runs = []
            for shared in (prefills, None):
                storage = empty_storage(settings, pair)
                job = Job(PROMPT, pair, replace(settings, seed=seed), storage, prefills=shared)
                runs.append([step.tokens for step in islice(strategy.steps(job), 2)])
            assert runs[0] == runs[1]
    assert len(reads) == 4, "each kind of session reads the prompt once"


def test_every_draw_has_its_own_seed(view: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def noted(job: Job) -> Any:
        seeds.append(job.settings.seed)
        yield from STRATEGIES[2].steps(job)

    session = open_session(view, strategies=with_speculative(noted))
    lines = ("/length 1", "Hello", "/processor multinomial 1", "/seed 4294967290", "/ngram off", "/target off")
    for line in (*lines, "/lossless 12"):
        session.handle(line)
    assert seeds[1:] == [(4294967290 + draw) % 2**32 for draw in range(12)]


def test_rounding_that_decides_is_not_a_bug_of_the_strategy(view: Screen, tmp_path: Path) -> None:
    """Verify passes that flip the likeliest token: each strategy follows the distribution that it computed."""
    file, pair = tmp_path / "runs.jsonl", table_pair()
    pair.target = Restless(pair.target, by_rows=2.0)
    record = checked(
        open_session(view, pair, records=file),
        file,
        "/length 2",
        "Hello",
        "/processor topk 1 1",
        "/lossless 15",
        "/processor topk 1 5",
        "/lossless 30",
    )
    for row in records_of(file)[-2]["findings"] + record["findings"]:
        assert row["verdict"] != WRONG, row


def test_a_drafter_that_cannot_read_the_prompt_does_not_prevent_the_test(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", table_pair()
    pair.drafter = tiny_llama(seed=1, vocab_size=300, max_position_embeddings=8)
    lines = ("/length 2", "/processor multinomial 1", "Hello there", "/lossless 5")
    record = checked(open_session(view, pair, records=file), file, *lines)
    assert [row["strategy"] for row in record["findings"]] == ["speculative", "ngram", "target"]


def test_a_job_without_a_rewindable_cache_says_so() -> None:
    pair = SimpleNamespace(target=tiny_mamba(seed=0))
    with pytest.raises(UserError, match="recurrent state"):
        Job([1], pair, Settings(), empty_storage(Settings(), pair), prefills=SharedPrefills()).session("target")


def test_a_run_with_a_shared_prefill_continues_the_noise() -> None:
    """Rounds after a shared prefill are those of the whole run."""
    pair = table_pair(chat=False)
    settings = replace(Settings(), processor=ProcessorSpec(1.0), verify="coupled", length=20)
    storage = empty_storage(settings, pair)
    jobs = [Job(PROMPT, pair, settings, storage, prefills=prefills) for prefills in (SharedPrefills(), None)]
    shared, fresh = (tokens_of(STRATEGIES[0].steps(job)) for job in jobs)
    assert shared == fresh
