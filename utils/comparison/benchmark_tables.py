"""The tables of Spec-Bench and SPEED-Bench, with their own figures, for rows measured on prompts in their formats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from statistics import mean
from typing import Any

from utils.comparison.reports import ReportTable, shortened
from utils.comparison.runs import Run
from utils.comparison.speed_claims import Row
from utils.metrics.benchmark_figures import Repeat, benchmark_figures, mean_speed_ratio
from utils.prompts.prompt_files import ALL_TASKS, SPEC_BENCH, Prompt
from utils.text import count_of

SHOWN_CATEGORY = 16  # characters of a category in the tables
SHOWN_POSITIONS = 6  # draft positions in a table; the JSON record has all of them
PUBLISHED = {  # how published figures were measured
    SPEC_BENCH: "Published figures: greedy, up to 1024 new tokens per turn, 480 prompts.",
}
SPEC_MEANING = (
    "Speed-up: mean tokens/s over prompts, divided by that of target-only. MAT: new tokens per round, accepted drafts "
    "and the target's own token."
)
SPEED_MEANING = (
    "AL: acceptance length, new tokens per round (accepted drafts and the target's own token), mean over prompts. "
    "1, 2, ...: acceptance rate of the first, second, ... draft of a round, of the rounds that accepted all drafts "
    "before it (conditional acceptance rate)."
)


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
        return self.named(benchmark_figures(repeats)) if self.name else None

    def named(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Figures with the name of the benchmark."""
        return {"name": self.name, "prompts_in_file": self.of, **figures}

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
        if self.name == SPEC_BENCH:
            return [self._spec_table(drafting, length)]
        names = list(dict.fromkeys(str(row["strategy"]) for row in drafting))
        tables = [self._speed_table(name, [row for row in drafting if row["strategy"] == name]) for name in names]
        return [*tables[:-1], replace(tables[-1], note=SPEED_MEANING)]

    def _spec_table(self, rows: Sequence[Row], length: int) -> ReportTable:
        """Categories by strategies: the leaderboard of Spec-Bench, turned so that it fits on a screen."""
        names = list(dict.fromkeys(str(row["strategy"]) for row in rows))
        by_task: dict[str, dict[str, Row]] = {}
        for row in rows:
            by_task.setdefault(str(row["task"]), {})[str(row["strategy"])] = row
        cells = []
        for task, group in by_task.items():
            figures = [group[name]["benchmark"] if name in group else {} for name in names]
            values = [(_text(one.get("speedup"), "{:.2f}x"), _text(one.get("mean_accepted_tokens"))) for one in figures]
            prompts = max(row["prompts"] for row in group.values())
            cells.append((_category(task), str(prompts), *(cell for pair in values for cell in pair)))
        headings = ("category", "prompts", *(heading for name in names for heading in (name, "MAT")))
        note = f"{SPEC_MEANING} {PUBLISHED[SPEC_BENCH]} Here: {self.text}, up to {length} new tokens."
        return ReportTable(
            f"Speed-up and mean accepted tokens (MAT) as {self.name} defines them:", headings, tuple(cells), note
        )

    def _speed_table(self, name: str, rows: Sequence[Row]) -> ReportTable:
        """Acceptance of one strategy by category and draft position."""
        longest = max(len(row["benchmark"]["conditional_acceptance"]) for row in rows)
        positions = range(min(longest, SHOWN_POSITIONS))
        cells = []
        for row in rows:
            rates = row["benchmark"]["conditional_acceptance"]
            shown = (_text(rates[index] if index < len(rates) else None) for index in positions)
            length = _text(row["benchmark"]["acceptance_length"])
            cells.append((_category(row["task"]), str(row["prompts"]), length, *shown))
        headings = ("category", "prompts", "AL", *(str(index + 1) for index in positions))
        return ReportTable(f"Acceptance as {self.name} defines it, {name}, {self.text}:", headings, tuple(cells))


NO_SAMPLE = BenchmarkSample("", 0, 0)  # for prompts without a benchmark


def _category(task: str) -> str:
    return "overall" if task == ALL_TASKS else shortened(task, SHOWN_CATEGORY)


def _text(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)


Place = tuple[int, int]  # the repeat and the number of the prompt


@dataclass(frozen=True, slots=True)
class ServerTurns:
    """The answers of one server to all turns of a prompt in one repeat."""

    runs: Sequence[Run]

    @property
    def tokens(self) -> int | None:
        """New tokens of all turns."""
        return _total([run.new_tokens for run in self.runs])

    @property
    def forwards(self) -> int | None:
        """Forward passes of the target in all turns."""
        return _total([run.target_forwards for run in self.runs])

    @property
    def tokens_per_second(self) -> float | None:
        seconds = sum(run.seconds for run in self.runs)
        return self.tokens / seconds if self.tokens and seconds else None

    @property
    def tokens_per_forward(self) -> float | None:
        return self.tokens / self.forwards if self.tokens and self.forwards else None


def server_benchmark_figures(ours: Mapping[Place, ServerTurns], theirs: Mapping[Place, ServerTurns]) -> dict[str, Any]:
    """The fields of `benchmark_figures` for a server (`ours`) and its baseline (`theirs`), as far as they are known."""
    speeds: dict[int, list[tuple[float, float]]] = {}
    for place, turns in ours.items():
        other = theirs.get(place)
        if other and len(other.runs) == len(turns.runs) and turns.tokens_per_second and other.tokens_per_second:
            speeds.setdefault(place[0], []).append((turns.tokens_per_second, other.tokens_per_second))
    tokens, forwards = _total([turns.tokens for turns in ours.values()]), _total([t.forwards for t in ours.values()])
    lengths = [turns.tokens_per_forward for turns in ours.values()]
    known = [length for length in lengths if length is not None]
    return {
        "speedup": mean_speed_ratio(list(speeds.values())),
        "mean_accepted_tokens": tokens / forwards if tokens and forwards else None,
        "acceptance_length": mean(known) if known and len(known) == len(lengths) else None,
        "conditional_acceptance": _conditional([run for turns in ours.values() for run in turns.runs]),
    }


def _conditional(runs: Sequence[Run]) -> list[float]:
    """As `conditional_acceptance`, over verify passes with drafts. Empty if a server does not count by position."""
    known = [run for run in runs if run.drafted is not None and (run.accepted_by_position or not run.drafted)]
    rounds = _total([run.rounds for run in known])
    if len(known) < len(runs) or not rounds:
        return []
    by_position = [run.accepted_by_position or () for run in known]
    positions = zip_longest(*([accepted for accepted, _ in one] for one in by_position), fillvalue=0)
    return [now / before for before, now in pairwise([rounds, *map(sum, positions)]) if before]


def _total(values: Sequence[int | None]) -> int | None:
    """The sum, or None if one of the values is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
