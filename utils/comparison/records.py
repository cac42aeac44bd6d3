"""JSON records: one line per run or report, schema 2, for scripts that read what the screen shows.

Runs of strategies and answers of servers have the same fields. Missing figures are null, never NaN. The file is only
ever appended to, and contains neither API keys nor names of their variables.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from errno import EINVAL, ENOSPC
from functools import cache
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

from utils import __version__
from utils.comparison.arms import ComparedRun
from utils.comparison.reports import Finding, Report
from utils.comparison.runs import Run
from utils.comparison.session_state import LastPrompt
from utils.config.settings import Settings, as_json
from utils.engine.machine import machine_facts
from utils.errors import UserError
from utils.files import os_reason
from utils.metrics.divergence import Divergence
from utils.prompts.conversation import to_messages
from utils.servers.kinds.completion import IDS, Chat

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
    """One record for each run of a prompt. `divergences` are keyed by name, and `pair` has the loaded models, or is
    None.
    """
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
        "baseline": comparison.baseline,
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


def report_record(
    report: Report, findings: Sequence[Finding], conclusion: Sequence[str], pair: Any, *, finished: bool
) -> dict[str, Any]:
    """The record of a report, complete or interrupted, with its conclusion."""
    return {
        "schema": SCHEMA,
        "record": report.name,
        "prompt": report.prompt,
        "finished": finished,
        "findings": [finding.figures for finding in findings],
        "conclusion": list(conclusion),
        **circumstances(pair, report.settings),
    }


def detail_records(report: Report) -> list[dict[str, Any]]:
    """The further records of a report, such as one for each request of a load."""
    return [{"schema": SCHEMA, "record": f"{report.name} request"} | details for details in report.details()]


def circumstances(pair: Any, settings: Settings) -> dict[str, Any]:
    """Everything that a run depends on: seed, settings, models, engine, versions, machine.

    Models and engine are missing if `pair` is None.
    """
    state = {
        "models": {name: None if pair is None else getattr(pair, field) for name, field in MODEL_FIELDS.items()},
        "engine": {} if pair is None else pair.engine.figures(),
        "versions": dict(versions()),
        "machine": dict(machine_facts()),
    }
    return {"seed": settings.seed, "settings": as_json(settings), **state}


def _draft_figures(run: Run) -> dict[str, Any]:
    """What became of the drafts. The times are known for local runs only."""
    found, positions = run.acceptance, run.accepted_by_position
    local = None if run.drafted is None else run.generation
    names = ("drafted", "accepted", "acceptance_rate", "rounds", "target_forwards", "tokens_per_target_forward")
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
    """The versions of the program and its main libraries."""
    libraries = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return {"program": __version__, "python": platform.python_version(), **libraries}


class RecordFile:
    """An append-only file of records, which several processes may share. Raises UserError at once if it is not
    writable.
    """

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
