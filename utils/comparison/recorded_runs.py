"""Runs that were recorded with --json: of generations, servers, /race and /verdict, and the matching runs of two files.

/replay runs generations again. Damaged lines are reported and skipped; the others can still be used. Runs match by
prompt, strategy and task, which decides how much work a run is: length, processor, seed and the prompt's form. Other
settings, such as gamma, may differ; /compare reports these differences, and each run without a counterpart.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

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
# The fields of a record, grouped by type.
TEXTS, COUNTS = ("prompt", "strategy", "finish"), ("drafted", "accepted", "rounds")
MAX_RATE = 1e9
NUMBERS = ("tokens_per_second", "tokens_per_target_forward", "speedup_vs_baseline")
SERVER_GENERATION, RACE, VERDICT = "server generation", "race", "verdict"  # kinds of runs beside GENERATION
RECOMMENDED = "recommended"  # the strategy that a /verdict measured against the target
DAMAGED = 'the record is damaged: its "{}" has an invalid value.'
LEAST_SPEED = 1e-6  # a file can be edited: a speed near 0 would give a meaningless ratio
COMPARED = {**CIRCUMSTANCES, SERVER: ("url", "model", "kind", "prompt_form")}
TASK = ("length", "processor", "seed", "system", "special")
# These settings select what runs and what is shown, depend on the machine, or must be equal for a match.
NOT_COMPARED = ("speculative", "ngram", "target", "drafter", "debug", "costs", "turns", "chat")
# The runs of the baseline do not depend on these.
DRAFTING = ("gamma", "drafter_kind", "verify", "ngram_storage", "ngram_limit", "top_k_filler", "reset_in_between")
SHOWN_LINES = 8  # line numbers shown in a sentence


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
    if reader := READERS.get(record["record"]):
        file.runs += list(reader(record, line))
    else:
        file.others[record["record"]] += 1


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


def _generation(record: dict[str, Any], line: int) -> Iterator[RecordedRun]:
    """A run of a strategy, or an answer of a server, for which the local models and engine do not matter."""
    _check_generation(record)
    if record["finish"] == FinishReason.INTERRUPTED:
        raise UserError("the run was interrupted.")
    speed, speedup, kind = (record.get(name) for name in ("tokens_per_second", "speedup_vs_baseline", "drafter_kind"))
    if speed is None or speed < LEAST_SPEED:
        raise UserError("the run has no speed.")
    server, ids = record.get(SERVER), record["token_ids"]
    circumstances = {part: record.get(part, {}) for part in CIRCUMSTANCES}
    if server is not None:
        circumstances |= {"models": {}, "engine": {}, SERVER: server}
    yield RecordedRun(
        GENERATION if server is None else SERVER_GENERATION,
        line,
        record["prompt"],
        record["strategy"],
        record["settings"],
        circumstances,
        speeds=(speed,),
        speedups=(speedup,) if speedup else (),
        baseline=TARGET_ONLY if server is None else str(record.get("baseline")),
        history=turns_from_messages(record.get("history") or ()),
        text=record.get("text"),
        tokens=None if ids is None else tuple(ids),
        prompt_tokens=record["prompt_tokens"],
        accepted=record.get("accepted"),
        drafted=record.get("drafted"),
        drafter_kind=None if kind is None else str(kind),
    )


def _check_generation(record: dict[str, Any]) -> None:
    """Raises UserError for a field of a generation that is missing or has the wrong type."""
    for name, is_valid in _checks(record).items():
        if not is_valid:
            problem = "has an invalid value" if name in record else "is missing"
            raise UserError(f'the record is damaged: its "{name}" {problem}.')


def _checks(record: dict[str, Any]) -> dict[str, bool]:
    """Whether each required field has a valid type. A server may report neither ids nor its number of tokens."""
    server, ids, count = (record.get(name) for name in (SERVER, "token_ids", "prompt_tokens"))
    return {
        **{name: isinstance(record.get(name), str) for name in TEXTS},
        **{name: record.get(name) is None or _is_count(record[name]) for name in COUNTS},
        **{name: record.get(name) is None or _is_number(record[name]) for name in NUMBERS},
        **{name: isinstance(record.get(name, {}), dict) for name in CIRCUMSTANCES},
        "text": record.get("text") is None or isinstance(record["text"], str),
        SERVER: server is None or isinstance(server, dict),
        "token_ids": (isinstance(ids, list) and all(map(_is_count, ids))) or (ids is None and server is not None),
        "prompt_tokens": _is_count(count) or (count is None and server is not None),
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


def _race(record: dict[str, Any], line: int) -> Iterator[RecordedRun]:
    """The repeats of each strategy."""
    if isinstance(record.get("settings"), dict) and record["settings"].get("turns") is True:
        raise UserError("the race ran in a conversation, which its record does not have.")
    settings, circumstances = _conditions(record, ("prompt",))
    for row in _rows(record.get("findings"), ("tokens_per_second", "speedups")):
        speeds, speedups = _positive(row["tokens_per_second"]), _positive(row["speedups"])
        if speeds:
            yield RecordedRun(
                RACE, line, record["prompt"], str(row.get("strategy")), settings, circumstances, speeds, speedups
            )


def _verdict(record: dict[str, Any], line: int) -> Iterator[RecordedRun]:
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
                name: row[name] if _is_count(row.get(name)) else None for name in ("accepted", "drafted")
            }
            kind = str(last.get("drafter_kind"))
            yield RecordedRun(
                VERDICT, line, prompt, RECOMMENDED, settings, circumstances, ours, speedups, drafter_kind=kind, **counts
            )
            yield RecordedRun(VERDICT, line, prompt, BASELINE, settings, circumstances, target, ())


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
    return all(isinstance(value, list) and all(part is None or _is_number(part) for part in value) for value in values)


def _positive(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(float(value) for value in values if value is not None and value >= LEAST_SPEED)


def shown_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))[:80] or "none"
    return "none" if value is None else str(value)[:80]


def _is_count(value: Any) -> bool:
    # Not isinstance: True is an int. The upper bound is that of int64.
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    """Whether the value is a valid rate."""
    return type(value) in (int, float) and 0 <= value <= MAX_RATE  # false for NaN


READERS: dict[str, Callable[[dict[str, Any], int], Iterator[RecordedRun]]] = {
    GENERATION: _generation,
    RACE: _race,
    VERDICT: _verdict,
}


class Problem(NamedTuple):
    """Why a run of file A or B has no counterpart."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class RunMatch:
    """Matching runs of the first and the second file. `notes` are further sentences on how they differ."""

    first: tuple[RecordedRun, ...]
    second: tuple[RecordedRun, ...]
    notes: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        return self.first[0].prompt

    @property
    def strategy(self) -> str:
        return self.first[0].strategy

    @property
    def ratios(self) -> list[float]:
        """The speeds of the second file over those of the first, one for each run of the shorter list."""
        return _ratios(*([speed for one in part for speed in one.speeds] for part in (self.first, self.second)))

    @property
    def speedup_ratios(self) -> list[float]:
        """The same for the speed-ups over the baseline. Empty if one file has no speed-ups or a different baseline."""
        if self.first[0].baseline != self.second[0].baseline:
            return []
        return _ratios(*([value for one in part for value in one.speedups] for part in (self.first, self.second)))


def _ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """A ratio for each run of the shorter list. Several for one run would repeat its noise and look like agreement."""
    count = min(len(first), len(second))
    ours, theirs = ([geometric_mean(part[index::count]) for index in range(count)] for part in (first, second))
    return [other / one for one, other in zip(ours, theirs, strict=True)]


def match(first: Sequence[RecordedRun], second: Sequence[RecordedRun]) -> tuple[list[RunMatch], list[str]]:
    """The matches in the order of the first file, and a sentence for each group of unmatched runs."""
    groups, by_prompt = (_groups(first), _groups(second)), (_by_prompt(first), _by_prompt(second))
    matches: list[RunMatch] = []
    problems: list[Problem] = []
    for key, ours in groups[0].items():
        theirs = groups[1].get(key, [])
        found, left, right = _match_group(ours, theirs)
        matches += found
        problems += [_problem(one, "A", "B", by_prompt[1]) for one in left]
        problems += [_problem(one, "B", "A", by_prompt[0]) for one in right]
    problems += [
        _problem(one, "B", "A", by_prompt[0])
        for key, theirs in groups[1].items()
        if key not in groups[0]
        for one in theirs
    ]
    return matches, problem_sentences(problems)


def problem_sentences(problems: Sequence[Problem]) -> list[str]:
    """Each reason once, with its line numbers."""
    lines: dict[tuple[str, str], list[int]] = {}
    for problem in problems:
        lines.setdefault((problem.file, problem.reason), []).append(problem.line)
    return [f"{file}, {_line_numbers(numbers)}: {reason}" for (file, reason), numbers in lines.items()]


def _line_numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN_LINES]))
    more = f" and {len(numbers) - SHOWN_LINES} more" if len(numbers) > SHOWN_LINES else ""
    return f"line{'s' * (len(numbers) > 1)} {shown}{more}"


def _groups(runs: Sequence[RecordedRun]) -> dict[tuple[Any, ...], list[RecordedRun]]:
    groups: dict[tuple[Any, ...], list[RecordedRun]] = {}
    for one in runs:
        groups.setdefault((one.prompt, one.history, one.strategy, _values(one, TASK)), []).append(one)
    return groups


def _values(one: RecordedRun, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(repr(one.settings.get(name)) for name in names)


def _match_group(
    ours: Sequence[RecordedRun], theirs: Sequence[RecordedRun]
) -> tuple[list[RunMatch], list[RecordedRun], list[RecordedRun]]:
    """The matches of one prompt, strategy and task, and the unmatched runs of each file."""
    left, right = (_by_method(part) for part in (ours, theirs))
    matches = [RunMatch(tuple(left.pop(method)), tuple(right.pop(method))) for method in [*left] if method in right]
    if len(left) == len(right) == 1:  # one run left on each side: compare them although they differ
        (one,), (other,) = left.values(), right.values()
        matches.append(RunMatch(tuple(one), tuple(other)))
        left, right = {}, {}
    return matches, list(chain(*left.values())), list(chain(*right.values()))


def _by_method(runs: Sequence[RecordedRun]) -> dict[tuple[str, ...], list[RecordedRun]]:
    methods: dict[tuple[str, ...], list[RecordedRun]] = {}
    for one in runs:
        names = () if one.strategy == BASELINE else DRAFTING
        methods.setdefault(_values(one, names), []).append(one)
    return methods


def _by_prompt(runs: Sequence[RecordedRun]) -> dict[Any, list[RecordedRun]]:
    prompts: dict[Any, list[RecordedRun]] = {}
    for one in runs:
        prompts.setdefault((one.prompt, one.history), []).append(one)
    return prompts


def _problem(one: RecordedRun, own: str, other: str, others: Mapping[Any, Sequence[RecordedRun]]) -> Problem:
    """Why a run has no counterpart. `others` holds the runs of the other file by prompt."""
    same_prompt = others.get((one.prompt, one.history), ())
    same_strategy = [row for row in same_prompt if row.strategy == one.strategy]
    if not same_prompt:
        return Problem(own, one.line, f"{other} has no run of this prompt.")
    if not same_strategy:
        return Problem(own, one.line, f"{other} has no run of {one.strategy} on this prompt.")
    theirs = same_strategy[0].settings
    differing = [
        f"{name} {shown_value(theirs[name])} instead of {shown_value(one.settings[name])}"
        for name in (*TASK, *DRAFTING)
        if name in theirs and name in one.settings and theirs[name] != one.settings[name]
    ]
    settings = ", ".join(differing) or "several"
    return Problem(own, one.line, f"{other} has this prompt only with other settings ({settings}).")


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
        yield from (
            f"{part}, {name}: {shown_value(ours[name])} in A, {shown_value(theirs[name])} in B"
            for name in names
            if name in ours and name in theirs and ours[name] != theirs[name]
        )
        missing = [name for name, values in (("A", ours), ("B", theirs)) if not values]
        if len(missing) == 1:
            yield f"{part}: not recorded in {missing[0]}"
    if one.drafter_kind != other.drafter_kind and None not in (one.drafter_kind, other.drafter_kind):
        yield f"{one.strategy}, drafter kind: {one.drafter_kind} in A, {other.drafter_kind} in B"
    counts = one.prompt_tokens, other.prompt_tokens
    if one.model == other.model and counts[0] != counts[1] and None not in counts:
        yield "the prompt has a different number of tokens: the chat template or the tokenizer differs"
    ignored = (*NOT_COMPARED, *(DRAFTING if one.strategy == BASELINE else ()))
    yield from (
        f"setting {name}: {shown_value(value)} in A, {shown_value(other.settings[name])} in B"
        for name, value in one.settings.items()
        if name not in ignored and name in other.settings and other.settings[name] != value
    )
