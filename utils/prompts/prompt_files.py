"""Files of prompts: JSON lines with a `prompt` and perhaps a `task`, or plain lines.

Nothing heavy is imported here, and nothing is known of what becomes of a prompt.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.text import unescaped

EVERY = "all"  # the task of a prompt that names none


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it is sent, and the task it is an example of."""

    text: str
    task: str = EVERY


def read_prompts(path: Path) -> Iterator[Prompt]:
    """The prompts of a file: JSON lines with a `prompt`, or plain lines, in which \\n and \\t stand for newline and tab.

    A JSON line may name a `task` (or `category`). Blank lines are passed over. Raises UserError for an unreadable file or a JSON line
    without a prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"The prompts file {path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}."
        ) from error
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith("{"):
            yield _json_prompt(line, f"{path}, line {number}")
        elif line.strip():
            yield Prompt(unescaped(line.rstrip("\r")))


def _json_prompt(line: str, where: str) -> Prompt:
    try:
        told = json.loads(line)
        text = told["prompt"]
    except (ValueError, KeyError, RecursionError) as error:
        raise UserError(f'{where}: a JSON line needs a "prompt", for example {{"prompt": "Hello"}}.') from error
    if not isinstance(text, str) or not text.strip():
        raise UserError(f'{where}: "prompt" must be a text that is not blank.')
    return Prompt(text, _task(told))


def _task(told: dict[str, Any]) -> str:
    words = (" ".join(value.split()) for name in ("task", "category") if isinstance(value := told.get(name), str))
    return next(filter(None, words), EVERY)
