"""Measured speeds in a --json file: of generations, and of the repeats of /race. /compare matches those of two files.

Damaged lines are named and left out; the others can still be compared.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.comparison.recorded_runs import (
    CIRCUMSTANCES,
    GENERATION,
    RecordedRun,
    is_number,
    numbered_records,
    recorded_run,
)
from utils.errors import UserError
from utils.prompts.conversation import Turns

RACE = "race"
LEAST_SPEED = 1e-6  # a file can be edited: a speed near 0 would give a ratio without meaning


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one record says about one strategy on one prompt.

    speeds: tokens per second of each run. speedups: over target-only. The fields from `text` on are None where the
    record has no such thing.
    """

    line: int
    prompt: str
    strategy: str
    settings: Mapping[str, Any]
    circumstances: Mapping[str, Mapping[str, Any]]
    speeds: tuple[float, ...]
    speedups: tuple[float, ...]
    history: Turns = ()
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    accepted: int | None = None
    drafted: int | None = None
    drafter_kind: str | None = None


@dataclass(slots=True)
class MeasurementFile:
    """The measurements of a file, and why other lines were left out. others: records of other reports, by name."""

    path: Path
    measurements: list[Measurement] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)


def read_measurements(path: Path) -> MeasurementFile:
    """Raises UserError for a file that cannot be read or that holds no measurement."""
    file = MeasurementFile(path)
    for line, record in numbered_records(path):
        if isinstance(record, UserError):
            file.left_out.append(str(record))
        elif record["record"] not in (GENERATION, RACE):
            file.others[record["record"]] += 1
        else:
            try:
                file.measurements += _measurements(record, line)
            except UserError as error:
                file.left_out.append(f"{path}, line {line}: {error}")
    if not file.measurements:
        problem = f" {file.left_out[0]}" if file.left_out else ""
        raise UserError(f"{path} holds no run that can be compared. --json FILE records them.{problem}")
    return file


def _measurements(record: dict[str, Any], line: int) -> list[Measurement]:
    """Raises UserError for a record that cannot be compared."""
    return list(_race(record, line)) if record["record"] == RACE else [_generation(recorded_run(record, line))]


def _generation(run: RecordedRun) -> Measurement:
    if run.interrupted:
        raise UserError("the run was interrupted.")
    if run.tokens_per_second is None or run.tokens_per_second < LEAST_SPEED:
        raise UserError("the run has no speed.")
    return Measurement(
        run.line,
        run.prompt,
        run.strategy,
        run.settings,
        run.circumstances,
        speeds=(run.tokens_per_second,),
        speedups=() if not run.speedup_vs_target else (run.speedup_vs_target,),
        history=run.history,
        text=run.text,
        tokens=tuple(run.tokens),
        prompt_tokens=run.prompt_tokens,
        accepted=run.accepted,
        drafted=run.drafted,
        drafter_kind=None if run.drafter_kind is None else str(run.drafter_kind),
    )


def _race(record: dict[str, Any], line: int) -> Iterator[Measurement]:
    """The repeats of each strategy."""
    if isinstance(record.get("settings"), dict) and record["settings"].get("turns") is True:
        raise UserError("the race ran in a conversation, which its record does not have.")
    findings = record.get("findings")
    if not isinstance(findings, list) or not all(map(_is_finding, findings)):
        raise UserError('the record is damaged: its "findings" has an invalid value.')
    parts = {part: record.get(part, {}) for part in CIRCUMSTANCES}
    checked = {"prompt": (str, record.get("prompt")), "settings": (dict, record.get("settings"))}
    checked |= {part: (dict, value) for part, value in parts.items()}
    for name, (kind, value) in checked.items():
        if not isinstance(value, kind):
            raise UserError(f'the record is damaged: its "{name}" has an invalid value.')
    for row in findings:
        speeds, speedups = _positive(row["tokens_per_second"]), _positive(row["speedups"])
        if speeds:
            yield Measurement(line, record["prompt"], row["strategy"], record["settings"], parts, speeds, speedups)


def _is_finding(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and isinstance(row.get("strategy"), str)
        and all(
            isinstance(row.get(name), list) and all(map(is_number, row[name]))
            for name in ("tokens_per_second", "speedups")
        )
    )


def _positive(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values if value >= LEAST_SPEED)
