"""Reads generations that were recorded with --json, and reports how their circumstances differ from the present ones.

A damaged file is refused as a whole, with the number of the damaged line. /replay runs the generations again.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.comparison.records import SCHEMA
from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.files import read_text
from utils.prompts.conversation import Turns, turns_from_messages

# The circumstances that can change a run. Memory use, for example, cannot.
CIRCUMSTANCES = {
    "versions": ("program", "python", "torch", "transformers", "numpy"),
    "models": (
        "target",
        "drafter",
        "dtype",
        "device",
        "quantize",
        "drafter_dtype",
        "drafter_device",
        "drafter_quantize",
    ),
    "engine": ("kind", "weights", "threads"),
    "machine": ("cpu", "cores", "gpus", "system"),
}
# The fields of a record, grouped by type.
TEXTS, COUNTS = ("prompt", "strategy", "finish"), ("drafted", "accepted", "rounds")
MAX_RATE = 1e9
NUMBERS = ("tokens_per_second", "tokens_per_target_forward", "speedup_vs_target")
GENERATION = "generation"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The record of a generation and its line number. Optional fields that are absent are None."""

    line: int
    prompt: str
    strategy: str
    drafter_kind: Any
    text: str | None
    tokens: list[int]
    prompt_tokens: int
    interrupted: bool
    drafted: int | None
    accepted: int | None
    rounds: int | None
    tokens_per_second: float | None
    tokens_per_target_forward: float | None
    speedup_vs_target: float | None
    history: Turns
    settings: Mapping[str, Any]
    circumstances: Mapping[str, Mapping[str, Any]]

    def differences(self, now: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
        """A sentence for each circumstance that differs from now."""
        for part, names in CIRCUMSTANCES.items():
            if not self.circumstances[part]:
                yield f"{part}: not recorded"
            for name in names:
                # A field that the record lacks is not reported as a difference.
                then = self.circumstances[part].get(name, now[part][name])
                if then != now[part][name]:
                    yield f"{part}, {name}: {shown_value(then)} then, {shown_value(now[part][name])} now"


def shown_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))[:80] or "none"
    return "none" if value is None else str(value)[:80]


def read_recorded_runs(path: Path) -> tuple[list[RecordedRun], Counter[str]]:
    """The generations of a file, and the number of its other records by kind.

    Raises UserError for a file that cannot be read, is damaged, or holds no generation.
    """
    runs: list[RecordedRun] = []
    others: Counter[str] = Counter()
    for number, record in numbered_records(path):
        if isinstance(record, UserError):
            raise record
        if record["record"] == GENERATION:
            runs.append(recorded_run(record, number))
        else:
            others[record["record"]] += 1
    if not runs:
        raise UserError(f"{path} holds no record of a generation. --json FILE writes one for each.")
    return runs, others


def numbered_records(path: Path) -> Iterator[tuple[int, dict[str, Any] | UserError]]:
    """Each record with its line number. A damaged line yields an error instead of a record.

    Records of generations have been checked. Raises UserError for a file that cannot be read.
    """
    # Not splitlines(): records hold raw Unicode, whose other line separators may occur inside a text.
    lines = read_text(path, "The records file").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = _parsed(line, where)
            if record["record"] == GENERATION:
                check_generation(record, where)
        except UserError as error:
            yield number, error
        else:
            yield number, record


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: this is not valid JSON. Use a file that --json has written.") from error
    if not isinstance(record, dict) or not isinstance(record.get("record"), str):
        raise UserError(f"{where}: this is not a record. Use a file that --json has written.")
    if record.get("schema") != SCHEMA:
        raise UserError(
            f"{where}: schema {shown_value(record.get('schema'))} is not supported, only schema {SCHEMA} is."
        )
    return record


def check_generation(record: dict[str, Any], where: str) -> None:
    """Raises UserError for a field of a generation that is missing or has the wrong type."""
    for name, is_valid in _checks(record).items():
        if not is_valid:
            problem = "has an invalid value" if name in record else "is missing"
            raise UserError(f'{where}: the record is damaged: its "{name}" {problem}.')


def recorded_run(record: dict[str, Any], line: int) -> RecordedRun:
    """The checked record of a generation."""
    return RecordedRun(
        line=line,
        prompt=record["prompt"],
        strategy=record["strategy"],
        drafter_kind=record.get("drafter_kind"),
        text=record.get("text"),
        tokens=record["token_ids"],
        prompt_tokens=record["prompt_tokens"],
        interrupted=record["finish"] == FinishReason.INTERRUPTED,
        **{name: record.get(name) for name in (*COUNTS, *NUMBERS)},
        history=turns_from_messages(record.get("history") or ()),
        settings=record["settings"],
        circumstances={part: record.get(part, {}) for part in CIRCUMSTANCES},
    )


def _checks(record: dict[str, Any]) -> dict[str, bool]:
    """Whether each required field has a valid type."""
    return {
        **{name: isinstance(record.get(name), str) for name in TEXTS},
        **{name: record.get(name) is None or is_count(record[name]) for name in COUNTS},
        **{name: record.get(name) is None or is_number(record[name]) for name in NUMBERS},
        **{name: isinstance(record.get(name, {}), dict) for name in CIRCUMSTANCES},
        "text": record.get("text") is None or isinstance(record["text"], str),
        "token_ids": isinstance(record.get("token_ids"), list) and all(map(is_count, record["token_ids"])),
        "prompt_tokens": is_count(record.get("prompt_tokens")),
        "settings": isinstance(record.get("settings"), dict),
        "history": _is_conversation(record.get("history") or []),
    }


def _is_conversation(messages: Any) -> bool:
    """Whether the messages alternate between user and assistant."""
    if not isinstance(messages, list) or len(messages) % 2:
        return False
    if not all(isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages):
        return False
    return [message.get("role") for message in messages] == ["user", "assistant"] * (len(messages) // 2)


def is_count(value: Any) -> bool:
    # Not isinstance: True is an int. The upper bound is that of int64.
    return type(value) is int and 0 <= value < 2**63


def is_number(value: Any) -> bool:
    """Whether the value is a valid rate."""
    return type(value) in (int, float) and 0 <= value <= MAX_RATE  # false for NaN
