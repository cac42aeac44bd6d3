"""/replay: runs every generation of a --json file again, and compares the record (A) with the run of now (B).

The settings are those of each record. Models, engine and versions are the present ones, and differences are reported.
Each run has an n-gram storage of its own, as with /ngram keep off.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from utils.commands.experiments.compared_runs import (
    TABLE,
    comparison_charts,
    comparison_lines,
    match_finding,
)
from utils.commands.experiments.race_runs import time_left
from utils.commands.shared.columns import figures_of
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.paths import path_in
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.arms import complete
from utils.comparison.harness import Harness
from utils.comparison.recorded_runs import (
    CIRCUMSTANCES,
    Problem,
    RecordedRun,
    RecordsFile,
    RunMatch,
    differences,
    problem_sentences,
    read_records,
)
from utils.comparison.records import GENERATION, circumstances
from utils.comparison.reports import Finding, Progress, Report, ReportEvent
from utils.comparison.strategies import Strategy
from utils.comparison.warm_up import shortened
from utils.config.setting_table import from_json
from utils.config.settings import Settings
from utils.decode.model_info import vocabulary_size
from utils.errors import UserError, check_choice
from utils.text import decode

OTHER_TEXT = "a recorded text is not the text of its token ids: the tokenizer differs, or the file was edited"
KEPT_STORAGE = "recorded with /ngram keep on: drafts may come from earlier prompts, so the acceptance may differ"
UNEXPLAINED = "Nothing that is recorded explains the other texts: /audit checks what is deterministic here."


def _replay(argument: str, context: CommandContext) -> Outcome:
    file = read_records(path_in(argument, "/replay runs.jsonl"))
    replayed = _Replay(context, file, [run for run in file.runs if run.record == GENERATION])
    if not replayed.recorded:
        raise UserError(f"{file.path} holds no record of a generation. --json FILE writes one for each.")
    file.others.update({run.line: run.record for run in file.runs if run.record != GENERATION}.values())
    report = Report(
        *("replay", str(file.path), context.settings, TABLE.headings, replayed.events(), replayed.conclusion),
        charts=comparison_charts,
        optional=TABLE.optional,
        title=f"/replay: A is {file.path}, B is the same run now",
    )
    return [RunReport(report)]


@dataclass(slots=True)
class _Replay:
    """The records of a file and their runs of now. `warm` has what has been warmed up."""

    context: CommandContext
    file: RecordsFile
    recorded: Sequence[RecordedRun]
    matches: list[RunMatch] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    warm: set[tuple[str, ...]] = field(default_factory=set)

    def events(self) -> Iterator[ReportEvent]:
        seconds: list[float] = []
        for index, past in enumerate(self.recorded):
            left = time_left(seconds, len(self.recorded) - index)
            yield Progress(f"{index + 1} of {len(self.recorded)} ({past.strategy}){left} ...")
            try:
                spent, found = self._rerun(past)
            except UserError as error:
                self.problems.append(Problem("A", past.line, str(error)))
                continue
            seconds.append(spent)
            self.matches.append(found)
            yield match_finding(found, len(self.matches) - 1)
        if not self.matches:
            raise UserError(f"none of the records could be run again. {' '.join(problem_sentences(self.problems))}")

    def _rerun(self, past: RecordedRun) -> tuple[float, RunMatch]:
        """Run a record again. Returns the seconds, and the record with its run. Raises UserError if it cannot run."""
        harness = self.context.harness
        # An unsupported value becomes a note and keeps its default, so the record can still run.
        settings, notes = from_json(past.settings, self.context.limits)
        strategy = _strategy(past, settings, harness)
        arm = harness.arm(strategy)
        if (key := (strategy.name, *settings.drafter_kind)) not in self.warm:
            complete(arm.run(past.prompt, shortened(settings), past.history))
            self.warm.add(key)
        run = complete(arm.run(past.prompt, settings, past.history))
        if not run.tokens_per_second:
            raise UserError("the run has no speed.")
        state = circumstances(harness.pair, settings)
        now = replace(
            past,
            circumstances={part: state[part] for part in CIRCUMSTANCES},
            speeds=(run.tokens_per_second,),
            speedups=(),
            text=run.text,
            tokens=run.tokens,
            prompt_tokens=run.prompt_tokens,
            accepted=run.accepted,
            drafted=run.drafted,
            drafter_kind=strategy.drafter_label(harness.pair),
        )
        if past.text is not None and past.text != decode(harness.pair.tokenizer, list(past.tokens or ())):
            notes.append(OTHER_TEXT)
        if strategy.keeps_texts and not settings.reset_in_between:
            notes.append(KEPT_STORAGE)
        return run.seconds, RunMatch((past,), (now,), tuple(notes))

    def conclusion(self, findings: Sequence[Finding]) -> list[str]:
        problems = [*self.file.left_out, *problem_sentences(self.problems)]
        if left := len(self.recorded) - len(self.matches) - len(self.problems):
            problems.append(f"{left} of {len(self.recorded)} records were not reached.")
        lines = comparison_lines(self.matches, problems, self.file.others, findings)
        changed = any(row["same_text"] is False for row in figures_of(findings))
        return [*lines, *([UNEXPLAINED] if changed and not differences(self.matches) else [])]


def _strategy(past: RecordedRun, settings: Settings, harness: Harness) -> Strategy:
    """The strategy of the record. Raises UserError if the record cannot be run again."""
    if (highest := max(past.tokens or (), default=0)) >= vocabulary_size(harness.pair.target):
        raise UserError(f"Its token id {highest} is outside the vocabulary of the target.")
    strategies = {strategy.name: strategy for strategy in harness.variants(settings)}
    strategy = strategies[check_choice(past.strategy, tuple(strategies), "strategy")]
    if strategy.needs_drafter and harness.pair.drafter is None:
        raise UserError("No drafter is loaded: start with --drafter, or /load one.")
    return strategy


REPLAY = Command(
    "replay",
    "FILE",
    "run the records of a file again",
    _replay,
    group="checks",
    page=Page(
        "Run every generation of a --json file again with its own settings, compare text, acceptance and speed, and "
        "name every difference in versions, models, engine and settings.",
        ("> /replay runs.jsonl", "3 of 3 texts are the same"),
        see_also=("compare", "export", "audit"),
    ),
    files=("",),
)
