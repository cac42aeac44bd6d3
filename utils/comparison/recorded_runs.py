"""Runs that were recorded with --json: of generations, servers, /race and /verdict, and the matching runs of two files.

Damaged lines are reported and skipped; the others can still be used. Runs match by prompt, strategy and task, which
decides how much work a run is: length, processor, seed and the prompt's form. Other settings, such as gamma, may
differ.
"""

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from utils.comparison.charts import BASELINE, TARGET_ONLY
from utils.comparison.records import GENERATION, SCHEMA, SERVER
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
SERVER_GENERATION, RACE, VERDICT = "server generation", "race", "verdict"  # kinds of runs beside GENERATION
RECOMMENDED = "recommended"  # the strategy that a /verdict measured against the target
DAMAGED = 'the record is damaged: its "{}" {}.'
LEAST_SPEED, MAX_SPEED = 1e-6, 1e9  # a file can be edited: other speeds would give meaningless ratios
COMPARED = {**CIRCUMSTANCES, SERVER: ("url", "model", "kind", "prompt_form")}
TASK = ("length", "processor", "seed", "system", "special")
# These settings select what runs and what is shown, depend on the machine, or must be equal for a match.
NOT_COMPARED = ("speculative", "ngram", "target", "drafter", "debug", "costs", "turns", "chat")
# The runs of the baseline do not depend on these.
DRAFTING = ("gamma", "drafter_kind", "verify", "ngram_storage", "ngram_limit", "top_k_filler", "reset_in_between")
SHOWN_LINES = 8  # line numbers shown in a sentence

Record = Mapping[str, Any]
Method = tuple[str, ...]  # the settings of drafting
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The figures of one record for one strategy and one prompt.

    `record` is its kind. `speeds` are tokens per second of each run, `speedups` are relative to `baseline`. Fields from
    `text` on are None if the record lacks them.
    """

    record: str
    line: int
    prompt: str
    strategy: str
    settings: Record
    circumstances: Mapping[str, Record]
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
    accepted_by_position: tuple[tuple[int, int], ...] | None = None

    @property
    def model(self) -> Any:
        """The model that generated: the target, or a server's model."""
        part, name = (SERVER, "model") if SERVER in self.circumstances else ("models", "target")
        return self.circumstances.get(part, {}).get(name)


@dataclass(slots=True)
class RecordsFile:
    """The runs of a file and why other lines were skipped. `others` counts records of other reports by name."""

    path: Path
    runs: list[RecordedRun] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)


def read_records(path: Path) -> RecordsFile:
    """Read a file. Raises UserError if it cannot be read or holds no run."""
    file = RecordsFile(path)
    # Not splitlines(): records hold raw Unicode, whose other line separators may occur inside a text.
    for number, line in enumerate(read_text(path, "The records file").split("\n"), start=1):
        try:
            if line.strip():
                _add(file, _parsed(line), number)
        except UserError as error:
            file.left_out.append(f"{path}, line {number}: {error}")
    if not file.runs:
        problem = f" {file.left_out[0]}" if file.left_out else ""
        raise UserError(f"{path} holds no run that can be compared. --json FILE records them.{problem}")
    return file


def _add(file: RecordsFile, record: dict[str, Any], line: int) -> None:
    if (kind := record["record"]) not in READERS:
        file.others[kind] += 1
        return
    runs = [_run(row, line) for row in READERS[kind](record)]
    if kind == GENERATION and not runs[0].speeds:
        raise UserError("the run has no speed.")
    file.runs += [run for run in runs if run.speeds]


def _parsed(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError("this is not valid JSON. Use a file that --json has written.") from error
    if not isinstance(record, dict) or not isinstance(record.get("record"), str):
        raise UserError("this is not a record. Use a file that --json has written.")
    if record.get("schema") != SCHEMA:
        raise UserError(f"schema {shown_value(record.get('schema'))} is not supported, only schema {SCHEMA} is.")
    return record


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_count(value: Any) -> bool:
    # Not isinstance: True is an int. The upper bound is that of int64.
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    """Whether the value is a valid rate or speed-up."""
    return type(value) in (int, float) and 0 <= value <= MAX_SPEED  # false for NaN


def _is_list(is_valid: Callable[[Any], bool], values: Any) -> bool:
    return isinstance(values, list) and all(map(is_valid, values))


_are_numbers = partial(_is_list, lambda value: value is None or _is_number(value))
_are_tables = partial(_is_list, _is_table)
_are_pairs = partial(_is_list, lambda pair: _is_list(_is_count, pair) and len(pair) == 2 and pair[0] <= pair[1])


def _is_conversation(messages: Any) -> bool:
    """Whether the messages alternate between user and assistant."""
    if not _is_list(lambda message: _is_table(message) and _is_text(message.get("content")), messages):
        return False
    roles = [message.get("role") for message in messages]
    return roles == ["user", "assistant"] * (len(messages) // 2)


def _field(record: Record, name: str, is_valid: Callable[[Any], bool], *, optional: bool = False) -> Any:
    """A field of a record. Raises UserError if its value is not valid. An optional field may be missing or null."""
    value = record.get(name)
    if is_valid(value) or (optional and value is None):
        return value
    raise UserError(DAMAGED.format(name, "has an invalid value" if name in record else "is missing"))


def _run(row: Record, line: int) -> RecordedRun:
    """The run in a row of a reader. The local models and the engine do not matter for an answer of a server."""
    server = _field(row, SERVER, _is_table, optional=True)
    circumstances = {part: _field(row, part, _is_table, optional=True) or {} for part in CIRCUMSTANCES}
    ids = _field(row, "token_ids", partial(_is_list, _is_count), optional=True)
    positions = _field(row, "accepted_by_position", _are_pairs, optional=True)
    speeds, speedups = (
        tuple(float(value) for value in _field(row, name, _are_numbers) if value and value >= LEAST_SPEED)
        for name in ("tokens_per_second", "speedups")
    )
    return RecordedRun(
        row["record"] if server is None else SERVER_GENERATION,
        line,
        _field(row, "prompt", _is_text),
        _field(row, "strategy", _is_text),
        _field(row, "settings", _is_table),
        circumstances if server is None else circumstances | {"models": {}, "engine": {}, SERVER: server},
        speeds,
        speedups,
        baseline=TARGET_ONLY if server is None else str(row.get("baseline")),
        history=turns_from_messages(_field(row, "history", _is_conversation, optional=True) or ()),
        text=_field(row, "text", _is_text, optional=True),
        tokens=None if ids is None else tuple(ids),
        drafter_kind=_field(row, "drafter_kind", _is_text, optional=True),
        accepted_by_position=None if positions is None else tuple((pair[0], pair[1]) for pair in positions),
        **{name: _field(row, name, _is_count, optional=True) for name in ("prompt_tokens", "accepted", "drafted")},
    )


def _generation(record: Record) -> Iterator[Record]:
    """The run of a strategy or the answer of a server."""
    if _field(record, "finish", _is_text) == FinishReason.INTERRUPTED:
        raise UserError("the run was interrupted.")
    speed, speedup = record.get("tokens_per_second"), record.get("speedup_vs_baseline")
    yield {**record, "tokens_per_second": [speed], "speedups": [speedup]}


def _race(record: Record) -> Iterator[Record]:
    """The repeats of each strategy."""
    if _field(record, "settings", _is_table).get("turns") is True:
        raise UserError("the race ran in a conversation, which its record does not have.")
    for row in _field(record, "findings", _are_tables):
        yield {**record, **{name: row.get(name) for name in ("strategy", "tokens_per_second", "speedups")}}


def _verdict(record: Record) -> Iterator[Record]:
    """The runs of the recommended strategy and of the target alone, on each prompt."""
    *_, last = _field(record, "findings", _are_tables) or [{}]
    gamma, settings = last.get("gamma"), _field(record, "settings", _is_table)
    settings = {**settings, "length": last.get("length"), "gamma": "auto" if gamma is None else gamma}
    shared = {**record, "settings": settings}
    for row in _field(last, "by_prompt", _are_tables):
        yield {**shared, **row, "strategy": RECOMMENDED, "drafter_kind": last.get("drafter_kind")}
        speeds = row.get("target_tokens_per_second")
        yield {**shared, "prompt": row.get("prompt"), "strategy": BASELINE, "tokens_per_second": speeds, "speedups": []}


def shown_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))[:80] or "none"
    return "none" if value is None else str(value)[:80]


# Rows with the fields of a generation, whose speeds and speed-ups are lists.
READERS: dict[str, Callable[[Record], Iterator[Record]]] = {GENERATION: _generation, RACE: _race, VERDICT: _verdict}


class Problem(NamedTuple):
    """Why a run of file A or B has no counterpart."""

    file: str
    line: int
    reason: str


class RunMatch(NamedTuple):
    """Matching runs of the first and the second file. `notes` are further sentences on how they differ."""

    first: Sequence[RecordedRun]
    second: Sequence[RecordedRun]
    notes: Sequence[str] = ()


def match(first: Sequence[RecordedRun], second: Sequence[RecordedRun]) -> tuple[list[RunMatch], list[str]]:
    """The matches in the order of the first file, and a sentence for each group of unmatched runs."""
    left, right = _by_task(first), _by_task(second)
    matches: list[RunMatch] = []
    for task, ours in left.items():
        theirs = right.get(task, {})
        pairs = [(ours.pop(method), theirs.pop(method)) for method in [*ours] if method in theirs]
        if len(ours) == len(theirs) == 1:  # one run left on each side: compare them although they differ
            pairs.append((ours.popitem()[1], theirs.popitem()[1]))
        matches += (RunMatch(one, other) for one, other in pairs)
    problems = [*_unmatched("A", left, "B", second), *_unmatched("B", right, "A", first)]
    return matches, problem_sentences(problems)


def problem_sentences(problems: Iterable[Problem]) -> list[str]:
    """Each reason once, with its line numbers."""
    groups = _grouped(problems, lambda problem: (problem.file, problem.reason))
    lines = {key: [problem.line for problem in group] for key, group in groups.items()}
    return [f"{file}, {_line_numbers(numbers)}: {reason}" for (file, reason), numbers in lines.items()]


def _line_numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN_LINES]))
    more = f" and {len(numbers) - SHOWN_LINES} more" if len(numbers) > SHOWN_LINES else ""
    return f"line{'s' * (len(numbers) > 1)} {shown}{more}"


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by their keys, in their order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _by_task(runs: Sequence[RecordedRun]) -> dict[Any, dict[Method, list[RecordedRun]]]:
    """The runs by prompt, strategy and task, and within each by the settings of drafting."""
    tasks = _grouped(runs, lambda one: (_request(one), one.strategy, _values(one, TASK)))
    return {task: _grouped(group, _method) for task, group in tasks.items()}


def _method(one: RecordedRun) -> Method:
    return _values(one, () if one.strategy == BASELINE else DRAFTING)


def _values(one: RecordedRun, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(repr(one.settings.get(name)) for name in names)


def _request(one: RecordedRun) -> tuple[str, Turns]:
    return one.prompt, one.history


def _unmatched(
    own: str, left: Mapping[Any, Mapping[Method, list[RecordedRun]]], other: str, others: Sequence[RecordedRun]
) -> Iterator[Problem]:
    """Why the runs that are left of one file have no counterpart among `others`, the runs of the other."""
    by_request = _grouped(others, _request)
    for one in (run for methods in left.values() for group in methods.values() for run in group):
        yield Problem(own, one.line, _reason(one, other, by_request.get(_request(one), ())))


def _reason(one: RecordedRun, other: str, same_prompt: Sequence[RecordedRun]) -> str:
    if not same_prompt:
        return f"{other} has no run of this prompt."
    theirs = next((row.settings for row in same_prompt if row.strategy == one.strategy), None)
    if theirs is None:
        return f"{other} has no run of {one.strategy} on this prompt."
    differing = [
        f"{name} {shown_value(theirs[name])} instead of {shown_value(one.settings[name])}"
        for name in (*TASK, *DRAFTING)
        if name in theirs and name in one.settings and theirs[name] != one.settings[name]
    ]
    return f"{other} has this prompt only with other settings ({', '.join(differing) or 'several'})."


def differences(matches: Sequence[RunMatch]) -> list[str]:
    """Each difference in versions, models, engine, machine and settings once, with its number of matches."""
    counts: Counter[str] = Counter()
    for found in matches:
        counts.update(list(dict.fromkeys((*found.notes, *_differences(found.first[0], found.second[0])))))
    return [
        sentence.removesuffix(".") + ("." if count == len(matches) else f" ({count} of {len(matches)} comparisons).")
        for sentence, count in counts.items()
    ]


def _differences(one: RecordedRun, other: RecordedRun) -> Iterator[str]:
    for part, names in COMPARED.items():
        ours, theirs = one.circumstances.get(part, {}), other.circumstances.get(part, {})
        yield from _changed(f"{part}, ", ours, theirs, names)
        missing = [name for name, values in (("A", ours), ("B", theirs)) if not values]
        if len(missing) == 1:
            yield f"{part}: not recorded in {missing[0]}"
    if one.drafter_kind != other.drafter_kind and None not in (one.drafter_kind, other.drafter_kind):
        yield f"{one.strategy}, drafter kind: {one.drafter_kind} in A, {other.drafter_kind} in B"
    counts = one.prompt_tokens, other.prompt_tokens
    if one.model == other.model and counts[0] != counts[1] and None not in counts:
        yield "the prompt has a different number of tokens: the chat template or the tokenizer differs"
    ignored = (*NOT_COMPARED, *(DRAFTING if one.strategy == BASELINE else ()))
    yield from _changed(
        "setting ", one.settings, other.settings, [name for name in one.settings if name not in ignored]
    )


def _changed(what: str, ours: Record, theirs: Record, names: Iterable[str]) -> Iterator[str]:
    """The values with these names that both have and that differ."""
    for name in names:
        if name in ours and name in theirs:
            left, right = (None if row[name] == "none" else row[name] for row in (ours, theirs))
            if left != right:
                yield f"{what}{name}: {shown_value(left)} in A, {shown_value(right)} in B"
