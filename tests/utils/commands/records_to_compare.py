"""Records with known speeds, and /compare of two files of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fakes import Screen, open_session, records_of
from recordings import Row

from utils.repl.runner import Verdict

PROMPTS = [f"prompt {number}" for number in range(6)]
SETTINGS = {"length": 128, "processor": "greedy", "seed": 42, "gamma": "auto", "drafter_kind": "loaded", "debug": "off"}
CIRCUMSTANCES: Row = {
    "models": {"target": "big", "drafter": "small", "dtype": "float32"},
    "engine": {"kind": "plain", "threads": 1},
    "versions": {"torch": "2.0"},
    "machine": {"cpu": "One", "gpus": []},
}


def record(prompt: str, speed: float, **changes: Any) -> Row:
    """A record of a generation."""
    row: Row = {
        "schema": 2,
        "record": "generation",
        "prompt": prompt,
        "history": [],
        "strategy": "speculative",
        "drafter_kind": "model",
        "text": "abc",
        "token_ids": [1, 2, 3],
        "prompt_tokens": 4,
        "finish": "length",
        "tokens_per_second": speed,
        "tokens_per_target_forward": 2.0,
        "speedup_vs_baseline": speed / 10,
        "drafted": 10,
        "accepted": 5,
        "rounds": 3,
        "settings": SETTINGS,
        **CIRCUMSTANCES,
    }
    return row | changes


def written(path: Path, rows: Sequence[Row | str]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def compared(
    view: Screen, folder: Path, first: Sequence[Row | str], second: Sequence[Row | str]
) -> tuple[list[Row], str]:
    """The rows and the conclusion."""
    a, b = written(folder / "a.jsonl", first), written(folder / "b.jsonl", second)
    session = open_session(view, records=folder / "compared.jsonl")
    assert session.handle(f"/compare {a} {b}") is Verdict.DONE, view.take()
    report = records_of(folder / "compared.jsonl")[-1]
    assert report["record"] == "compare"
    return report["findings"], "\n".join(report["conclusion"])


def changed(**settings: Any) -> Callable[[str], Row]:
    return lambda prompt: record(prompt, 10.0, settings=SETTINGS | settings)
