"""Sessions with conversations, and what their runs were given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fakes import records_of

from utils.comparison.strategies import STRATEGIES, Job, Strategy
from utils.decode.steps import Step
from utils.prompts.conversation import Turn
from utils.repl.repl_session import ReplSession, Verdict

START = ("/turns on", "/length 6")
A, B, C = Turn("a", "1"), Turn("b", "2"), Turn("c", "3")


def handled(session: ReplSession, *lines: str) -> None:
    for line in lines:
        assert session.handle(line) is Verdict.DONE, line


def rendered(tokenizer: Any, *contents: str) -> list[int]:
    """The ids of the template for messages of the user and the assistant in turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def jobs_of(session: ReplSession) -> dict[str, Job]:
    return dict(session.harness.last().jobs)


def by_name(file: Path, prompt: str) -> dict[str, dict[str, Any]]:
    """The latest records of a prompt."""
    return {
        row["strategy"]: row
        for row in records_of(file)
        if row.get("prompt") == prompt and row["record"] == "generation"
    }


def watched(seen: list[tuple[str, Job]]) -> tuple[Strategy, ...]:
    """The table of strategies; each run is added to `seen`."""

    def steps(row: Strategy, job: Job) -> Iterator[Step]:
        seen.append((row.name, job))
        return row.steps(job)

    return tuple(replace(row, steps=partial(steps, row)) for row in STRATEGIES)
