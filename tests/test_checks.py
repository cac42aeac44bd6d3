"""/audit and /lossless: what they find on honest models, and that they notice models and strategies that are not."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import Screen, records_of, screen, tiny_pair, workbench
from tiny import tiny_llama, tiny_mamba, tiny_sliding, tiny_t5

import infer
from utils.caching import ModelSession
from utils.errors import UserError
from utils.logits_processor import MultinomialProcessor
from utils.results import tokens_of
from utils.rounding import Spread, by_width, most_rounding
from utils.runner import Verdict
from utils.settings import Settings
from utils.statistics import chi_square_tail, fit
from utils.strategies import Job, Strategy
from utils.workbench import Workbench

PROMPT = [5, 9, 13, 9, 5, 9, 13, 2]


@pytest.fixture
def view() -> Screen:
    return screen(width=400)


def checked(bench: Workbench, file: Path, *lines: str) -> dict[str, Any]:
    for line in lines:
        assert bench.handle(line) is Verdict.DONE, line
    return records_of(file)[-1]


@pytest.mark.parametrize(("statistic", "freedom", "tail"), [(3.841459, 1, 0.05), (11.070498, 5, 0.05), (37.6973, 15, 0.001), (0, 3, 1)])
def test_tails_of_the_chi_square_law(statistic: float, freedom: int, tail: float) -> None:
    assert chi_square_tail(statistic, freedom) == pytest.approx(tail, rel=1e-4)


def test_small_cells_are_merged() -> None:
    law = torch.tensor([0.5, 0.3, 0.1, 0.04, 0.03, 0.03, 0.0])
    result = fit({0: 50, 1: 30, 2: 10, 3: 4, 4: 3, 5: 3}, law)
    assert (result.draws, result.matches, result.cells, result.freedom) == (100, 100, 4, 3)
    assert result.statistic == pytest.approx(0, abs=1e-6) and result.p_value == pytest.approx(1)
    result = fit({0: 20, 1: 12, 2: 8}, law[[0, 1, 2]] / 0.9)
    assert result.cells == 2 and result.freedom == 1  # 4.4 is too few, and goes with the smallest other cell
    assert fit({6: 1, 0: 99}, law).p_value == 0.0 and fit({6: 1, 0: 99}, law).matches == 99
    assert fit({0: 9}, torch.tensor([1.0, 0.0])).p_value is None
    assert fit({0: 2}, law).cells == 1


def test_p_values_of_right_draws_are_spread_evenly() -> None:
    """1,000 tests of 200 draws: the share below a tenth within 5 sigma of a tenth, so that a verdict means what it says."""
    law = torch.softmax(torch.randn(12, generator=torch.Generator().manual_seed(0)).double(), 0)
    draws = torch.multinomial(law.expand(1000, -1), 200, replacement=True, generator=torch.Generator().manual_seed(1)).tolist()
    low = sum(fit(Counter(row), law).p_value < 0.1 for row in draws)
    assert abs(low - 100) < 5 * (1000 * 0.1 * 0.9) ** 0.5


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
    assert [(row["matches"], row["draws"], row["cells"], row["p_value"]) for row in record["findings"]] == [(7, 7, 1, None)] * 3
    assert "7/7" in view.take()[0]


def with_speculative(steps: Any) -> tuple[Strategy, ...]:
    return tuple(replace(row, steps=steps) if row.name == "speculative" else row for row in infer.STRATEGIES)


def hotter(job: Job) -> Any:
    """A strategy with a mistake: it samples at another temperature."""
    yield from infer.STRATEGIES[2].steps(replace(job, settings=replace(job.settings, processor=MultinomialProcessor(3.0))))


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
                storage = infer.make_storage(settings.ngram_storage, 300)
                job = Job(PROMPT, pair, replace(settings, seed=seed), storage, read=shared)
                runs.append([step.tokens for step in islice(strategy.steps(job), 2)])
            assert runs[0] == runs[1]
    assert len(read) == 4


@pytest.mark.parametrize("build", [tiny_llama, tiny_sliding, tiny_t5])
def test_a_fork_goes_its_own_way(build: Any) -> None:
    model = build(seed=0)
    prompt = [1 + token % 60 for token in range(20)]
    base = ModelSession(model, rewinds=False)
    context = base.begin(prompt) + [3, 4, 5]
    base.feed(context[:-2], keep=1)
    twin = base.fork()
    other = twin.feed([*context[:-2], 7, 8, 9], keep=1)
    fresh = ModelSession(model, rewinds=False)
    fresh.begin(prompt)
    torch.testing.assert_close(base.feed(context, keep=2), fresh.feed(context, keep=2), atol=1e-4, rtol=1e-4)
    again = ModelSession(model, rewinds=False)
    again.begin(prompt)
    torch.testing.assert_close(other, again.feed([*context[:-2], 7, 8, 9], keep=1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("build", [tiny_llama, tiny_sliding, tiny_t5])
def test_logits_by_width_are_those_of_one_forward(build: Any) -> None:
    model = build(seed=0).double()
    session = ModelSession(model)
    context = [*session.begin(PROMPT), *range(1, 24)]
    session.feed(context[:-7], keep=1)
    whole = by_width(session, context, 7, 7)
    assert whole.shape == (7, 64)
    for width in (1, 2, 3, 5, 9):
        torch.testing.assert_close(by_width(session, context, 7, width), whole)


def test_a_spread_is_the_largest_difference_and_the_flips() -> None:
    first = torch.tensor([[1.0, 2.0, 0.0], [5.0, 1.0, 0.0]])
    second = torch.tensor([[1.0, 2.25, 0.0], [5.0, 1.0, 5.5]])
    spread = Spread.of([first, second, first])
    assert spread == Spread(5.5, 1, 2)
    assert spread + Spread(0.5, 2, 4) == Spread(5.5, 3, 6)
    assert most_rounding(first) < 0.01 < most_rounding(first.bfloat16())
    hidden = torch.tensor([[0.0, float("-inf")]])
    assert Spread.of([hidden, hidden]).difference == 0.0 and most_rounding(hidden + 1) < 1


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_an_audit_of_honest_models(kind: str, view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    bench = workbench(view, tiny_pair(kind=kind, chat=False), records=file)
    record = checked(bench, file, "/processor multinomial 0.9", "/beams 2", "/gamma 6", "/audit 3")
    assert record["record"] == "audit" and record["finished"] and record["prompt"].startswith("Repeat this list")
    rows = {row["mode"]: row for row in record["findings"]}
    assert list(rows) == ["repeat", "order", "width", "prefix", "batch"]
    assert all(row["trials"] == 3 and row["unique_outputs"] == 1 for row in rows.values())
    assert list(rows["repeat"]["unique_by_strategy"]) == ["speculative", "ngram", "target", "beam"]
    for mode in ("width", "prefix", "batch"):
        assert rows[mode]["largest_logit_difference"] < 1e-3 and rows[mode]["argmax_flips"] == 0
        assert rows[mode]["positions"] >= 3
    results, messages = view.take()
    assert "Deterministic (float32, cpu)" in results and "n-gram assisted and target-only texts are the same" in results
    assert rows["width"]["widest_window"] == 7
    assert "width: 3 places" in messages


def test_an_audit_works_on_the_last_prompt_and_takes_wide_windows(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    record = checked(workbench(view, records=file), file, "/length 3", "Hi", "/gamma 40", "/audit 1")
    assert record["prompt"] == "Hi" and record["findings"][2]["unique_outputs"] == 1
    assert record["findings"][2]["widest_window"] == 41


class Restless(torch.nn.Module):
    """A model that answers differently from call to call, in windows, in batches, or behind a cache."""

    def __init__(self, model: Any, *, by_call: float = 0, by_rows: float = 0, by_batch: float = 0, by_cache: float = 0) -> None:
        super().__init__()
        self.inner, self.config, self.generation_config, self.device = model, model.config, model.generation_config, model.device
        self._moves, self._calls = (by_call, by_rows, by_batch, by_cache), 0

    def forward(self, input_ids: Any = None, past_key_values: Any = None, logits_to_keep: int = 0, **arguments: Any) -> Any:
        output = self.inner(input_ids=input_ids, past_key_values=past_key_values, logits_to_keep=logits_to_keep, **arguments)
        self._calls += 1
        moved = torch.arange(output.logits.shape[-1]) % 7
        causes = (self._calls % 5, input_ids.shape[-1] > 1, len(input_ids) > 1, past_key_values is not None)
        output.logits = output.logits + moved * sum(move * cause for move, cause in zip(self._moves, causes, strict=True))
        return output


def test_a_model_that_is_not_deterministic_is_told(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", tiny_pair()
    pair.target = Restless(pair.target, by_call=0.4)
    record = checked(workbench(view, pair, records=file), file, "/audit 4")
    rows = {row["mode"]: row for row in record["findings"]}
    assert rows["repeat"]["unique_outputs"] > 1
    assert record["conclusion"] == [
        "Not deterministic (float32, cpu): the same run gave different texts (repeat, order), so no equality can be promised."
    ]


def test_windows_that_flip_choices_are_told(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", tiny_pair()
    pair.target = Restless(pair.target, by_rows=0.5)
    record = checked(workbench(view, pair, records=file), file, "/audit 4")
    width = next(row for row in record["findings"] if row["mode"] == "width")
    assert width["largest_logit_difference"] == pytest.approx(3.0, abs=0.01)
    assert width["argmax_flips"] > 0 and width["unique_outputs"] > 1
    flips = sum(row["argmax_flips"] for row in record["findings"] if row["mode"] in ("width", "prefix"))
    assert f"and flipped {flips} of " in record["conclusion"][1] and "texts can part" in record["conclusion"][1]


def test_a_strategy_whose_text_depends_on_who_ran_before_is_told(view: Screen, tmp_path: Path) -> None:
    file, ran = tmp_path / "runs.jsonl", ["target"]

    def spoilt(row: Strategy, job: Job) -> Any:
        before, ran[0] = ran[0], row.name
        yield from row.steps(replace(job, settings=replace(job.settings, seed=7 if before == "speculative" else 8)))

    rows = tuple(replace(row, steps=partial(spoilt, row)) for row in infer.STRATEGIES[:3])
    record = checked(workbench(view, records=file, strategies=rows), file, "/processor multinomial 1.5", "/audit 6")
    repeat, order = record["findings"][:2]
    assert repeat["unique_outputs"] == 1 < order["unique_outputs"]
    assert "different texts (order)" in record["conclusion"][0]


@pytest.mark.parametrize(("mode", "move"), [("batch", {"by_batch": 0.5}), ("prefix", {"by_cache": 0.5})])
def test_batches_and_caches_that_move_logits_are_told(mode: str, move: dict[str, float], view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", tiny_pair()
    pair.target = Restless(pair.target, **move)
    record = checked(workbench(view, pair, records=file), file, "/audit 2")
    rows = {row["mode"]: row for row in record["findings"]}
    assert rows[mode]["largest_logit_difference"] == pytest.approx(3.0, abs=0.01)
    assert rows["repeat"]["unique_outputs"] == 1


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
        workbench(view, pair, records=file), file, "/length 2", "Hello", "/lossless 30", "/processor topk 1 5", "/lossless 300"
    )
    for row in records_of(file)[-2]["findings"] + record["findings"]:
        assert "NOT" not in row["verdict"], row


def test_a_drafter_that_cannot_read_the_prompt_is_no_obstacle(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", tiny_pair()
    pair.drafter = tiny_llama(seed=1, vocab_size=300, max_position_embeddings=8)
    record = checked(workbench(view, pair, records=file), file, "/length 2", "Hello there", "/lossless 5")
    assert [row["strategy"] for row in record["findings"]] == ["speculative", "ngram", "target"]


def test_strategies_that_are_refused_are_left_out_and_the_others_checked(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", tiny_pair(drafter=False)
    pair.target = tiny_mamba(seed=0, vocab_size=300)
    bench = workbench(view, pair, records=file)
    record = checked(bench, file, "/audit 1")
    assert record["findings"][0]["unique_by_strategy"] == {"target": 1}
    assert "repeat: ngram left out." in view.take()[1]
    bench.handle("/length 2")
    bench.handle("Hello")
    record = checked(bench, file, "/lossless 5")
    assert [row["strategy"] for row in record["findings"]] == ["target"]
    assert "ngram: left out." in view.take()[1]
    record = checked(bench, file, "/cache off", "/audit 1")
    assert "width" in [row["mode"] for row in record["findings"]]


def test_without_a_strategy_there_is_nothing_to_check(view: Screen) -> None:
    bench = workbench(view)
    for line in ("/length 1", "Hello", "/speculative off", "/ngram off", "/target off"):
        bench.handle(line)
    view.take()
    for line in ("/audit 1", "/lossless 1"):
        assert bench.handle(line) is Verdict.FAILED
        assert "No strategy is left to run" in view.take()[1]
    bench.handle("/beams 2")
    view.take()
    assert bench.handle("/lossless 1") is Verdict.FAILED
    assert "beam search draws nothing" in view.take()[1]


def test_a_recurrent_target_is_audited_as_far_as_it_goes(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", tiny_pair(drafter=False)
    pair.target = tiny_mamba(seed=0, vocab_size=300)
    bench = workbench(view, pair, records=file)
    record = checked(bench, file, "/ngram off", "/audit 2")
    assert [row["mode"] for row in record["findings"]] == ["repeat", "order", "batch"]
    assert all(row["unique_outputs"] == 1 for row in record["findings"])
    messages = view.take()[1]
    assert "width: left out." in messages and "prefix: left out." in messages and "cannot be rewound" in messages
    record = checked(bench, file, "/processor multinomial 1", "/length 2", "Hello", "/lossless 60")
    assert [row["verdict"] for row in record["findings"]] == ["no difference seen"]


def test_an_interrupted_report_keeps_what_it_found(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    calls: list[int] = []

    def tiring(job: Job) -> Any:
        calls.append(1)
        if len(calls) > 7:
            raise KeyboardInterrupt
        yield from infer.STRATEGIES[2].steps(job)

    bench = workbench(view, records=file, strategies=with_speculative(tiring))
    assert bench.handle("/audit 4") is Verdict.INTERRUPTED
    record = records_of(file)[-1]
    assert [(row["mode"], row["trials"]) for row in record["findings"]] == [("repeat", 4), ("order", 3)] and not record["finished"]
    assert "Interrupted." in view.take()[1]
    assert bench.handle("/gamma 3") is Verdict.DONE
    calls.clear()
    bench.handle("Hi")
    assert bench.handle("/lossless 20") is Verdict.INTERRUPTED
    assert [(row["strategy"], row["draws"]) for row in records_of(file)[-1]["findings"]] == [("speculative", 6)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/audit 0", "/audit: 0 is out of range: 1 to 10000; the nearest is 1."),
        ("/audit many", "/audit: 'many' is not a whole number; allowed: 1 to 10000."),
        ("/lossless", "/lossless: it works on the last prompt: send one first."),
        ("/lossless 1e6", "/lossless: '1e6' is not a whole number; allowed: 1 to 1000000."),
        ("/divergence now", "/divergence takes no argument; 'now' is one too many."),
    ],
)
def test_bad_input_is_one_sentence(line: str, said: str, view: Screen) -> None:
    assert workbench(view).handle(line) is Verdict.FAILED
    assert view.take()[1] == said + "\n"


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
