"""Runs that were recorded: a file of --json read back, and what its circumstances were that are not the ones of now.

A file that is damaged anywhere is refused as a whole, by the line. Whether a run can be had again is left to whoever runs it.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from utils.comparison.records import SCHEMA
from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.prompts.conversation import Turns, turns_of

# What makes a difference to a run; memory does not.
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
}
TEXTS, COUNTS = ("prompt", "strategy", "finish"), ("drafted", "accepted", "rounds")
NUMBERS = ("tokens_per_second", "tokens_per_target_forward")


@dataclass(frozen=True, slots=True)
class PastRun:
    """A record of a generation, and the line of the file it stands in. What it need not have is None."""

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
    history: Turns
    settings: Mapping[str, Any]
    circumstances: Mapping[str, Mapping[str, Any]]

    def differences(self, now: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
        """A sentence for each circumstance that was another."""
        for part, names in CIRCUMSTANCES.items():
            if not self.circumstances[part]:
                yield f"{part}: not recorded"
            for name in names:
                then = self.circumstances[part].get(name, now[part][name])
                if then != now[part][name]:
                    yield f"{part}, {name}: {_told(then)} then, {_told(now[part][name])} now"


def _told(value: Any) -> str:
    return "none" if value is None else str(value)[:80]


def read_past_runs(path: Path) -> tuple[list[PastRun], Counter[str]]:
    """The generations of a file, and how many records of what else it holds. Raises UserError for a file that is no such thing."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"The records file {path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}."
        ) from error
    runs: list[PastRun] = []
    others: Counter[str] = Counter()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            record = _record(line, f"{path}, line {number}")
            if record["record"] == "generation":
                runs.append(_run(record, number, f"{path}, line {number}"))
            else:
                others[record["record"]] += 1
    if not runs:
        raise UserError(f"{path} holds no record of a generation: --json FILE writes one for each.")
    return runs, others


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: this is no JSON; give a file that --json has written.") from error
    if not isinstance(record, dict) or not isinstance(record.get("record"), str):
        raise UserError(f"{where}: this is no record; give a file that --json has written.")
    if record.get("schema") != SCHEMA:
        raise UserError(
            f"{where}: its schema is {_told(record.get('schema'))}, and schema {SCHEMA} is the only one that can be read."
        )
    return record


def _run(record: dict[str, Any], line: int, where: str) -> PastRun:
    """A record as a run. Raises UserError for a field that is missing or is not what it should be."""
    checks = {
        **{name: isinstance(record.get(name), str) for name in TEXTS},
        **{name: record.get(name) is None or _is_count(record[name]) for name in COUNTS},
        **{name: record.get(name) is None or _is_number(record[name]) for name in NUMBERS},
        **{name: isinstance(record.get(name, {}), dict) for name in CIRCUMSTANCES},
        "text": record.get("text") is None or isinstance(record["text"], str),
        "token_ids": isinstance(record.get("token_ids"), list) and all(map(_is_count, record["token_ids"])),
        "prompt_tokens": _is_count(record.get("prompt_tokens")),
        "settings": isinstance(record.get("settings"), dict),
        "history": _is_conversation(record.get("history") or []),
    }
    for name, good in checks.items():
        if not good:
            raise UserError(
                f'{where}: the record is damaged: its "{name}" is {"not what it should be" if name in record else "missing"}.'
            )
    return PastRun(
        line=line,
        prompt=record["prompt"],
        strategy=record["strategy"],
        drafter_kind=record.get("drafter_kind"),
        text=record.get("text"),
        tokens=record["token_ids"],
        prompt_tokens=record["prompt_tokens"],
        interrupted=record["finish"] == FinishReason.INTERRUPTED,
        **{name: record.get(name) for name in (*COUNTS, *NUMBERS)},
        history=turns_of(record.get("history") or ()),
        settings=record["settings"],
        circumstances={part: record.get(part, {}) for part in CIRCUMSTANCES},
    )


def _is_conversation(messages: Any) -> bool:
    """Whether user and assistant take turns in these."""
    if (
        not isinstance(messages, list)
        or len(messages) % 2
        or not all(isinstance(message, dict) for message in messages)
    ):
        return False
    roles = [message.get("role") for message in messages]
    return roles == ["user", "assistant"] * (len(messages) // 2) and all(
        isinstance(message.get("content"), str) for message in messages
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return _is_count(value) or (type(value) is float and isfinite(value) and value >= 0)
