"""/ladder: texts of the right lengths in turns, acceptance that is known by construction, and each planted cause found.

The drafter is the target itself, but wrong beyond a number of tokens, so its acceptance is 1 up to there and 0 beyond.
Runs are those of models of tables; only their times are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import Screen, open_session, records_of, screen, table_pair
from recordings import before_each_run, interrupt_after
from simulations import FEWER as RESAMPLES
from table_model import TableModel

from utils.commands.ladder import ACCEPTANCE, DRAFTING, FEWER, QUESTION, VERIFYING, conclusion, lowers
from utils.comparison.arms import LocalArm, Run
from utils.comparison.records import Countdown
from utils.config.settings import Settings
from utils.decode import model_info
from utils.metrics import intervals
from utils.metrics.results import RoundTiming
from utils.prompts.conversation import Turns
from utils.repl.repl_session import ReplSession, Verdict

LENGTH = 16  # new tokens
STEP = 0.01  # seconds of a decode step


class Forgetful(TableModel):
    """Another token than the target's is likeliest behind a context of `right` tokens or more."""

    right = 1 << 30

    def forward(self, input_ids: Any, past_key_values: Any = None, **arguments: Any) -> Any:
        output = super().forward(input_ids, past_key_values, **arguments)
        read = 0 if past_key_values is None else past_key_values.get_seq_length()
        end = max(read, input_ids.shape[1])
        for row in range(output.logits.shape[1]):
            if end - output.logits.shape[1] + row + 1 >= self.right:
                output.logits[:, row] = output.logits[:, row].roll(1, dims=-1)
        return output


def ladder_pair(right: int = 1 << 30, drafter_context: int = 1024) -> Any:
    pair = table_pair(max_position_embeddings=1024)
    pair.drafter, pair.end_ids = copy(pair.target), frozenset()
    pair.drafter.__class__ = Forgetful
    pair.drafter.right, pair.drafter.config = right, copy(pair.target.config)
    pair.drafter.config.max_position_embeddings = drafter_context
    return pair


@dataclass
class Times:
    """Seconds of the parts of a round: functions of the number of prompt tokens, per draft where it matters."""

    verify: Callable[[int], float] = lambda prompt: 0.02
    draft: Callable[[int], float] = lambda prompt: 0.05
    reading: Callable[[int], float] = lambda prompt: 0.0
    prefill: Callable[[int], float] = lambda prompt: prompt / 1000
    noise: float = 0.0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run_arm, random = LocalArm.run, np.random.default_rng(0)
        monkeypatch.setattr(intervals, "RESAMPLES", RESAMPLES)

        def run(arm: LocalArm, text: str, settings: Settings, history: Turns = (), watch: Any = None) -> Run:
            made = run_arm(arm, text, settings, history, watch)
            return made if arm.job is not None else self.timed(made, random)

        monkeypatch.setattr(LocalArm, "run", run)

    def timed(self, run: Run, random: Any) -> Run:
        assert run.generation is not None
        prompt, timings = run.prompt_tokens or 0, []
        for place, step in enumerate(run.generation.steps):
            factor, count = STEP * exp(self.noise * random.standard_normal()), len(step.drafted)
            verifying = factor * (1 + self.verify(prompt) * count) + (place == 0) * self.prefill(prompt)
            drafting = factor * self.draft(prompt) * count + STEP * self.reading(prompt) * (place == 0 and count > 0)
            timings.append(RoundTiming(drafting, verifying, drafting + verifying, count))
        seconds, first = sum(one.total for one in timings), timings[0].total
        generation = replace(run.generation, timings=tuple(timings), seconds=seconds, first_seconds=first)
        return replace(run, generation=generation, seconds=seconds, first_seconds=first)


def ladder_session(view: Screen, folder: Path, pair: Any = None, **options: Any) -> ReplSession:
    session = open_session(view, pair or ladder_pair(), records=folder / "records.jsonl", **options)
    for line in (f"/length {LENGTH}", "/chat off", "/gamma 3", "/ngram off"):
        assert session.handle(line) is Verdict.DONE
    view.take()
    return session


def climbed(session: ReplSession, view: Screen, folder: Path, line: str) -> tuple[dict[int, Any], list[str]]:
    """The rows of the speculative arm by context, and the sentences."""
    assert session.handle(line) is Verdict.DONE, view.take()
    record = records_of(folder / "records.jsonl")[-1]
    rows = {row["context"]: row for row in record["findings"] if row["strategy"] == "speculative"}
    return rows, record["conclusion"]


def test_acceptance_that_ends_at_a_known_context(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Times().install(monkeypatch)
    session = ladder_session(view, tmp_path, ladder_pair(right=300))
    rows, sentences = climbed(session, view, tmp_path, "/ladder 128 256 512")
    assert {length: row["acceptance_rate"] for length, row in rows.items()} == {128: 1.0, 256: 1.0, 512: 0.0}
    assert all(row["accepted_by_position"][0][0] == row["accepted_by_position"][0][1] for row in (rows[128], rows[256]))
    assert rows[512]["accepted_by_position"][0][0] == 0
    # 16 tokens in rounds of 4; a round costs 1.06 decode steps and 0.15 for its drafts, and without drafts accepted as
    # much for each token.
    assert rows[128]["draft_cost"] == pytest.approx(0.05, rel=0.1) and rows[128]["verify_cost"] == pytest.approx(
        1.06, 0.02
    )
    effects = rows[512]["causes"]
    assert effects[ACCEPTANCE]["factor"] == pytest.approx(1 / 4, rel=0.05)
    assert not any(lowers(effects[name]) for name in (VERIFYING, DRAFTING)) and not rows[128]["causes"]
    shown = " ".join(sentences)
    assert "pays up to 256 tokens" in shown and "beyond 256 tokens, acceptance" in shown
    assert "(1.00 at 128 tokens and 0.00 at 512 tokens)" in shown
    assert view.take()[0].count("speculative") >= 5


@pytest.mark.parametrize(
    ("times", "cause", "words"),
    [
        (Times(verify=lambda prompt: 0.02 if prompt < 300 else 0.5), VERIFYING, "verify passes become dearer (1.06"),
        (Times(draft=lambda prompt: 0.05 if prompt < 300 else 0.6), DRAFTING, "drafting becomes dearer"),
        (Times(reading=lambda prompt: prompt / 50), DRAFTING, "reading the prompt included"),
    ],
    ids=["verifying", "drafting", "reading"],
)
def test_each_planted_cost_is_found(
    times: Times, cause: str, words: str, view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times.noise = 0.01
    times.install(monkeypatch)
    rows, sentences = climbed(ladder_session(view, tmp_path), view, tmp_path, "/ladder 128 512")
    found = [name for name, effect in rows[512]["causes"].items() if lowers(effect)]
    assert found == [cause], rows[512]["causes"]
    assert words in " ".join(sentences), sentences
    assert {row["acceptance_rate"] for row in rows.values()} == {1.0}


def test_a_drafter_with_a_shorter_context_drafts_nothing(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Times().install(monkeypatch)
    session = ladder_session(view, tmp_path, ladder_pair(drafter_context=200))
    rows, sentences = climbed(session, view, tmp_path, "/ladder 128 512")
    assert rows[512]["drafted"] == 0 and [name for name, one in rows[512]["causes"].items() if lowers(one)] == [FEWER]
    assert re.search(r"fewer tokens are drafted \(\d\.\d a round at 128 tokens and 0\.0 a round", " ".join(sentences))
    assert "context length of 200" in view.take()[1]


def test_texts_have_their_lengths_and_differ(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[str]] = {"target": set(), "speculative": set()}
    run = LocalArm.run

    def noted(arm: LocalArm, text: str, settings: Settings, *rest: Any, **options: Any) -> Run:
        if settings.length == LENGTH and arm.job is None:
            seen[arm.name].add(text)
        return run(arm, text, settings, *rest, **options)

    monkeypatch.setattr(LocalArm, "run", noted)
    session = ladder_session(view, tmp_path)
    assert session.handle("/chat on") is Verdict.DONE
    assert session.handle("/ladder 256 512") is Verdict.DONE, view.take()
    assert seen["target"] == seen["speculative"] and len(seen["target"]) == 10
    texts = sorted(seen["target"], key=len)
    for length, prompts in ((256, texts[:5]), (512, texts[5:])):
        counts = [len(session.harness.prompt_ids(text, session.settings)) for text in prompts]
        assert all(0.95 * (length - LENGTH) <= count <= length - LENGTH for count in counts), counts
    assert all(text.endswith(QUESTION) for text in texts)
    assert all(any(long.endswith(short) for long in texts[5:]) for short in texts[:5]), "texts share their ends"
    assert not any(one[:200] in other for one in texts[5:] for other in texts[5:] if one is not other)


def test_strategies_take_turns(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    session = ladder_session(view, tmp_path)
    before_each_run(monkeypatch, lambda strategy, settings: order.extend(strategy.name[: settings.length == LENGTH]))
    assert session.handle("/ladder 128 256") is Verdict.DONE, view.take()
    assert "".join(order) == "stst" + "tsts" + "stst" + "tsts" + "stst", "two lengths of each text, the same one first"
    row = records_of(tmp_path / "records.jsonl")[-1]["findings"][0]
    assert row["draft_cost"] > 0 and row["verify_cost"] > 0, "the parts of rounds are timed"


def test_a_short_file_is_repeated(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Times(noise=0.01).install(monkeypatch)
    (tmp_path / "one.txt").write_text("The sea is wide. " * 20)  # 340 tokens
    session = ladder_session(view, tmp_path)
    rows, _ = climbed(session, view, tmp_path, f"/ladder 128 256 512 {tmp_path / 'one.txt'}")
    assert list(rows) == [128, 256] and {row["prompts"] for row in rows.values()} == {1}
    assert {len(row["speedups"]) for row in rows.values()} == {5}
    messages = view.take()[1]
    assert "512 is left out. The text is too short" in messages and "repeats" in messages


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/ladder 0", "0 is out of range"),
        ("/ladder 2m", "'2m' is not a whole number"),
        ("/ladder 2k", "2k is left out. tiny-target has a context length of 1,024"),
        ("/ladder 32", "no room for a text"),
        ("/ladder nowhere.txt", "nowhere.txt cannot be read"),
    ],
)
def test_what_cannot_run_is_refused(line: str, words: str, view: Screen, tmp_path: Path) -> None:
    session = ladder_session(view, tmp_path)
    assert session.handle(line) is Verdict.FAILED and words in view.take()[1]


def test_a_context_without_memory_is_left_out(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = ladder_session(view, tmp_path)
    need = model_info.GROWTH * 2 * model_info.cache_bytes(session.harness.pair.target, 256)
    monkeypatch.setattr(model_info, "NEGLIGIBLE", 0)
    monkeypatch.setattr(model_info, "available_memory", lambda: int(need))
    assert session.handle("/ladder 128 256 512") is Verdict.DONE, view.take()
    rows = records_of(tmp_path / "records.jsonl")[-1]["findings"]
    assert {row["context"] for row in rows} == {128, 256} and "512 is left out. The keys and values" in view.take()[1]


def test_a_strategy_must_draft(view: Screen, tmp_path: Path) -> None:
    session = ladder_session(view, tmp_path)
    assert session.handle("/speculative off") is Verdict.DONE
    assert session.handle("/ladder 128") is Verdict.FAILED and "/speculative on" in view.take()[1]
    for line in ("/speculative on", "/target off", "/ladder 128"):  # the baseline runs anyway
        assert session.handle(line) is Verdict.DONE, view.take()
    assert records_of(tmp_path / "records.jsonl")[-1]["findings"][0]["speedups"]


def test_ctrl_c_keeps_what_was_measured(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = ladder_session(view, tmp_path)
    interrupt_after(monkeypatch, 8)  # within the second text; two runs estimate the time
    assert session.handle("/ladder 128 256") is Verdict.INTERRUPTED
    record = records_of(tmp_path / "records.jsonl")[-1]
    assert not record["finished"] and {row["context"]: row["prompts"] for row in record["findings"]} == {128: 2, 256: 1}
    assert "too few" in record["conclusion"][0]


def test_a_chart_in_80_columns_and_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars are as long as the acceptance of the first draft (6 cells) and the speed-up (3 cells for 1x)."""
    Times().install(monkeypatch)
    view = screen(80)
    session = ladder_session(view, tmp_path, ladder_pair(right=200))
    rows, _ = climbed(session, view, tmp_path, "/ladder 128 256")
    table = [line for line in view.take()[0].splitlines() if line.lstrip()[:3] in ("128", "256")]
    assert len(table) == 2 and all(len(line.rstrip()) <= 80 for line in table)
    for line, figures in zip(table, rows.values(), strict=True):
        first, speedup = int(figures["first_drafts"] * 6), int(figures["speedup"] * 3)
        assert re.findall("\u2588+", line) == ["\u2588" * first] * bool(first) + ["\u2588" * speedup] * bool(speedup)
    assert table[0].index("1.00") == table[1].index("0.00"), "figures stand below each other"
    assert rows[128]["first_drafts"] == 1 and rows[256]["first_drafts"] == 0
    assert session.handle(f"/export {tmp_path / 'page.html'}") is Verdict.DONE
    assert "\u2588" * 6 in (tmp_path / "page.html").read_text(encoding="utf-8")


def row(context: int, verdict: str, speedup: float, **figures: Any) -> dict[str, Any]:
    interval = [speedup - 0.1, speedup + 0.1]
    claim = {"verdict": verdict, "speedup": speedup, "interval": interval, "speedups": [speedup], "prefill_share": 0.1}
    return {"strategy": "a", "context": context, "causes": {}, "other_texts_at_prompts": [], **claim, **figures}


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        (("faster", "faster"), "pays up to 2k tokens: 1.50x (1.40 to 1.60) at 2k"),
        (("faster", "not distinguishable"), "pays up to 1k tokens: 1.50x (1.40 to 1.60) at 1k tokens, faster; 1.50x"),
        (("not distinguishable", "slower"), "is not measurably faster in any context"),
        (("slower", "faster"), "is faster only at 2k tokens"),
    ],
)
def test_where_it_pays(verdicts: tuple[str, ...], words: str) -> None:
    rows = [row(1024 * (place + 1), verdict, 1.5) for place, verdict in enumerate(verdicts)]
    assert words in conclusion(rows)[0]


def test_a_long_prompt_is_named() -> None:
    rows = [row(1024, "faster", 1.5), row(2048, "faster", 1.1, prefill_share=0.8)]
    assert "reading the prompt takes 10% at 1k tokens and 80% at 2k tokens" in " ".join(conclusion(rows))
    assert "reading" not in " ".join(conclusion(rows[:1]))


def test_the_estimate_of_time(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading n tokens takes n / 1000 + n ** 2 / 100,000 seconds, measured at two lengths; a decode step takes 1 ms."""
    Times(prefill=lambda prompt: prompt / 1000 + prompt**2 / 100_000).install(monkeypatch)
    assert ladder_session(view, tmp_path).handle("/ladder 128 256 1k") is Verdict.DONE
    expected = 5 * 2 * (sum(n / 1000 + n**2 / 100_000 for n in (128, 256, 1024)) + 3 * LENGTH / 1000)
    (minutes,) = re.findall(r"about (\d+) minutes", view.take()[1])
    assert float(minutes) == pytest.approx(expected / 60, rel=0.1, abs=0.6)


def test_the_remaining_time_counts_long_prompts_more(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[float] = []
    monkeypatch.setattr(Countdown, "progress", lambda self, fraction, text: done.append(fraction))
    assert ladder_session(view, tmp_path).handle("/ladder 128 512") is Verdict.DONE
    part = [128 - LENGTH, 512 - LENGTH]
    assert len(done) == 10 and done[0] == 0 and done[-1] == pytest.approx(1 - part[1] / sum(part) / 5, rel=0.02)
    assert done[1] == pytest.approx(part[0] / sum(part) / 5, rel=0.1)
