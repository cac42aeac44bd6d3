"""Measured speeds in a --json file: of generations, servers, /race and /verdict. /compare matches two files.

Damaged lines are reported and skipped; the others can still be compared.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from utils.comparison.charts import BASELINE, TARGET_ONLY
from utils.comparison.recorded_runs import (
    CIRCUMSTANCES,
    GENERATION,
    RecordedRun,
    check_generation,
    is_count,
    is_number,
    numbered_records,
    recorded_run,
)
from utils.comparison.server_records import SERVER, SERVER_GENERATION
from utils.errors import UserError
from utils.prompts.conversation import Turns

RACE, VERDICT = "race", "verdict"
RECOMMENDED = "recommended"  # the strategy that a /verdict measured against the target
DAMAGED = 'the record is damaged: its "{}" has an invalid value.'
LEAST_SPEED = 1e-6  # a file can be edited: a speed near 0 would give a meaningless ratio


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one record for one strategy and one prompt.

    `speeds` are tokens per second of each run, `speedups` are relative to `baseline`. Fields from `text` on are None if
    the record lacks them.
    """

    line: int
    prompt: str
    strategy: str
    settings: Mapping[str, Any]
    circumstances: Mapping[str, Mapping[str, Any]]
    speeds: tuple[float, ...]
    speedups: tuple[float, ...]
    baseline: str = TARGET_ONLY
    history: Turns = ()
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    accepted: int | None = None
    drafted: int | None = None
    drafter_kind: str | None = None

    @property
    def model(self) -> Any:
        """The model that generated: the target, or a server's model."""
        part, name = (SERVER, "model") if SERVER in self.circumstances else ("models", "target")
        return self.circumstances.get(part, {}).get(name)


@dataclass(slots=True)
class MeasurementFile:
    """The measurements of a file and why other lines were skipped. `others` counts records of other reports by name."""

    path: Path
    measurements: list[Measurement] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)


def read_measurements(path: Path) -> MeasurementFile:
    """Read a file. Raises UserError if it cannot be read or has no measurement."""
    file = MeasurementFile(path)
    for line, record in numbered_records(path):
        if isinstance(record, UserError):
            file.left_out.append(str(record))
        elif record["record"] not in READERS:
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
    return list(READERS[record["record"]](record, line))


def _generation(record: dict[str, Any], line: int) -> Iterator[Measurement]:
    yield _of_run(recorded_run(record, line))


def _of_run(run: RecordedRun) -> Measurement:
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


def _server_generation(record: dict[str, Any], line: int) -> Iterator[Measurement]:
    """An answer of a server, for which the local models and engine do not matter."""
    server, ids, count = record.get("server"), record.get("token_ids"), record.get("prompt_tokens")
    if not isinstance(server, dict):
        raise UserError(DAMAGED.format("server"))
    as_own = {
        "token_ids": [] if ids is None else ids,
        "prompt_tokens": 0 if count is None else count,
        "speedup_vs_target": record.get("speedup_vs_baseline"),
        "models": {},
        "engine": {},
    }
    check_generation(record | as_own, f"line {line}")
    one = _of_run(recorded_run(record | as_own, line))
    yield replace(
        one,
        circumstances={**one.circumstances, SERVER: server},
        baseline=str(record.get("baseline")),
        tokens=None if ids is None else one.tokens,
        prompt_tokens=count,
    )


def _race(record: dict[str, Any], line: int) -> Iterator[Measurement]:
    """The repeats of each strategy."""
    if isinstance(record.get("settings"), dict) and record["settings"].get("turns") is True:
        raise UserError("the race ran in a conversation, which its record does not have.")
    settings, circumstances = _conditions(record, ("prompt",))
    for row in _rows(record.get("findings"), ("tokens_per_second", "speedups")):
        speeds, speedups = _positive(row["tokens_per_second"]), _positive(row["speedups"])
        if speeds:
            yield Measurement(
                line, record["prompt"], str(row.get("strategy")), settings, circumstances, speeds, speedups
            )


def _verdict(record: dict[str, Any], line: int) -> Iterator[Measurement]:
    """The runs of the recommended strategy and of the target alone, on each prompt."""
    settings, circumstances = _conditions(record, ())
    findings = record.get("findings")
    last = findings[-1] if isinstance(findings, list) and findings else None
    if not isinstance(last, dict):
        raise UserError(DAMAGED.format("findings"))
    length, gamma = last.get("length"), last.get("gamma")
    settings = {**settings, "length": length, "gamma": "auto" if gamma is None else gamma}
    for row in _rows(last.get("by_prompt"), ("tokens_per_second", "target_tokens_per_second", "speedups")):
        prompt, speedups = str(row.get("prompt")), _positive(row["speedups"])
        ours, target = _positive(row["tokens_per_second"]), _positive(row["target_tokens_per_second"])
        if ours and target:
            counts: dict[str, Any] = {
                name: row[name] if is_count(row.get(name)) else None for name in ("accepted", "drafted")
            }
            kind = str(last.get("drafter_kind"))
            yield Measurement(
                line, prompt, RECOMMENDED, settings, circumstances, ours, speedups, drafter_kind=kind, **counts
            )
            yield Measurement(line, prompt, BASELINE, settings, circumstances, target, ())


def _conditions(record: dict[str, Any], texts: Sequence[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The settings and circumstances of a report. The fields in `texts` must be strings."""
    parts = {part: record.get(part, {}) for part in CIRCUMSTANCES}
    wanted = {**dict.fromkeys(texts, str), "settings": dict, **dict.fromkeys(parts, dict)}
    for name, kind in wanted.items():
        if not isinstance(record.get(name, parts.get(name)), kind):
            raise UserError(DAMAGED.format(name))
    return record["settings"], parts


def _rows(rows: Any, lists: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a report. The fields in `lists` must be lists of numbers."""
    if not isinstance(rows, list) or not all(_is_row(row, lists) for row in rows):
        raise UserError(DAMAGED.format("findings"))
    return rows


def _is_row(row: Any, lists: Sequence[str]) -> bool:
    values = [row.get(name) for name in lists] if isinstance(row, dict) else [None]
    return all(isinstance(value, list) and all(part is None or is_number(part) for part in value) for value in values)


def _positive(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(float(value) for value in values if value is not None and value >= LEAST_SPEED)


READERS: dict[str, Callable[[dict[str, Any], int], Iterator[Measurement]]] = {
    GENERATION: _generation,
    SERVER_GENERATION: _server_generation,
    RACE: _race,
    VERDICT: _verdict,
}
