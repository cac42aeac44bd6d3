"""JSON records: one line per generation or report, schema 1, for scripts that read what the screen shows.

Missing figures are null, never NaN. The file is only ever appended to.
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
from utils.comparison.last_prompt import ComparedRun, LastPrompt
from utils.comparison.reports import Finding, Report
from utils.comparison.second_baseline import comparison_figures
from utils.comparison.strategies import Strategy
from utils.config.setting_table import as_json
from utils.config.settings import Settings
from utils.engine.machine import machine_facts
from utils.errors import UserError
from utils.files import os_reason
from utils.metrics.divergence import Divergence
from utils.metrics.results import Generation
from utils.prompts.conversation import to_messages
from utils.text import decode

SCHEMA = 1
MODEL_FIELDS = {  # record fields and the attributes of a Pair that fill them
    "target": "target_name",
    "drafter": "drafter_name",
    **{name: name for name in ("dtype", "device", "quantize", "memory")},
    **{f"drafter_{name}": f"drafter_{name}" for name in ("device", "dtype", "quantize", "memory")},
}


def generation_records(last: LastPrompt, divergences: Mapping[str, Divergence]) -> list[dict[str, Any]]:
    """One record for each run of a prompt. `divergences` are keyed by the strategy's name."""
    return [_generation(last, compared, divergences.get(compared[0].name)) for compared in last.compared]


def _generation(last: LastPrompt, compared: ComparedRun, divergence: Divergence | None) -> dict[str, Any]:
    strategy, run, comparison = compared
    job = last.jobs[strategy.name]
    return {
        "schema": SCHEMA,
        "record": "generation",
        "prompt": last.text,
        "turn": job.turn,
        "history": to_messages(job.history),
        "strategy": strategy.name,
        "drafter_kind": strategy.drafter_label(job.pair),
        "text": decode(job.pair.tokenizer, run.tokens),
        "token_ids": run.tokens,
        "prompt_tokens": len(job.prompt),
        "new_tokens": len(run.tokens),
        "finish": run.finish.value,
        "seconds": run.seconds,
        "first_token_seconds": run.first_seconds,
        "tokens_per_second": run.tokens_per_second,
        **_draft_figures(strategy, run),
        "speedup_vs_target": comparison.speedup,
        **comparison_figures(comparison, job.pair.engine.faster_baseline()),
        "same_as_target": comparison.same,
        "first_difference": comparison.first_difference,
        "divergence": None if divergence is None else divergence_figures(divergence),
        **circumstances(job.pair, job.settings),
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


def report_record(report: Report, findings: Sequence[Finding], pair: Any, *, finished: bool) -> dict[str, Any]:
    """The record of a report, complete or interrupted, with its conclusion."""
    return {
        "schema": SCHEMA,
        "record": report.name,
        "prompt": report.prompt,
        "finished": finished,
        "findings": [finding.figures for finding in findings],
        "conclusion": report.conclude(findings),
        **circumstances(pair, report.settings),
    }


def circumstances(pair: Any, settings: Settings) -> dict[str, Any]:
    """Everything that a run depends on: seed, settings, models, engine, versions, machine.

    Models and engine are missing if `pair` is None.
    """
    state = {
        "models": dict.fromkeys(MODEL_FIELDS) if pair is None else _models(pair),
        "engine": {} if pair is None else pair.engine.figures(),
        "versions": dict(versions()),
        "machine": dict(machine_facts()),
    }
    return {"seed": settings.seed, "settings": as_json(settings), **state}


def _draft_figures(strategy: Strategy, run: Generation) -> dict[str, Any]:
    drafts, target = strategy.drafts, strategy.uses_target
    return {
        "drafted": run.drafted if drafts else None,
        "accepted": run.accepted if drafts else None,
        "acceptance_rate": run.acceptance_rate if drafts else None,
        "rounds": len(run.steps) if drafts else None,
        "target_forwards": run.target_forwards if target else None,
        "tokens_per_target_forward": run.tokens_per_target_forward if target else None,
        "accepted_by_position": [list(pair) for pair in run.accepted_by_position] if drafts else None,
        "declined_rounds": run.declined_rounds if drafts else None,
        "draft_seconds": sum(timing.drafting for timing in run.timings) if drafts else None,
        "verify_seconds": sum(timing.verifying for timing in run.timings) if drafts else None,
    }


def _models(pair: Any) -> dict[str, str | int | None]:
    return {name: getattr(pair, attribute) for name, attribute in MODEL_FIELDS.items()}


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
