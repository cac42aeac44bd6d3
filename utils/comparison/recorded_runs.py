"""Runs of strategies and servers that were recorded with --json, and the matching runs of two files.

Damaged lines are reported and skipped; the others can still be used. Runs match by prompt, strategy and task, which
decides how much work a run is: length, processor, seed and the prompt's form. Other settings, such as gamma, may
differ.
"""

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from utils.comparison.records import GENERATION, SCHEMA, SERVER
from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.files import read_text
from utils.servers.address import TARGET

# The circumstances that can change a run. Memory use, for example, cannot.
CIRCUMSTANCES = {
    "versions": ("program", "python", "torch", "transformers", "numpy"),
    "models": ("target", "drafter", "dtype", "device", "quantize", "drafter_dtype", "drafter_quantize"),
    "engine": ("kind", "weights", "threads"),
    "machine": ("cpu", "cores", "gpus", "system"),
}
LEAST_SPEED, MAX_SPEED = 1e-6, 1e9  # a file can be edited: other speeds would give meaningless ratios
COMPARED = {**CIRCUMSTANCES, SERVER: ("url", "model", "kind", "prompt_form")}
TASK = ("length", "processor", "seed", "system", "special")
# These settings select what runs and what is shown, depend on the machine, or must be equal for a match.
NOT_COMPARED = ("speculative", "ngram", "target", "drafter", "debug", "costs", "turns", "chat")
# The runs of the baseline do not depend on these.
DRAFTING = ("gamma", "drafter_kind", "verify", "ngram_storage", "ngram_limit", "top_k_filler", "reset_in_between")
SHOWN_LINES = 8  # line numbers shown in a sentence
NO_COUNTERPART = "the other file has no run of this prompt by this strategy with the same length, processor and seed."

Record = Mapping[str, Any]
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


class RecordedRun(NamedTuple):
    """The record of a run, whose fields are valid, and its line in the file."""

    line: int
    row: Record

    @property
    def request(self) -> tuple[str, str]:
        """The prompt and the conversation before it."""
        return self.row["prompt"], repr(self.row.get("history") or [])

    @property
    def circumstances(self) -> Record:
        """The local models and the engine do not matter for an answer of a server."""
        server = self.row.get(SERVER)
        return {**self.row, "models": {}, "engine": {}} if server else self.row

    @property
    def model(self) -> Any:
        """The model that generated: the target, or a server's model."""
        part, name = (SERVER, "model") if self.row.get(SERVER) else ("models", "target")
        return (self.row.get(part) or {}).get(name)

    def values(self, names: Sequence[str]) -> tuple[str, ...]:
        """The settings with these names."""
        return tuple(repr(self.row["settings"].get(name)) for name in names)


@dataclass(slots=True)
class RecordsFile:
    """The runs of a file and why other lines were skipped. `others` counts records of reports by name."""

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
                record = _parsed(line)
                if (kind := record["record"]) == GENERATION:
                    file.runs.append(RecordedRun(number, _checked(record)))
                else:
                    file.others[kind] += 1
        except UserError as error:
            file.left_out.append(f"{path}, line {number}: {error}")
    if not file.runs:
        problem = f" {file.left_out[0]}" if file.left_out else ""
        raise UserError(f"{path} holds no run of a prompt. --json FILE records them.{problem}")
    return file


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


NEEDED = {"prompt": "", "strategy": "", "finish": "", "settings": {}}
OPTIONAL = {  # missing or null is valid
    **dict.fromkeys(("text", "drafter_kind", "baseline"), ""),
    **{name: {} for name in (*CIRCUMSTANCES, SERVER)},
    **dict.fromkeys(("tokens_per_second", "speedup_vs_baseline"), 0.0),
    **dict.fromkeys(("prompt_tokens", "accepted", "drafted"), 0),
    "token_ids": [0],
    "accepted_by_position": [(0, 0)],
    "history": [{"role": "", "content": ""}],
}


def _has_form(value: Any, form: Any) -> bool:
    """Whether a value has the type of the form, and so have its parts. Numbers are not negative."""
    match form:
        case tuple():
            return isinstance(value, list) and len(value) == len(form) and all(map(_has_form, value, form))
        case list():
            return isinstance(value, list) and all(_has_form(part, form[0]) for part in value)
        case dict():
            return isinstance(value, dict) and all(_has_form(value.get(name), part) for name, part in form.items())
        case int():  # as int64, and not a bool, which is a subclass
            return type(value) is int and 0 <= value < 2**63
        case float():
            return type(value) in (int, float) and 0 <= value <= MAX_SPEED  # false for NaN
    return isinstance(value, str)


def _checked(record: Record) -> Record:
    """The record of a run. Raises UserError if a field is not valid, or if the run cannot be compared."""
    for name, form in (NEEDED | OPTIONAL).items():
        if not _has_form(record.get(name), form) and (name in NEEDED or record.get(name) is not None):
            problem = "has an invalid value" if name in record else "is missing"
            raise UserError(f'the record is damaged: its "{name}" {problem}.')
    if record["finish"] == FinishReason.INTERRUPTED:
        raise UserError("the run was interrupted.")
    if (record.get("tokens_per_second") or 0) < LEAST_SPEED:
        raise UserError("the run has no speed.")
    return record


def shown_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))[:80] or "none"
    return "none" if value is None else str(value)[:80]


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
    """The matches in the order of the first file, and sentences on the runs without a counterpart."""
    left, right = _by_task(first), _by_task(second)
    matches: list[RunMatch] = []
    for task, ours in left.items():
        theirs = right.get(task, {})
        pairs = [(ours.pop(method), theirs.pop(method)) for method in [*ours] if method in theirs]
        if len(ours) == len(theirs) == 1:  # one run left on each side: compare them although they differ
            pairs.append((ours.popitem()[1], theirs.popitem()[1]))
        matches += (RunMatch(one, other) for one, other in pairs)
    problems = [
        Problem(name, run.line, NO_COUNTERPART)
        for name, tasks in (("A", left), ("B", right))
        for methods in tasks.values()
        for runs in methods.values()
        for run in runs
    ]
    return matches, problem_sentences(problems)


def problem_sentences(problems: Iterable[Problem]) -> list[str]:
    """Each reason once, with its line numbers."""
    groups = _grouped(problems, lambda problem: (problem.file, problem.reason))
    sentences = []
    for (file, reason), group in groups.items():
        shown = ", ".join(str(problem.line) for problem in group[:SHOWN_LINES])
        more = f" and {len(group) - SHOWN_LINES} more" if len(group) > SHOWN_LINES else ""
        sentences.append(f"{file}, line{'s' * (len(group) > 1)} {shown}{more}: {reason}")
    return sentences


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by their keys, in their order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _by_task(runs: Sequence[RecordedRun]) -> dict[Any, dict[tuple[str, ...], list[RecordedRun]]]:
    """The runs by prompt, strategy and task, and within each by the settings of drafting."""
    tasks = _grouped(runs, lambda one: (one.request, one.row["strategy"], one.values(TASK)))
    return {task: _grouped(group, _method) for task, group in tasks.items()}


def _method(one: RecordedRun) -> tuple[str, ...]:
    return one.values(() if one.row["strategy"] == TARGET else DRAFTING)


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
        ours, theirs = one.circumstances.get(part) or {}, other.circumstances.get(part) or {}
        yield from _changed(f"{part}, ", ours, theirs, names)
        missing = [name for name, values in (("A", ours), ("B", theirs)) if not values]
        if len(missing) == 1:
            yield f"{part}: not recorded in {missing[0]}"
    strategy, kinds = one.row["strategy"], (one.row.get("drafter_kind"), other.row.get("drafter_kind"))
    if kinds[0] != kinds[1] and None not in kinds:
        yield f"{strategy}, drafter kind: {kinds[0]} in A, {kinds[1]} in B"
    counts = one.row.get("prompt_tokens"), other.row.get("prompt_tokens")
    if one.model == other.model and counts[0] != counts[1] and None not in counts:
        yield "the prompt has a different number of tokens: the chat template or the tokenizer differs"
    ours, theirs = one.row["settings"], other.row["settings"]
    ignored = (*NOT_COMPARED, *(DRAFTING if strategy == TARGET else ()))
    yield from _changed("setting ", ours, theirs, [name for name in ours if name not in ignored])


def _changed(what: str, ours: Record, theirs: Record, names: Iterable[str]) -> Iterator[str]:
    """The values with these names that both have and that differ."""
    for name in names:
        if name in ours and name in theirs:
            left, right = (None if row[name] == "none" else row[name] for row in (ours, theirs))
            if left != right:
                yield f"{what}{name}: {shown_value(left)} in A, {shown_value(right)} in B"
