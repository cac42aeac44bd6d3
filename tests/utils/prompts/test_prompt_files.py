"""Prompt files in the formats of published benchmarks, samples of them, and files that are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from utils.errors import UserError
from utils.prompts.prompt_files import Prompt, limited, read_prompts

SPEC = {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Start each sentence with A."]}
SPEED = {
    "question_id": "3fa1",
    "category": "math",
    "sub_category": "algebra",
    "turns": ["Solve x + 1 = 2.", "And x + 2 = 2?"],
    "source": "tatsu/math",
    "src_id": "m_1",
    "difficulty": "easy",
    "multiturn": True,
}


def file_of(folder: Path, *rows: Any, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_spec_bench_counts_the_categories_of_mt_bench_as_one(tmp_path: Path) -> None:
    rows = [SPEC, SPEC | {"category": "math"}, {"question_id": 9, "category": "math_reasoning", "turns": ["1 + 1?"]}]
    first, second, third = read_prompts(file_of(tmp_path, *rows))
    assert first == Prompt("Write a post.", "mt_bench", ("Start each sentence with A.",))
    assert (second.task, third) == ("mt_bench", Prompt("1 + 1?", "math_reasoning"))


def test_speed_bench_has_its_own_categories(tmp_path: Path) -> None:
    expected = Prompt("Solve x + 1 = 2.", "math", ("And x + 2 = 2?",))
    short = {name: SPEED[name] for name in ("question_id", "category", "turns")}
    numbered = SPEED | {"question_id": 4}
    assert list(read_prompts(file_of(tmp_path, SPEED, short, numbered))) == [expected] * 3


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("throughput_8k/test.jsonl", "8k low_entropy"),
        ("speed_throughput_32k.jsonl", "32k low_entropy"),
        ("other/test.jsonl", "low_entropy"),
        ("throughput_8k/other/test.jsonl", "low_entropy"),
    ],
)
def test_the_input_length_of_the_throughput_split_is_in_the_name_of_its_file(
    tmp_path: Path, name: str, task: str
) -> None:
    rows = [SPEED | {"category": "low_entropy"}, SPEED]
    assert [prompt.task for prompt in read_prompts(file_of(tmp_path, *rows, name=name))] == [task, "math"]


def test_a_folder_stands_for_its_files_in_the_order_of_their_lengths(tmp_path: Path) -> None:
    for length in ("16k", "1k", "2k"):
        file_of(tmp_path, SPEED | {"category": "mixed"}, name=f"speed/throughput_{length}/test.jsonl")
    (tmp_path / "empty").mkdir()
    assert [prompt.task for prompt in read_prompts(tmp_path / "speed")] == ["1k mixed", "2k mixed", "16k mixed"]
    with pytest.raises(UserError, match="jsonl"):
        list(read_prompts(tmp_path / "empty"))


def test_the_sets_of_aiperf_are_read_as_they_are_published(tmp_path: Path) -> None:
    """spec_al_gsm8k, spec_al_math500, spec_al_humaneval, spec_al_mbpp and spec_al_mtbench, with AIPerf's columns."""
    rows = [
        {"question": "How many eggs?", "answer": "She has 9.\n#### 9"},
        {"problem": "Solve $x = 1$.", "solution": "1", "answer": "1", "subject": "Algebra", "level": 1},
        {
            "task_id": "HumanEval/0",
            "prompt": "def f(x):\n",
            "canonical_solution": "return x",
            "test": "",
            "entry_point": "f",
        },
        {"task_id": 11, "text": "Write a function.", "code": "def f(): ...", "test_list": ["assert f()"]},
        {"category": "writing", "prompt": ["Write.", "Again."], "prompt_id": 81, "reference": []},
    ]
    gsm8k, math, code, mbpp, chat = read_prompts(file_of(tmp_path, *rows))
    assert [gsm8k, math, code, mbpp] == [
        Prompt(text) for text in ("How many eggs?", "Solve $x = 1$.", "def f(x):\n", "Write a function.")
    ]
    assert chat == Prompt("Write.", "writing", ("Again.",))
    with pytest.raises(UserError, match="line 1: a JSON line needs"):
        list(read_prompts(file_of(tmp_path, {"question": " "})))


def test_other_conversations_have_no_benchmark(tmp_path: Path) -> None:
    rows = [
        {"turns": ["a", "b"], "task": "chat"},
        {"prompt": ["c", "d"], "category": "writing", "prompt_id": 7},
        {"question_id": 1, "category": "writing", "prompt": "e"},
    ]
    expected = [Prompt("a", "chat", ("b",)), Prompt("c", "writing", ("d",)), Prompt("e", "writing")]
    assert list(read_prompts(file_of(tmp_path, *rows))) == expected


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"turns": ["a"]', "needs"),
        ({"question_id": 1, "category": "qa"}, "needs"),
        (SPEC | {"turns": []}, "list of texts"),
        (SPEC | {"turns": "Write a post."}, "list of texts"),
        (SPEC | {"turns": ["Write a post.", " "]}, "list of texts"),
        (SPEC | {"turns": ["Write a post.", 3]}, "list of texts"),
        (SPEC | {"turns": None}, "list of texts"),
        ({"prompt": []}, "not blank"),
        ({"prompt": {"a": 1}}, "not blank"),
        (SPEED | {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]}, "prepare"),
    ],
)
def test_a_damaged_line_is_named_in_one_sentence(tmp_path: Path, row: Any, problem: str) -> None:
    path = file_of(tmp_path, SPEC, "", row)
    with pytest.raises(UserError) as error:
        list(read_prompts(path))
    message = str(error.value)
    assert message.startswith(f"{path}, line 3: ") and problem in message and "\n" not in message


def test_a_parquet_file_is_refused_with_the_conversion(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Parquet.*read_parquet"):
        list(read_prompts(tmp_path / "test.parquet"))


def test_a_limit_takes_prompts_of_each_task_evenly_spaced_in_the_order_of_the_file() -> None:
    prompts = [Prompt(str(number), "ab"[number % 2]) for number in range(16)] + [Prompt("last", "c")]
    assert limited(prompts, 2) == [4, 5, 12, 13, 16]
    assert limited(prompts, 8) == list(range(17))
