"""The tables of Spec-Bench and SPEED-Bench, with their own figures, for rows measured on prompts in their formats."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from utils.comparison.reports import ReportTable, shortened
from utils.comparison.speed_claims import Row
from utils.metrics.benchmark_figures import Repeat, benchmark_figures
from utils.prompts.prompt_files import ALL_TASKS, SPEC_BENCH, Prompt
from utils.text import count_of

SHOWN_CATEGORY = 16  # characters of a category in the tables
SHOWN_POSITIONS = 6  # draft positions in a table; the JSON record has all of them
MEANING = (
    "Speed-up: mean tokens/s over prompts, divided by that of target-only. MAT: new tokens per round, accepted drafts "
    "and the target's own token. AL: their mean over prompts. 1, 2, ...: acceptance rate of the first, second, ... "
    "draft of a round, of the rounds that accepted all drafts before it."
)
PUBLISHED = {  # how published figures were measured
    SPEC_BENCH: " Published figures: greedy, up to 1024 new tokens per turn, 480 prompts.",
}


@dataclass(frozen=True, slots=True)
class BenchmarkSample:
    """Which prompts of a benchmark's file are run.

    `name` is empty if the file has no benchmark's format. `prompts` is the number that is run, `of` the number in the
    file.
    """

    name: str
    prompts: int
    of: int

    @classmethod
    def chosen(cls, prompts: Sequence[Prompt], of: int) -> "BenchmarkSample":
        """A sample of `prompts` out of `of`. It has the benchmark's name only if all prompts have its format."""
        names = {prompt.benchmark for prompt in prompts}
        return cls(names.pop() if len(names) == 1 else "", len(prompts), of)

    def figures(self, repeats: Sequence[Repeat]) -> dict[str, Any] | None:
        """The field `benchmark` of a row, or None if the prompts are not of a benchmark."""
        if not self.name:
            return None
        return {"name": self.name, "prompts_in_file": self.of, **benchmark_figures(repeats)}

    @property
    def text(self) -> str:
        """The sample in words."""
        return count_of(self.prompts, "prompt") if self.prompts == self.of else f"{self.prompts} of {self.of} prompts"

    def tables(self, rows: Sequence[Row], length: int) -> list[ReportTable]:
        """The benchmark's tables for results of `length` new tokens.

        Each row has the fields task, strategy, prompts, drafted and benchmark; rows of servers also have baseline.
        """
        drafting = [row for row in rows if row["benchmark"] and (row["drafted"] or row.get("baseline"))]
        if not drafting:
            return []
        rates = [row["benchmark"]["conditional_acceptance"][:SHOWN_POSITIONS] for row in drafting]
        positions = range(max(map(len, rates)))
        cells = [
            (
                *(_category(row["task"]), str(row["strategy"]), str(row["prompts"])),
                _text(row["benchmark"]["speedup"], "{:.2f}x"),
                *(_text(row["benchmark"][name]) for name in ("mean_accepted_tokens", "acceptance_length")),
                *(_text(of_row[index] if index < len(of_row) else None) for index in positions),
            )
            for row, of_row in zip(drafting, rates, strict=True)
        ]
        names = ("category", "strategy", "prompts", "speed-up", "MAT", "AL")
        headings = (*names, *(str(index + 1) for index in positions))
        note = f"{MEANING}{PUBLISHED.get(self.name, '')} Here: {self.text}, up to {length} new tokens."
        return [ReportTable(f"As {self.name} defines it:", headings, tuple(cells), note)]


NO_SAMPLE = BenchmarkSample("", 0, 0)  # for prompts without a benchmark


def _category(task: str) -> str:
    return "overall" if task == ALL_TASKS else shortened(task, SHOWN_CATEGORY)


def _text(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)
