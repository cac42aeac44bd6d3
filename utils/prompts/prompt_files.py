"""Files of prompts: one prompt per line, or JSON lines with a `prompt` or `turns` and optionally a `task`.

Nothing heavy is imported.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from utils.errors import UserError
from utils.files import read_text
from utils.prompts.benchmarks import PLACEHOLDER, benchmark_of, task_of
from utils.text import unescape

ALL_TASKS = "all"  # the task of a prompt that names none
NO_PROMPT = '{}: a JSON line needs a "prompt" or "turns", for example {{"prompt": "Hello"}}.'
BAD_PROMPT = '{}: "prompt" must be a text that is not blank.'
BAD_TURNS = '{}: "turns" must be a list of texts that are not blank, for example {{"turns": ["Hello", "And then?"]}}.'
NOT_FETCHED = (
    "{}: the text of this prompt is not in the file. prepare_data.py of NVIDIA's specdec_bench fetches the "
    "texts of SPEED-Bench."
)
PARQUET = (
    "The prompts file {0} is a Parquet file. Convert it to JSON lines: python -c \"import pandas; pandas.read_parquet('"
    "{1}').to_json('{2}', orient='records', lines=True)\""
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and the task that it is an example of.

    later: the user's further messages, each of which follows the answer to the one before. benchmark: the published
    benchmark in whose format it was, or "".
    """

    text: str
    task: str = ALL_TASKS
    later: tuple[str, ...] = ()
    benchmark: str = ""


def read_prompts(path: Path) -> Iterator[Prompt]:
    """The prompts of a file. In plain lines \\n and \\t stand for newline and tab. Blank lines are skipped.

    A JSON line has a `prompt`, or `turns`, a list of the user's messages in a conversation. It may name a `task` (or
    `category`). Lines in the format of a benchmark in `utils.prompts.benchmarks` have the tasks of its tables.

    A folder stands for all files of JSON lines in it and in its own folders, such as those of SPEED-Bench.

    Raises UserError if a file cannot be read or a JSON line has no prompt.
    """
    for file in _files(path) if path.is_dir() else (path,):
        yield from _prompts_of(file)


def _files(folder: Path) -> list[Path]:
    """By name, numbers by their value: throughput_2k before throughput_16k. Raises UserError if there are none."""
    found = [file for pattern in ("*.jsonl", "*/*.jsonl") for file in folder.glob(pattern)]
    if not found:
        raise UserError(f"The folder {folder} and its folders have no .jsonl file: name a file of prompts.")
    return sorted(found, key=lambda file: [(part.zfill(9), part) for part in re.split(r"(\d+)", str(file))])


def _prompts_of(path: Path) -> Iterator[Prompt]:
    if path.suffix.lower() == ".parquet":
        raise UserError(PARQUET.format(path, path.name, path.with_suffix(".jsonl").name))
    # Without the byte order mark, which would hide the brace of a first JSON line.
    lines = read_text(path, "The prompts file").split("\n")
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith("{"):
            yield _json_prompt(line, f"{path}, line {number}", path)
        elif line.strip():
            yield Prompt(unescape(line.rstrip("\r")))


def _json_prompt(line: str, where: str, path: Path) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(NO_PROMPT.format(where)) from error
    first, *later = _turns(entry, where)
    benchmark = benchmark_of(entry)
    return Prompt(first, task_of(_task(entry), benchmark, path), tuple(later), benchmark)


def _turns(entry: Mapping[str, object], where: str) -> list[str]:
    """The user's messages, at least one."""
    if "turns" not in entry and "prompt" not in entry:
        raise UserError(NO_PROMPT.format(where))
    name = "turns" if "turns" in entry else "prompt"
    found = entry[name]
    # Some copies of MT-bench have a list of turns in "prompt".
    turns = found if isinstance(found, list) else [] if name == "turns" else [found]
    texts = [turn for turn in turns if isinstance(turn, str) and turn.strip()]
    if not texts or len(texts) < len(turns):
        raise UserError((BAD_TURNS if name == "turns" else BAD_PROMPT).format(where))
    if any(text.startswith(PLACEHOLDER) for text in texts):
        raise UserError(NOT_FETCHED.format(where))
    return texts


def _task(entry: Mapping[str, object]) -> str:
    names = (entry.get("task"), entry.get("category"))
    words = (" ".join(name.split()) for name in names if isinstance(name, str))
    return next(filter(None, words), ALL_TASKS)
