"""JSON records: one line per generation, schema 1, for scripts that read what the screen shows.

Absent figures are null, never NaN. The file is only ever appended to.
"""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.results import Comparison, Generation
from utils.settings import as_json
from utils.strategies import Job, Strategy
from utils.text import decode
from utils.version import VERSION

SCHEMA = 1


def record_of(strategy: Strategy, job: Job, run: Generation, comparison: Comparison, *, prompt: str) -> dict[str, Any]:
    """The record of one generation; `prompt` is the text as it was sent, before any chat template."""
    return {
        "schema": SCHEMA,
        "record": "generation",
        "prompt": prompt,
        "strategy": strategy.name,
        "drafter_kind": strategy.drafter_kind(job.pair),
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
        "same_as_target": comparison.same,
        "first_difference": comparison.first_difference,
        "seed": job.settings.seed,
        "settings": as_json(job.settings),
        "models": _models(job.pair),
        "versions": versions(),
    }


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
    }


def _models(pair: Any) -> dict[str, str | None]:
    return {"target": pair.target_name, "drafter": pair.drafter_name, "dtype": pair.dtype, "device": pair.device}


def versions() -> dict[str, str]:
    """The program's and its main libraries' versions."""
    libraries = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return {"program": VERSION, "python": platform.python_version(), **libraries}


class RecordFile:
    """An append-only file of records. Raises UserError at once where it cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.append([])

    def append(self, records: list[dict[str, Any]]) -> None:
        """Add one line per record."""
        lines = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
        try:
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(lines)
        except OSError as error:
            raise UserError(f"The records file {self._path} cannot be written: {error.strerror}. Choose another with --json.") from error
