"""Files of prompts: one prompt per line, or JSON lines with a `prompt` and optionally a `task`.

Nothing heavy is imported.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from utils.errors import UserError
from utils.files import read_text
from utils.text import unescape

ALL_TASKS = "all"  # the task of a prompt that names none


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and the task that it is an example of."""

    text: str
    task: str = ALL_TASKS


def read_prompts(path: Path) -> Iterator[Prompt]:
    """The prompts of a file. In plain lines \\n and \\t stand for newline and tab. Blank lines are skipped.

    A JSON line may name a `task` (or `category`). Raises UserError if the file cannot be read or a JSON line has no
    prompt.
    """
    # Without the byte order mark, which would hide the brace of a first JSON line.
    lines = read_text(path, "The prompts file").split("\n")
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith("{"):
            yield _json_prompt(line, f"{path}, line {number}")
        elif line.strip():
            yield Prompt(unescape(line.rstrip("\r")))


def _json_prompt(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
        text = entry["prompt"]
    except (ValueError, KeyError, RecursionError) as error:
        raise UserError(f'{where}: a JSON line needs a "prompt", for example {{"prompt": "Hello"}}.') from error
    if not isinstance(text, str) or not text.strip():
        raise UserError(f'{where}: "prompt" must be a text that is not blank.')
    return Prompt(text, _task(entry))


def _task(entry: Mapping[str, object]) -> str:
    names = (entry.get("task"), entry.get("category"))
    words = (" ".join(name.split()) for name in names if isinstance(name, str))
    return next(filter(None, words), ALL_TASKS)
