"""Matches the runs of two files by prompt, strategy and task.

The task decides how much work a run is: length, processor, seed and the prompt's form. Other settings, such as gamma,
may differ; /compare reports these differences. A run without a counterpart is reported with the reason.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import geometric_mean
from typing import Any, NamedTuple

from utils.comparison.recorded_runs import CIRCUMSTANCES, RecordedRun, shown_value
from utils.comparison.records import SERVER

COMPARED = {**CIRCUMSTANCES, SERVER: ("url", "model", "kind", "prompt_form")}
TASK = ("length", "processor", "seed", "system", "special")
# These settings select what runs and what is shown, depend on the machine, or must be equal for a match.
NOT_COMPARED = ("speculative", "ngram", "target", "drafter", "debug", "costs", "turns", "chat")
TARGET_PART = "target"  # its runs do not depend on how drafts are made
DRAFTING = ("gamma", "drafter_kind", "verify", "ngram_storage", "ngram_limit", "top_k_filler", "reset_in_between")


SHOWN_LINES = 8  # line numbers shown in a sentence


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
        names = () if one.strategy == TARGET_PART else DRAFTING
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
    ignored = (*NOT_COMPARED, *(DRAFTING if one.strategy == TARGET_PART else ()))
    yield from (
        f"setting {name}: {shown_value(value)} in A, {shown_value(other.settings[name])} in B"
        for name, value in one.settings.items()
        if name not in ignored and name in other.settings and other.settings[name] != value
    )
