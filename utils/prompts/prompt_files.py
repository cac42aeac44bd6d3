"""Files of prompts: one prompt per line, or JSON lines with a `prompt` or `turns` and optionally a `task`.

Also the selection from too many prompts, and the formats of published benchmarks. Nothing heavy is imported.
"""

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from utils.errors import UserError, naming
from utils.files import read_text
from utils.prompts.request_fields import logged_fields, parse_request, request_of
from utils.text import unescape

ALL_TASKS = "all"  # the task of a prompt without one
NO_PROMPT = (
    'a JSON line needs a "prompt", a text, "turns", a list of texts that are not blank, or "messages", for example '
    '{"prompt": "Hello"}.'
)
PARQUET = "The prompts file {} is a Parquet file: convert it to JSON lines, for example with read_parquet of pandas."
# Spec-Bench (Xia et al. 2024, hemingkx/Spec-Bench, data/spec_bench/question.jsonl) has question_id (a whole number),
# category and turns. Its tables count the eight categories of MT-bench as one (evaluation/speed.py). SPEED-Bench
# (arXiv 2604.09557, nvidia/SPEED-Bench) has question_id (a text), category, sub_category, turns, source, src_id,
# difficulty and multiturn. The categories of its Throughput split are bands of entropy.
SPEC_BENCH, SPEED_BENCH = "Spec-Bench", "SPEED-Bench"
MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
SPEED_BENCH_FIELDS = ("sub_category", "multiturn", "src_id", "difficulty")
ENTROPY_BANDS = frozenset(("low_entropy", "mixed", "high_entropy"))
# In GSM8K, MATH-500 and MBPP. With HumanEval and MT-bench these are the sets spec_al_gsm8k and so on of AIPerf.
OTHER_PROMPTS = ("question", "problem", "text")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its task.

    `later` are the user's further messages, each of which follows the answer to the one before. `request` has the
    further fields of a request, as in `utils.prompts.request_fields`.
    """

    text: str
    task: str = ALL_TASKS
    later: tuple[str, ...] = ()
    request: str = ""


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file. In plain lines \\n and \\t stand for newline and tab. Blank lines are skipped.

    A JSON line has a `prompt`, or `turns`, a list of the user's messages in a conversation. It may name a `task` (or
    `category`), and have `tools`, `response_format` and `chat_template_kwargs`. A line of a request log has `messages`,
    and a `tag` or `metadata.tag` as its task. Lines in the format of Spec-Bench or SPEED-Bench have the tasks of its
    published tables.

    A folder stands for all files of JSON lines in it and in its own folders, such as those of SPEED-Bench.

    Raises UserError if a file cannot be read, a JSON line has no prompt, or there is none.
    """
    prompts = [prompt for file in (_files(path) if path.is_dir() else (path,)) for prompt in _prompts_of(file)]
    if not prompts:
        raise UserError(f"The prompts file {path} holds no prompt: write one per line.")
    return prompts


def _files(folder: Path) -> list[Path]:
    """Sorted by name, with numbers by value: throughput_2k before throughput_16k. Raises UserError without files."""
    found = [file for pattern in ("*.jsonl", "*/*.jsonl") for file in folder.glob(pattern)]
    if not found:
        raise UserError(f"The folder {folder} and its folders have no .jsonl file: name a file of prompts.")
    return sorted(found, key=lambda file: [(part.zfill(9), part) for part in re.split(r"(\d+)", str(file))])


def _prompts_of(path: Path) -> Iterator[Prompt]:
    if path.suffix.lower() == ".parquet":
        raise UserError(PARQUET.format(path))
    # Without the byte order mark, which would hide the brace of a first JSON line.
    lines = read_text(path, "The prompts file").split("\n")
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith("{"):
            with naming(f"{path}, line {number}"):
                prompt = _json_prompt(line, path)
            yield prompt
        elif line.strip():
            yield Prompt(unescape(line.rstrip("\r")))


def _json_prompt(line: str, path: Path) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(NO_PROMPT) from error
    # Logs and batch files have the request below one of these names.
    request = next((entry[name] for name in ("body", "request") if isinstance(entry.get(name), dict)), entry)
    logged = request_of(request) if "messages" in request else None
    texts, fields = logged or (_turns(entry), parse_request(json.dumps(logged_fields(entry))))
    return Prompt(texts[0], task_of(_task(entry | request), benchmark_of(entry), path), tuple(texts[1:]), fields)


def _turns(entry: Mapping[str, object]) -> list[str]:
    found = next((entry[name] for name in ("turns", "prompt", *OTHER_PROMPTS) if name in entry), None)
    # Some copies of MT-bench have a list of turns in "prompt".
    turns = found if isinstance(found, list) else [found] * ("turns" not in entry)
    texts = [turn for turn in turns if isinstance(turn, str) and turn.strip()]
    if not texts or len(texts) < len(turns):
        raise UserError(NO_PROMPT)
    # SPEED-Bench is published without the texts of datasets that may not be copied.
    if any(text.startswith("FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE") for text in texts):
        raise UserError(
            "the text of this prompt is not in the file. prepare_data.py of NVIDIA's specdec_bench fetches the texts "
            "of SPEED-Bench."
        )
    return texts


def _task(entry: Mapping[str, object]) -> str:
    metadata = entry.get("metadata")
    tag = metadata.get("tag") if isinstance(metadata, dict) else None
    names = (entry.get("task"), entry.get("category"), tag, entry.get("tag"))
    words = (" ".join(name.split()) for name in names if isinstance(name, str))
    return next(filter(None, words), ALL_TASKS)


def benchmark_of(entry: Mapping[str, object]) -> str:
    """SPEC_BENCH, SPEED_BENCH, or "" for a line that has the format of neither."""
    if "turns" not in entry or "category" not in entry or "question_id" not in entry:
        return ""
    if isinstance(entry["question_id"], str) or any(field in entry for field in SPEED_BENCH_FIELDS):
        return SPEED_BENCH
    return SPEC_BENCH


def task_of(category: str, benchmark: str, path: Path) -> str:
    """The row of the benchmark's tables for a category.

    `path` is the file. The Throughput split has one file for each input length, which only its name or that of its
    folder (throughput_8k) contains.
    """
    if benchmark == SPEC_BENCH and category in MT_BENCH_CATEGORIES:
        return MT_BENCH
    if benchmark == SPEED_BENCH and category in ENTROPY_BANDS:
        length = re.search(r"throughput_(\d+k)", "/".join(path.absolute().parts[-2:]))
        return f"{length[1]} {category}" if length else category
    return category


def spaced(items: Sequence[Item], count: int) -> tuple[Item, ...]:
    """`count` of the items, evenly spaced, or all of them."""
    if len(items) <= count:
        return tuple(items)
    return tuple(items[(2 * index + 1) * len(items) // (2 * count)] for index in range(count))


def limited(prompts: Sequence[Prompt], count: int) -> list[int]:
    """The indices of at most `count` prompts of each task, evenly spaced within the task, in the order of the file."""
    by_task = defaultdict[str, list[int]](list)
    for index, prompt in enumerate(prompts):
        by_task[prompt.task].append(index)
    return sorted(index for group in by_task.values() for index in spaced(group, count))


def tasks_in_turn(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """The first prompt of each task, then the second of each: the first intervals must not be those of one task."""
    turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    return tuple(sorted(prompts, key=lambda prompt: next(turns[prompt.task])))
