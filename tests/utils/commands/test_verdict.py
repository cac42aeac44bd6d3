"""/verdict: its answers where speculative decoding helps, does not help or makes no difference, on constant clocks.

Runs are those of tiny models; only their seconds are replaced. A fake clock adds them up, so no test waits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import Screen, open_session, records_of, tiny_pair
from tiny import tiny_llama, tiny_mamba

import infer
from utils.commands.experiments.verdict import measurement, record, timing
from utils.commands.experiments.verdict.analysis import TimeSplit, expected_tokens, limits, with_better_drafter
from utils.commands.experiments.verdict.elsewhere import equivalent_lines, equivalents
from utils.commands.experiments.verdict.plan import FOLDER, divide, plan_prompts, spaced, tasks_in_turn
from utils.commands.experiments.verdict.timing import RUN_SECONDS, run_length, run_seconds
from utils.commands.experiments.verdict.wording import answer
from utils.comparison.harness import Harness
from utils.comparison.measurements import RECOMMENDED, read_measurements
from utils.comparison.strategies import Strategy
from utils.config.arguments import parse_arguments
from utils.config.settings import Settings
from utils.decode.steps import FinishReason, Step
from utils.engine import Engine
from utils.logits_processor import GreedyProcessor
from utils.metrics.results import Generation
from utils.metrics.stopwatch import RoundTiming
from utils.prompts.prompt_files import Prompt, read_prompts
from utils.repl.repl_session import ReplSession
from utils.repl.runner import Verdict

STEP = 0.1  # seconds of a decode step
Cost = Callable[[Strategy, Step], float]
TEXTS = [f"{word} and more {word}" for word in ("one", "two", "three", "four", "five", "six", "seven", "eight")]


def similar_pair() -> Any:
    """A pair whose drafter is the target with some noise, so that many drafts are accepted."""
    pair = tiny_pair()
    drafter = tiny_llama(seed=0, vocab_size=300)
    with torch.no_grad():
        for weight in drafter.parameters():
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
            weight.add_(0.03 * weight.std(correction=0) * noise)
    pair.drafter = drafter
    return pair


def helpful(strategy: Strategy, step: Step) -> float:
    """Seconds of a round in which drafts cost nothing."""
    return STEP


def useless(strategy: Strategy, step: Step) -> float:
    """Verifying a draft takes as long as decoding it, and so does drafting it."""
    return STEP * (1 + 2 * len(step.drafted)) if step.drafted else STEP


class Runs:
    """Replaces the seconds of every run, and notes what was run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: Cost, noise: float = 0.0) -> None:
        self.made: list[tuple[str, int, tuple[int, ...]]] = []  # strategy, length, prompt
        self.now, self._cost, self._noise = 0.0, cost, noise
        self._random = np.random.default_rng(3)
        self._run_alone = Harness.run_alone
        self.seeds: set[int] = set()
        self._known: dict[Any, Generation] = {}
        self.stop_after: Callable[[], bool] = lambda: False
        monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(Harness, "run_alone", lambda *arguments, **options: self._run(*arguments, **options))

    def _decoded(self, harness: Harness, prompt: list[int], strategy: Strategy, settings: Settings) -> Generation:
        """The same runs give the same tokens, so they are decoded once."""
        greedy = isinstance(settings.processor, GreedyProcessor)
        key = (id(harness), tuple(prompt), strategy.name, repr(replace(settings, seed=0) if greedy else settings))
        if key not in self._known:
            self._known[key] = self._run_alone(harness, prompt, strategy, settings)
        return self._known[key]

    def _run(
        self, harness: Harness, prompt: list[int], strategy: Strategy, settings: Settings, **options: Any
    ) -> Generation:
        if self.stop_after():
            raise KeyboardInterrupt
        run = self._decoded(harness, prompt, strategy, settings)
        self.seeds.add(settings.seed)
        self.made.append((strategy.name, settings.length, tuple(prompt)))
        factor = exp(self._noise * self._random.standard_normal())
        each = [factor * self._cost(strategy, step) for step in run.steps]
        self.now += sum(each)
        timings = tuple(
            RoundTiming(drafting := 0.2 * STEP * len(step.drafted), spent - drafting, spent, len(step.drafted))
            for step, spent in zip(run.steps, each, strict=True)
        )
        return replace(run, seconds=sum(each), first_seconds=each[0], timings=timings)


def prompts_file(folder: Path, prompts: list[Any]) -> Path:
    path = folder / "prompts.jsonl"
    rows = (row if isinstance(row, dict) else {"prompt": row} for row in prompts)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def session_of(view: Screen, folder: Path, pair: Any = None) -> ReplSession:
    session = open_session(view, pair or similar_pair(), records=folder / "records.jsonl")
    for line in ("/length 12", "/chat off"):
        assert session.handle(line) is Verdict.DONE
    view.take()
    return session


def ids_of(session: ReplSession, prompts: Iterable[Prompt]) -> set[tuple[int, ...]]:
    return {tuple(session.harness.prompt_ids(prompt.text, session.settings)) for prompt in prompts}


def verdict_of(session: ReplSession, view: Screen, folder: Path, line: str) -> tuple[dict[str, Any], str]:
    """The figures of the candidate, and all that is shown."""
    assert session.handle(line) is Verdict.DONE, view.take()
    return records_of(folder / "records.jsonl")[-1]["findings"][-1], view.take()[0]


def test_a_pair_that_helps(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, helpful)
    session = session_of(view, tmp_path)
    tasks = [{"prompt": text, "task": "story" if index % 2 else "list"} for index, text in enumerate(TEXTS)]
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {prompts_file(tmp_path, tasks)}")
    assert row["drafter_kind"] == "model" and row["verdict"] == "faster" and row["accepted"] > 0
    assert row["interval"][0] > 1 and row["speedup"] == pytest.approx(
        exp(np.mean([np.log(np.mean(one["speedups"])) for one in row["by_prompt"]])), rel=1e-6
    )
    assert row["speedup"] == pytest.approx(row["tokens_per_target_forward"], rel=0.2), "rounds of equal seconds"
    assert row["same_texts"] == row["prompts"] == 6 and "text identical on 6 of 6" in shown
    assert f"{row['speedup']:.2f}x target-only (95 % interval {row['interval'][0]:.2f} to" in shown
    assert shown.index("Use the drafter model") > 0 and "over 6 prompts" in shown
    assert set(row["tasks"]) == {"story", "list"} and all(one["speedup"] > 1 for one in row["tasks"].values())
    assert "assistant_model=" in shown and '"method": "draft_model"' in shown and "--spec-draft-n-max" in shown
    assert max(length for _, length, _ in runs.made) <= 12
    assert "speed-up over target-only, one dot per prompt" in shown and "story" in shown
    measurements = read_measurements(tmp_path / "records.jsonl").measurements
    assert [one.strategy for one in measurements] == [RECOMMENDED, "target"] * 6
    assert {one.prompt for one in measurements} <= set(TEXTS) and all(one.speedups for one in measurements[::2])
    before = session.settings
    assert session.handle("/verdict apply") is Verdict.DONE
    after = session.settings
    assert (after.gamma, after.drafter_kind, after.ngram) == (row["gamma"], ("loaded",), False) and before.ngram
    assert session.handle("/undo") is Verdict.DONE and session.settings == before


def test_nothing_helps(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Runs(monkeypatch, useless, noise=0.01)
    session = session_of(view, tmp_path, tiny_pair())
    session.handle("/gamma 4")
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {prompts_file(tmp_path, TEXTS)}")
    assert row["speedup"] <= 1.01 and row["verdict"] != "faster"
    assert "does not help" in shown and "Use " not in shown and "assistant_model" not in shown


def test_noise_alone_is_not_distinguishable(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds per token are equal on average. A correct interval calls this faster or slower once in twenty seeds."""
    Runs(monkeypatch, lambda strategy, step: STEP * len((*step.drafted[: step.accepted], 0)), noise=0.1)
    session = session_of(view, tmp_path)
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {prompts_file(tmp_path, TEXTS)}")
    assert row["accepted"] > 0 and row["interval"][0] < 1 < row["interval"][1]
    assert "not distinguishable from no difference" in shown and "/verdict apply" not in shown
    assert session.handle("/verdict apply") is Verdict.FAILED


def test_no_claim_without_an_accepted_draft(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline that happens to be slow does not make a strategy fast that saves no forward pass."""
    Runs(monkeypatch, lambda strategy, step: STEP * (2 if strategy.is_baseline else 1))
    monkeypatch.setattr(record, "NO_GAIN", 9.0)  # so that these drafts count as none
    session = session_of(view, tmp_path)
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {prompts_file(tmp_path, TEXTS)}")
    assert row["interval"][0] > 1 and "does not help" in shown and "saved no forward" in shown
    assert "noise" in shown, "the chart claims no speed-up either"
    assert "assistant_model" not in shown and session.handle("/verdict apply") is Verdict.FAILED


def test_one_prompt_is_judged_by_repeats(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Runs(monkeypatch, helpful, noise=0.05)
    session = session_of(view, tmp_path)
    assert session.handle("one and more one") is Verdict.DONE
    row, shown = verdict_of(session, view, tmp_path, "/verdict")
    assert row["prompts"] == 1 and row["interval_over"] == "repeats" and row["pairs"] >= 5
    assert '/verdict on "one and more one"' in shown, "which prompt is this one"
    assert "On this prompt, use" in shown and f"over {row['pairs']} repeats" in shown


def test_one_prompt_is_run_as_long_as_there_is_time_for(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first 32 tokens of an answer are not the answer: drafts may be accepted less often later on."""
    runs = Runs(monkeypatch, lambda strategy, step: 0.075)
    session = session_of(view, tmp_path)
    session.handle("/length 128")
    assert session.handle("one and more one") is Verdict.DONE
    row, _ = verdict_of(session, view, tmp_path, "/verdict")
    assert row["length"] == 128 and row["pairs"] >= 5 and runs.now < 180


def test_settings_that_are_in_use_are_not_proposed(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Runs(monkeypatch, helpful)
    session = session_of(view, tmp_path)
    path = prompts_file(tmp_path, TEXTS)
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {path}")
    assert row["in_use"] == (row["gamma"] is None) and ("/verdict apply" in shown) != row["in_use"]
    session.handle("/gamma auto" if row["gamma"] is not None else "/gamma 7")
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {path}")
    assert not row["in_use"] and "/verdict apply" in shown
    assert session.handle("/verdict apply") is Verdict.DONE
    view.take()
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {path}")
    assert row["in_use"] and "/verdict apply" not in shown


def test_prompts_of_the_session_come_first_and_builtin_ones_else(view: Screen, tmp_path: Path) -> None:
    session = session_of(view, tmp_path)
    assert len(plan_prompts("", session.harness.state.prompts).measured) == 12
    for line in ("Hello", "Hello", "There", "x" * 900):
        session.handle(line)
    assert session.harness.state.prompts == ["Hello", "Hello", "There"], "without the one that was refused"
    plan = plan_prompts("", session.harness.state.prompts)
    assert [prompt.text for prompt in plan.measured] == ["Hello", "There"] and not plan.divided
    assert plan_prompts("builtin", ["Hello"]).divided


def test_what_chooses_the_candidate_is_never_measured(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tuning prompts are run before all others, and none of their runs is among the measured ones."""
    runs = Runs(monkeypatch, helpful)
    session = session_of(view, tmp_path)
    path = prompts_file(tmp_path, TEXTS)
    plan = plan_prompts(str(path), [])
    row, _ = verdict_of(session, view, tmp_path, f"/verdict {path}")
    tuning, measured = ids_of(session, plan.tuning), ids_of(session, plan.measured)
    assert not tuning & measured and len(tuning) == 2 and row["prompts"] == len(measured) == 6
    first = next(index for index, (_, _, prompt) in enumerate(runs.made) if prompt in measured)
    assert {prompt for _, _, prompt in runs.made[:first]} == tuning
    assert not {prompt for _, _, prompt in runs.made[first:]} & tuning
    assert row["pairs"] == sum(prompt in measured and name == "target" for name, _, prompt in runs.made), (
        "every pair is of a measured prompt"
    )


@pytest.mark.parametrize("amount", [1, 5, 6, 7, 8, 11, 12, 40])
def test_few_prompts_are_not_divided_and_more_are(amount: int) -> None:
    prompts = [Prompt(str(index)) for index in range(amount)]
    plan = divide("prompts", prompts)
    assert plan.divided == (amount > 5)
    if plan.divided:
        assert not set(plan.tuning) & set(plan.measured)
        assert 1 <= len(plan.tuning) <= min(3, amount // 4 or 1)
        assert len(plan.measured) + len(plan.tuning) + plan.left_out == amount and len(plan.measured) <= 24
    else:
        assert plan.measured == tuple(prompts) and set(plan.tuning) <= set(prompts)


def test_prompts_are_spaced_and_tasks_take_turns() -> None:
    prompts = [Prompt(str(index), "a" if index < 6 else "b") for index in range(12)]
    assert {prompt.task for prompt in spaced(prompts, 2)} == {"a", "b"}
    assert [prompt.task for prompt in tasks_in_turn(prompts)][:4] == ["a", "b", "a", "b"]
    assert len(set(tasks_in_turn(prompts))) == 12


def test_the_built_in_prompts() -> None:
    measured, tuning = (list(read_prompts(FOLDER / name)) for name in ("prompts.jsonl", "tuning.jsonl"))
    assert len(measured) == 12 and len(tuning) == 3
    assert all(sum(prompt.task == task for prompt in measured) == 2 for task in {prompt.task for prompt in measured})
    assert len({prompt.task for prompt in measured}) == 6 and not set(measured) & set(tuning)


def test_both_go_first_equally_often(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, helpful, noise=0.1)
    session = session_of(view, tmp_path)
    path = prompts_file(tmp_path, TEXTS)
    row, _ = verdict_of(session, view, tmp_path, f"/verdict {path}")
    assert row["passes"] > 1
    whole = [(name, prompt) for name, length, prompt in runs.made if length == 12][-2 * row["pairs"] :]
    firsts = [name for name, _ in whole[::2]]
    assert abs(2 * firsts.count("target") - len(firsts)) <= 1
    assert all(left[1] == right[1] and left[0] != right[0] for left, right in zip(whole[::2], whole[1::2], strict=True))


def test_ctrl_c_keeps_the_finished_pairs(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, helpful)
    session = session_of(view, tmp_path)
    path = prompts_file(tmp_path, TEXTS)
    measured = ids_of(session, plan_prompts(str(path), []).measured)
    # A warm-up run and two whole runs for each prompt; the tenth is one of a pair.
    runs.stop_after = lambda: sum(prompt in measured for _, _, prompt in runs.made) == 11
    assert session.handle(f"/verdict {path}") is Verdict.INTERRUPTED
    report = records_of(tmp_path / "records.jsonl")[-1]
    assert not report["finished"] and report["findings"][-1]["pairs"] == 3
    assert report["findings"][0]["runs"] == report["findings"][1]["runs"] == 3
    assert "over 3 prompts" in view.take()[0]
    runs.made.clear()
    runs.stop_after = lambda: sum(prompt in measured for _, _, prompt in runs.made) == 4
    session.handle(f"/verdict {path}")
    assert "Too few runs" in view.take()[0]
    runs.made.clear()
    runs.stop_after = lambda: len(runs.made) == 4
    assert session.handle(f"/verdict {path}") is Verdict.INTERRUPTED and "nothing" in view.take()[1]


def test_prompts_that_cannot_run_are_skipped(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Runs(monkeypatch, helpful)
    session = session_of(view, tmp_path)
    path = prompts_file(tmp_path, [*TEXTS[:4], "x" * 900, "y" * 901, *TEXTS[4:]])
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {path}")
    too_long = [line for line in row["skipped"] if "context length" in line]
    assert 1 <= len(too_long) <= 2 and all(line in shown for line in too_long)
    assert session.handle(f"/verdict {prompts_file(tmp_path, ['x' * 900])}") is Verdict.FAILED
    assert "none of the prompts" in view.take()[1]


def test_progress_counts_the_tuning_prompts_that_are_used(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Runs(monkeypatch, helpful)
    session = session_of(view, tmp_path)
    assert session.handle(f"/verdict {prompts_file(tmp_path, ['x' * 900, 'one'])}") is not Verdict.FAILED
    shown = "".join(view.take())
    assert "tuning prompt 1 of 1" in shown and "tuning prompt 2" not in shown


def test_answers_that_are_too_short_because_of_length(view: Screen, tmp_path: Path) -> None:
    session = session_of(view, tmp_path)
    session.handle("/length 1")
    assert session.handle("/verdict") is Verdict.FAILED
    assert "/length" in view.take()[1].splitlines()[-1]


def test_without_a_drafter(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Runs(monkeypatch, helpful)
    monkeypatch.setattr(measurement, "MOST_PASSES", 1)
    session = session_of(view, tmp_path, tiny_pair(drafter=False))
    row, _ = verdict_of(session, view, tmp_path, f"/verdict {prompts_file(tmp_path, TEXTS)}")
    assert {one["drafter_kind"] for one in row["considered"]} == {"ngram", "lookup", "suffix"}
    assert row["extra_memory"] == 0


def test_with_sampling_texts_have_the_same_distribution_or_are_the_same(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(monkeypatch, helpful)
    monkeypatch.setattr(measurement, "MOST_PASSES", 2)
    session, path = session_of(view, tmp_path), prompts_file(tmp_path, TEXTS[:6])
    session.handle("/processor multinomial 1")
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {path}")
    assert row["drafter_kind"] == "model" and not row["must_be_the_targets"]
    assert "same distribution" in shown and "identical" not in shown
    assert len(runs.seeds) >= 3, "passes draw other random numbers, and other ones than the selection"
    session.handle("/verify coupled")
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {path}")
    assert "text identical on 5 of 5" in shown and row["extra_memory"] > 0


def test_a_first_interval_within_a_minute_and_an_end(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eighteen tokens per second, as the embedded target has: 64 tokens take 3.6 s."""
    runs = Runs(monkeypatch, lambda strategy, step: 0.055)
    session = session_of(view, tmp_path)
    session.handle("/length 128")
    seen: list[tuple[float, str]] = []
    monkeypatch.setattr(view.renderer, "progress", lambda text: seen.append((runs.now, text)), raising=False)
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {prompts_file(tmp_path, TEXTS)}")
    assert row["length"] == 64 and "/length is 128" in shown
    assert next(now for now, text in seen if "95 % interval" in text) < 60 and runs.now < 180
    assert all("s left" in text for _, text in seen if "interval" in text)


def test_on_a_very_slow_machine_there_is_an_answer(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run takes longer than the whole selection should: one kind is replayed, and the others are named."""
    Runs(monkeypatch, lambda strategy, step: 9.0)
    session = session_of(view, tmp_path)
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {prompts_file(tmp_path, TEXTS * 3)}")
    assert row["drafter_kind"] == "model" and "no time to replay: n-gram" in shown
    assert row["passes"] == 1 and row["prompts"] == 6


def test_the_length_of_runs_follows_the_speed() -> None:
    assert [run_length(step, 1000) for step in (0.001, 0.05, 0.1, 0.2, 9)] == [128, 64, 32, 16, 16]
    assert run_seconds(1) == pytest.approx(10) and run_seconds(12) == RUN_SECONDS
    assert run_length(0.001, 35) == 35 and run_length(9, 5) == 5


def test_too_few_runs_claim_nothing_that_no_draft_explains() -> None:
    """Ctrl-C after one pair of runs, of which the target's happened to be slow."""
    row: dict[str, Any] = {"candidate": "the head with /gamma 2", "speedup": 1.44, "interval": None, "divided": True}
    row |= {"must_be_the_targets": True, "same_texts": 1, "prompts": 1, "without_gain": True}
    assert "1.4" not in answer(row) and "saved no forward" in answer(row)
    assert "about 1.4x" in answer(row | {"without_gain": False})


def rounds(*accepted: int, drafts: int = 4) -> Generation:
    steps = tuple(Step(tuple(range(drafts)), number, 9) for number in accepted)
    return Generation(steps, 1.0, 0.1, FinishReason.LENGTH)


def test_what_a_better_drafter_would_bring() -> None:
    """Every position accepts half of its drafts: 1 + 1/2 + 1/4 + 1/8 + 1/16 tokens a round, and with 3/4 more."""
    run = rounds(*([0] * 8 + [1] * 4 + [2] * 2 + [3] + [4]))
    rates = [accepted / tried for accepted, tried in run.accepted_by_position]
    assert rates == [0.5] * 4
    assert expected_tokens(rates, run) == pytest.approx((1 - 0.5**5) / (1 - 0.5))
    split = TimeSplit(prefill=1.0, steps=4.0, verifying=1.0, drafting=2.0, other=0.0, target=16.0)
    gains = with_better_drafter(split, run, 2.0)
    assert gains["twice_as_fast"] == pytest.approx(2.0 * 8 / 7)
    ratio = (1 - 0.5**5) / 0.5 / ((1 - 0.75**5) / 0.25)
    assert gains["twice_as_accurate"] == pytest.approx(2.0 * 8 / (1 + 7 * ratio))
    causes = limits(split, run, 2.0)
    assert causes["drafting"] == pytest.approx(2 * 8 / 6) and causes["verifying"] == pytest.approx(2 * 8 / 7)
    assert causes["prefill"] == pytest.approx(2 * (15 / 16) / (7 / 8)) and causes["other"] == 2
    assert causes["rejection"] == pytest.approx(2 * 8 / (1 + 7 * (1 + run.accepted / 16) / 5))


@pytest.mark.parametrize("kind", ["model", "head", "layers:4", "lookup", "suffix", "chain", "ngram"])
def test_settings_of_other_programs(kind: str) -> None:
    rows = dict(equivalents(kind, 5, drafter='a"b', same_tokenizer=True))
    assert set(rows) == {"transformers", "vLLM", "llama.cpp"}
    with_equivalent = {name for name, text in rows.items() if text != "no equivalent"}
    expected = {"model": set(rows), "lookup": set(rows), "suffix": {"vLLM"}, "layers:4": {"transformers"}}
    assert with_equivalent == expected.get(kind, set())
    for name in with_equivalent & {"vLLM"}:
        config = json.loads(rows[name].partition("'")[2].rstrip("'"))
        assert config["num_speculative_tokens"] == 5 and config.get("model", 'a"b') == 'a"b'
    assert len(equivalent_lines(list(rows.items()))) == len(with_equivalent) + (len(with_equivalent) < 3)


def test_the_flag_types_the_command_after_the_lines_of_c() -> None:
    assert parse_arguments(["--verdict"]).lines == ["/verdict"]
    given = parse_arguments(["-c", "Hello", "--verdict", "my prompts.jsonl"])
    assert given.lines == ["Hello", "/verdict my prompts.jsonl"]
    assert parse_arguments([]).lines == []


def test_a_missing_file_is_reported_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("loaded")

    monkeypatch.setattr(infer, "load_pair", never)
    assert infer.main(["--verdict", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err


def test_a_reason_that_nothing_can_draft_is_given_once(view: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_mamba(vocab_size=300)
    pair = tiny_pair(drafter=False)
    pair.target, pair.engine = model, Engine([model])
    session = open_session(view, pair)
    for line in ("/chat off", "/length 4"):
        session.handle(line)
    view.take()
    assert session.handle("/verdict") is Verdict.FAILED
    assert view.take()[1].count("/cache off") == 1
