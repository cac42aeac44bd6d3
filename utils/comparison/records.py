"""JSON records: one line per run or report, schema 2, for scripts that read what the screen shows.

Runs of strategies and answers of servers have the same fields. Missing figures are null, never NaN. The file is only
ever appended to, and contains neither API keys nor names of their variables.
"""

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from errno import EINVAL, ENOSPC
from functools import cache
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from utils import __version__
from utils.comparison.arms import ComparedRun, Run
from utils.comparison.harness import LastPrompt
from utils.comparison.strategies import STRATEGIES
from utils.config.settings import Settings, as_json
from utils.decode.steps import FinishReason
from utils.engine.machine import machine_facts
from utils.errors import UserError
from utils.files import os_reason, read_text
from utils.metrics.divergence import Divergence
from utils.metrics.results import spans_of
from utils.prompts.conversation import to_messages
from utils.servers.address import TARGET
from utils.servers.kinds.completion import IDS, Chat

SHOWN_PROMPT = 60  # characters of a prompt in a headline
INTERVAL = 1.0  # seconds between two sentences on progress
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Row = Mapping[str, Any]  # the figures of one row of a report, or a record


class Countdown:
    """Shows the progress of long work with the time that is left, counted from its creation. Tests replace the clocks.

    `show` receives the sentences.
    """

    def __init__(self, show: Callable[[str], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._show, self._clock = show, clock
        self._start = self._shown = clock()

    def at(self, fraction: float, text: str) -> None:
        """Show progress for work that is done to this fraction (0 to 1), at most once per INTERVAL."""
        now = self._clock()
        if now - self._shown >= INTERVAL:
            self._shown = now
            self.progress(fraction, text)

    def progress(self, fraction: float, text: str) -> None:
        """Show progress for work that is done to this fraction."""
        seconds = self._clock() - self._start
        left = f", about {seconds * (1 - fraction) / fraction:.0f} s left" if fraction else ""
        self._show(f"{text}{left} ...")


def gathered(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """The values of each key, in their order."""
    groups: dict[Key, list[Item]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups


def shortened(text: str, length: int = SHOWN_PROMPT) -> str:
    """A text on one line, cut to about this many characters."""
    words = " ".join(text[: 4 * length].split())
    return words if len(words) <= length and len(text) <= 4 * length else words[: length - 3].rstrip() + "..."


@dataclass(frozen=True, slots=True)
class Report:
    """A report that is computed while its `rows` are consumed, the last of them even after Ctrl-C or an error.

    `name` is the `record` field in JSON, and `title` replaces the headline where a report is not about the last prompt.
    From the rows, `conclude` makes sentences, `attachment` data to copy, or nothing, and `status` the exit status.
    `shown` selects the rows that the screen shows, and `cells` makes the cells of one. `transposed` makes each row a
    column. Columns in `optional` are dropped on a narrow screen, the first one first. `details` are further records for
    scripts.
    """

    name: str
    prompt: str
    settings: Settings
    headings: tuple[str, ...]
    cells: Callable[[Row], tuple[str, ...]]
    rows: Iterator[Row]
    conclude: Callable[[Sequence[Row]], list[str]]
    shown: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows
    attachment: Callable[[Sequence[Row]], str] = lambda rows: ""
    transposed: bool = False
    optional: tuple[str, ...] = ()
    title: str = ""
    details: Callable[[], Sequence[dict[str, Any]]] = lambda: ()
    status: Callable[[Sequence[Row]], int] = lambda rows: 0

    @property
    def headline(self) -> str:
        return self.title or f'/{self.name} of "{shortened(self.prompt)}"'


SCHEMA = 2
GENERATION = "generation"  # a run of a strategy or a server
SERVER = "server"  # the field with the server; null for a strategy
MODEL_FIELDS = {  # record fields and the attributes of a Pair that fill them
    "target": "target_name",
    "drafter": "drafter_name",
    **{name: name for name in ("dtype", "device", "quantize", "memory")},
    **{f"drafter_{name}": f"drafter_{name}" for name in ("dtype", "quantize", "memory")},
}


def run_records(last: LastPrompt, divergences: Mapping[str, Divergence], pair: Any) -> list[dict[str, Any]]:
    """One record for each run of a prompt. `divergences` are by name; `pair` is None without loaded models."""
    shared = circumstances(pair, last.settings)
    return [_run(last, entry, divergences.get(entry.run.name), pair) | shared for entry in last.compared]


def _run(last: LastPrompt, entry: ComparedRun, divergence: Divergence | None, pair: Any) -> dict[str, Any]:
    arm, run, comparison = entry
    history = last.histories[run.name]
    return {
        "schema": SCHEMA,
        "record": GENERATION,
        "prompt": last.text,
        "turn": len(history),
        "history": to_messages(history),
        "strategy": run.name,
        "drafter_kind": None if arm.strategy is None else arm.strategy.drafter_label(pair),
        SERVER: server_figures(run),
        "text": run.text,
        "token_ids": None if run.tokens is None else list(run.tokens),
        "prompt_tokens": run.prompt_tokens,
        "new_tokens": run.new_tokens,
        "tokens_counted_by": IDS if run.completion is None else run.completion.counted_by,
        "finish": run.finish.value,
        "finish_reason": run.finish.value if run.completion is None else run.completion.finish_reason,
        "seconds": run.seconds,
        "first_token_seconds": run.first_seconds,
        "tokens_per_second": run.tokens_per_second,
        "decode_tokens_per_second": run.decode_tokens_per_second,
        **_draft_figures(run),
        "accepted_by_span": None
        if run.generation is None or run.drafted is None
        else spans_of(last.jobs[run.name].prompt, run.generation.steps, pair.tokenizer),
        "baseline": run.baseline,
        "speedup_vs_baseline": comparison.speedup,
        "decode_speedup_vs_baseline": comparison.decode_speedup,
        "same_as_baseline": comparison.same,
        "first_difference": comparison.first_difference,
        "first_difference_in": f"{comparison.unit}s",
        "divergence": None if divergence is None else divergence_figures(divergence),
    }


def server_figures(run: Run) -> dict[str, Any] | None:
    """Which server answered, without its key, and the form of its prompt. None for a local run."""
    if run.address is None or run.completion is None:
        return None
    prompt = None if run.completion.request is None else run.completion.request.prompt
    form = "messages" if isinstance(prompt, Chat) else "text" if isinstance(prompt, str) else "token ids"
    return {
        **{name: getattr(run.address, name) for name in ("name", "url", "baseline", "same")},
        **{name: getattr(run.completion, name) for name in ("model", "kind")},
        "prompt_form": form,
    }


def divergence_figures(divergence: Divergence) -> dict[str, Any]:
    """A divergence as plain values, with a 0-based position. Values that are not finite (masked logits) are null."""
    figures = asdict(divergence) | {"gap": divergence.gap, "cause": divergence.cause.value}
    return {name: _finite(value) for name, value in figures.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def report_records(
    report: Report, rows: Sequence[Row], conclusion: Sequence[str], pair: Any, *, finished: bool
) -> list[dict[str, Any]]:
    """The record of a report, and its further ones, such as one for each request of a load."""
    record = {
        "schema": SCHEMA,
        "record": report.name,
        "prompt": report.prompt,
        "finished": finished,
        "findings": rows,
        "conclusion": list(conclusion),
        **circumstances(pair, report.settings),
    }
    return [record, *({"schema": SCHEMA, "record": f"{report.name} request"} | one for one in report.details())]


def circumstances(pair: Any, settings: Settings) -> dict[str, Any]:
    """Everything that a run depends on. Models and engine are missing without a pair."""
    state = {
        "models": {name: None if pair is None else getattr(pair, field) for name, field in MODEL_FIELDS.items()},
        "engine": {} if pair is None else pair.engine.figures(),
        "versions": dict(versions()),
        "machine": dict(machine_facts()),
    }
    return {"seed": settings.seed, "settings": as_json(settings), **state}


def _draft_figures(run: Run) -> dict[str, Any]:
    found, positions = run.acceptance, run.accepted_by_position
    local = None if run.drafted is None else run.generation
    names = (
        "drafted",
        "accepted",
        "forced",
        "acceptance_rate",
        "rounds",
        "target_forwards",
        "tokens_per_target_forward",
    )
    return {
        **{name: getattr(run, name) for name in names},
        "accepted_by_position": None if positions is None else [list(pair) for pair in positions],
        "acceptance_is_valid": None if found is None else found.valid,
        "acceptance_note": "" if found is None else found.note,
        "other_tokens": run.other_tokens,
        "declined_rounds": None if local is None else local.declined_rounds,
        "draft_seconds": None if local is None else sum(timing.drafting for timing in local.timings),
        "verify_seconds": None if local is None else sum(timing.verifying for timing in local.timings),
    }


@cache
def versions() -> dict[str, str]:
    libraries = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return {"program": __version__, "python": platform.python_version(), **libraries}


class RecordFile:
    """An append-only file of records, which several processes may share. Raises UserError if it is not writable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.append([])

    def append(self, records: list[dict[str, Any]]) -> None:
        """Append one line per record in a single write, so that lines of other processes do not interleave."""
        lines = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
        try:
            if self._path.exists() and not self._path.is_file():
                raise OSError(EINVAL, "it is not a regular file, and records are appended to one")
            with self._path.open("ab", buffering=0) as file:
                # A lone surrogate has no UTF-8 form; its backslash escape is valid JSON.
                data, end = lines.encode("utf-8", errors="backslashreplace"), file.seek(0, os.SEEK_END)
                # An unbuffered write that stops early raises nothing by itself.
                if file.write(data) != len(data):
                    file.truncate(end)  # half a line would damage the next one
                    raise OSError(ENOSPC, os.strerror(ENOSPC))
        except (OSError, ValueError) as error:  # a zero byte in the name is a ValueError
            raise UserError(
                f"The records file {self._path} cannot be written: {os_reason(error)}. Choose another with --json."
            ) from error


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
_TOGGLES = (row.toggle for row in STRATEGIES if isinstance(getattr(Settings(), row.toggle), bool))
NOT_COMPARED = (*_TOGGLES, "debug", "costs", "turns", "chat")
# The runs of the baseline do not depend on these.
DRAFTING = ("gamma", "drafter_kind", "verify", "ngram_storage", "ngram_limit", "top_k_filler", "reset_in_between")
SHOWN_LINES = 8  # line numbers shown in a sentence
NO_COUNTERPART = "the other file has no run of this prompt by this strategy with the same length, processor and seed."


class RecordedRun(NamedTuple):
    """The record of a run, whose fields are valid, and its line in the file."""

    line: int
    row: Row

    @property
    def request(self) -> tuple[str, ...]:
        fields = str(self.row["settings"].get("request", "none"))  # not in older records
        return self.row["prompt"], repr(self.row.get("history") or []), fields

    @property
    def circumstances(self) -> Row:
        """The local models and the engine do not matter for an answer of a server."""
        server = self.row.get(SERVER)
        return {**self.row, "models": {}, "engine": {}} if server else self.row

    @property
    def model(self) -> Any:
        """The model that generated: the target, or a server's model."""
        part, name = (SERVER, "model") if self.row.get(SERVER) else ("models", "target")
        return (self.row.get(part) or {}).get(name)

    def values(self, names: Sequence[str]) -> tuple[str, ...]:
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
    **dict.fromkeys(("tokens_per_second", "decode_tokens_per_second", "speedup_vs_baseline"), 0.0),
    **dict.fromkeys(("prompt_tokens", "accepted", "drafted", "rounds", "new_tokens", "target_forwards"), 0),
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


def _checked(record: Row) -> Row:
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
    sentences = []
    for name, tasks in (("A", left), ("B", right)):
        lines = [run.line for methods in tasks.values() for runs in methods.values() for run in runs]
        sentences += [problem_sentence(name, lines, NO_COUNTERPART)] if lines else []
    return matches, sentences


def problem_sentence(file: str, lines: Sequence[int], reason: str) -> str:
    """Why runs in these lines of file A or B have no counterpart."""
    shown = ", ".join(map(str, lines[:SHOWN_LINES]))
    more = f" and {len(lines) - SHOWN_LINES} more" if len(lines) > SHOWN_LINES else ""
    return f"{file}, line{'s' * (len(lines) > 1)} {shown}{more}: {reason}"


def _by_task(runs: Sequence[RecordedRun]) -> dict[Any, dict[tuple[str, ...], list[RecordedRun]]]:
    """The runs by prompt, strategy and task, and within each by the settings of drafting."""
    tasks = gathered(((one.request, one.row["strategy"], one.values(TASK)), one) for one in runs)
    return {
        task: gathered((one.values(() if one.row["strategy"] == TARGET else DRAFTING), one) for one in group)
        for task, group in tasks.items()
    }


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


def _changed(what: str, ours: Row, theirs: Row, names: Iterable[str]) -> Iterator[str]:
    """The values with these names that both have and that differ."""
    for name in names:
        if name in ours and name in theirs:
            left, right = (None if row[name] == "none" else row[name] for row in (ours, theirs))
            if left != right:
                yield f"{what}{name}: {shown_value(left)} in A, {shown_value(right)} in B"
