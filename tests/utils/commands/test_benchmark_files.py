"""/race FILE and /verdict FILE on prompts of Spec-Bench and SPEED-Bench: conversations, tasks and limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, open_session, records_of
from verdict_runs import Runs, helpful, similar_pair, verdict_of

from utils.comparison.arms import LocalArm, Run, ids_of
from utils.config.settings import Settings
from utils.metrics.results import Generation
from utils.prompts.conversation import Turns
from utils.repl.repl_session import Verdict

CATEGORIES = ("writing", "stem", "translation", "qa")


def spec_bench(folder: Path) -> Path:
    """Eight questions, two of each category. Those of MT-bench have two turns."""
    rows = [
        {
            "question_id": 81 + number,
            "category": (category := CATEGORIES[number // 2]),
            "turns": [f"say {number} and {number}", "again"][: 2 if category in ("writing", "stem") else 1],
        }
        for number in range(8)
    ]
    return written(folder / "question.jsonl", rows)


def speed_bench(folder: Path) -> Path:
    rows = [
        {
            "question_id": f"q{number}",
            "category": "mixed",
            "sub_category": "x",
            "turns": [f"count {number} and {number}"],
        }
        for number in range(7)
    ]
    return written(folder / "throughput_1k" / "test.jsonl", rows)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class Seen:
    """Every run on a clock of its own: a tenth of a second for each round, whatever it drafts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[tuple[str, str, Generation]] = []  # strategy, text of the prompt ids, run
        run_arm = LocalArm.run

        def run(arm: LocalArm, text: str, settings: Settings, history: Turns = (), watch: Any = None) -> Run:
            made = run_arm(arm, text, settings, history, watch)
            assert made.generation is not None
            steps, seconds = made.generation.steps, 0.1 * len(made.generation.steps)
            generation = Generation(steps, seconds, 0.1, made.finish, made.generation.timings)
            ids = ids_of(arm.pair, text, settings, history)
            self.runs.append((arm.strategy.name, str(arm.pair.tokenizer.decode(ids)), generation))
            decoding = generation.decode_tokens_per_second
            changed = {"generation": generation, "seconds": seconds, "first_seconds": 0.1}
            return replace(made, **changed, decode_tokens_per_second=decoding)

        monkeypatch.setattr(LocalArm, "run", run)

    def of(self, strategy: str) -> list[Generation]:
        return [run for name, _, run in self.runs if name == strategy]


def raced(view: Screen, folder: Path, line: str, *settings: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of the record by task and strategy."""
    file = folder / "records.jsonl"
    session = open_session(view, similar_pair(), records=file)
    for typed in ("/length 6", "/ngram off", *settings, line):
        assert session.handle(typed) is Verdict.DONE, view.take()
    return {(row["task"], row["strategy"]): row for row in records_of(file)[-1]["findings"]}


def test_prompts_are_grouped_by_the_tasks_of_the_benchmark(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    rows = raced(view, tmp_path, f"/race 1 {spec_bench(tmp_path)}")
    assert [task for task, name in rows if name == "target"] == ["mt_bench", "translation", "qa", "all"]
    assert [rows[task, "target"]["prompts"] for task in ("mt_bench", "translation", "all")] == [4, 2, 8]
    drafted, target = seen.of("speculative"), seen.of("target")
    assert len(drafted) == len(target) == 8 + 4, "the second turns of four conversations"
    # A round takes a tenth of a second.
    tokens, rounds = sum(len(run.tokens) for run in drafted), sum(len(run.steps) for run in drafted)
    row = rows["all", "speculative"]
    assert row["pooled_tokens_per_second"] == pytest.approx(10 * tokens / rounds) and row["new_tokens"] == tokens


def test_a_later_turn_continues_with_the_own_answer(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    raced(view, tmp_path, f"/race 1 {spec_bench(tmp_path)}", "/processor multinomial 1")
    for name in ("speculative", "target"):
        mine = [(text, run) for strategy, text, run in seen.runs if strategy == name]
        (_, answer), (text, _) = mine[:2]
        session = open_session(view)
        answered = session.harness.pair.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        assert "say 0 and 0" in text and "again" in text and text.index("say 0") < text.index("again")
        assert answered.strip()[:3] in text


def test_without_a_chat_template_only_first_turns_are_run(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    raced(view, tmp_path, f"/race 1 {spec_bench(tmp_path)}", "/chat off")
    assert len(seen.of("target")) == 8 and not any("again" in text for _, text, _ in seen.runs)
    assert view.take()[1].count("Only the first turn") == 1


@pytest.mark.parametrize("line", ["/race 2 {} limit=1", "/race {} limit=1"])
def test_a_limit_is_for_each_category_and_is_shown(view: Screen, tmp_path: Path, line: str) -> None:
    rows = raced(view, tmp_path, line.format(spec_bench(tmp_path)))
    assert [row["prompts"] for (_, name), row in rows.items() if name == "target"] == [1, 1, 1, 3]
    assert "question.jsonl limit=1: 3 of 8 prompts" in view.take()[0]


def test_a_limit_must_be_a_number_and_needs_a_file(view: Screen, tmp_path: Path) -> None:
    session = open_session(view)
    for line, words in (
        (f"/race {spec_bench(tmp_path)} limit=x", "limit=: 'x'"),
        (f"/race {spec_bench(tmp_path)} limit=0", "nearest is 1"),
        (f"/race {spec_bench(tmp_path)} limit=", "missing"),
        ("/race limit=3", "give a file"),
    ):
        assert session.handle(line) is Verdict.FAILED
        assert words in view.take()[1], line


def test_a_conversation_that_becomes_too_long_is_left_out(view: Screen, tmp_path: Path) -> None:
    long = {"question_id": 1, "category": "stem", "turns": ["hello", "x" * 900]}
    short = {"question_id": 2, "category": "qa", "turns": ["hello"]}
    rows = raced(view, tmp_path, f"/race 1 {written(tmp_path / 'q.jsonl', [long, short])}")
    assert list(rows) == [("qa", "speculative"), ("qa", "target")]
    assert "target: prompt 1 is left out. Turn 2: " in view.take()[1]


def test_the_tasks_of_speed_bench_have_the_length_of_their_prompts(view: Screen, tmp_path: Path) -> None:
    assert {task for task, _ in raced(view, tmp_path, f"/race 1 {speed_bench(tmp_path)}")} == {"1k mixed"}


def test_many_prompts_that_cannot_be_run_do_not_fill_the_screen(view: Screen, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"{number}" + "x" * 900} for number in range(30)]
    findings = raced(view, tmp_path, f"/race 2 {written(tmp_path / 'q.jsonl', [*rows, {'prompt': 'hello'}])}")
    assert findings["all", "target"]["prompts"] == 1
    shown, messages = view.take()
    assert messages.count("is left out") == 6 and messages.count("Further prompts") == 1
    assert "1 of 31 prompts were run" in shown


def test_a_verdict_runs_conversations(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Runs(monkeypatch, helpful)
    session = open_session(view, similar_pair(), records=tmp_path / "records.jsonl")
    assert session.handle("/length 8") is Verdict.DONE
    row, shown = verdict_of(session, view, tmp_path, f"/verdict {spec_bench(tmp_path)}")
    assert set(row["tasks"]) == {"mt_bench", "translation", "qa"}
    assert row["runs"] > row["pairs"] and row["same_texts"] == row["prompts"] == 6
    assert row["passes"] * 6 == row["pairs"] and row["conversations"]
    assert f"{row['conversations']} of the prompts were conversations" in shown
