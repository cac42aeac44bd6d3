"""/server sweep: restarts a local server with several draft lengths and compares the answers.

Every length has its turn in two passes, the second one backwards, because the speed of a machine drifts. Afterwards the
server runs as before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from utils.bounds import WholeRange
from utils.commands.experiments.race_results import RANGE, race_row, spread
from utils.commands.experiments.race_runs import RaceItem, RaceResult, then_findings
from utils.commands.shared.columns import NOTHING, ResultColumn, ResultTable, figure, figures_of, marked
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.registry import CommandContext
from utils.comparison.arms import RunWatcher, ServerArm, complete
from utils.comparison.harness import Harness
from utils.comparison.reports import Finding, Note, Progress, Report, ReportEvent, shortened
from utils.comparison.runs import Run
from utils.comparison.speed_claims import (
    BASELINE,
    FASTER,
    TOO_FEW,
    Row,
    claim_text,
    interval_text,
    server_notes,
    speedup_text,
)
from utils.config.settings import Settings
from utils.errors import UserError
from utils.models import Count
from utils.prompts.conversation import Turns
from utils.prompts.prompt_files import Prompt
from utils.servers.address import parse_numbers, parse_words, split_words
from utils.servers.connection import ServerList
from utils.servers.processes.programs import DRAFTS, Launch
from utils.text import count_of

PASSES = 2
NUMBERS = {"repeats": (3, WholeRange(1, 100))}
MOST = 16  # maximum number of draft lengths
TABLE = ResultTable(
    figure("draft", "draft"),
    marked(spread("tokens/s", "tokens_per_second", "{:.1f}")),
    RANGE,
    spread("decoding", "decode_tokens_per_second", "{:.1f}", drop=3),
    ResultColumn("speed-up", speedup_text),
    ResultColumn("95 % interval", lambda row: interval_text(row["interval"]), 2),
    figure("acceptance", "acceptance_rate", "{:.3f}"),
    figure("tokens/forward", "tokens_per_target_forward", "{:.2f}", drop=4),
    ResultColumn("text", lambda row: {None: NOTHING, True: "same", False: "differs"}[row["same_as_draft_0"]]),
)
EXAMPLE = "/server sweep llama.cpp-ngram4 draft=0,2,4,8"
NO_PROMPT = "a prompt is needed: send one first."
BASE = "draft 0"
NO_BASE = "No speed-up is given without draft=0, only the highest median."
MEASURED = "Repeats within one start share its luck, so the interval may be too narrow."
DIFFERENT = "The texts differ, so part of the difference in speed may come from the text."


@dataclass(slots=True)
class DraftLength:
    """An arm: the server with one draft length, and its runs by number. `failure` says why it did not run."""

    harness: Harness
    server: str
    launch: Launch
    runs: dict[int, Run] = field(default_factory=dict)
    failure: str = ""

    @property
    def name(self) -> str:
        return f"draft {self.launch.drafts}"

    title = colour = ""
    strategy = None

    def run(self, text: str, settings: Settings, history: Turns = (), watch: RunWatcher | None = None) -> Run:
        """The answer of the server as it runs now, which is compared with that of draft 0."""
        connection = self.harness.state.servers.connections[self.server]
        run = complete(ServerArm(connection, self.harness.loaded).run(text, settings, history, watch))
        return replace(run, name=self.name, baseline=BASE)


def sweep(argument: str, context: CommandContext) -> Outcome:
    plain, options = parse_words(split_words(argument), ("draft", *NUMBERS), most=1)
    servers, prompts = context.harness.state.servers, context.harness.state.prompts
    if not plain or "draft" not in options:
        raise UserError(f"name a server that this session has started, and draft lengths: {EXAMPLE}")
    name = plain[0]
    launch = servers.local.launch_of(name)
    if not launch.drafter:
        raise UserError(f"{name} has no drafter, so draft lengths change nothing; /server start with drafter= first.")
    drafts, repeats = _drafts(options["draft"]), parse_numbers(options, NUMBERS)["repeats"]
    if not prompts:
        raise UserError(NO_PROMPT)
    lengths = [DraftLength(context.harness, name, replace(launch, draft=draft)) for draft in drafts]
    item = RaceItem(1, Prompt(prompts[-1]), name, context.settings, lengths)
    each = f"{count_of(PASSES, 'start')} x {count_of(repeats, 'run')}"
    report = Report(
        *("server sweep", prompts[-1], context.settings, TABLE.headings),
        then_findings(
            _measured(servers, item, lengths, repeats),
            lambda: map(TABLE.finding, _rows(item, lengths)),
        ),
        conclusion,
        optional=TABLE.optional,
        title=f'/server sweep {name}, {each} of "{shortened(prompts[-1])}"',
    )
    return [RunReport(report)]


def _drafts(text: str) -> list[int]:
    drafts = list(dict.fromkeys(DRAFTS.parse(word.strip()) for word in text.split(",")))
    if not 2 <= len(drafts) <= MOST:
        raise UserError(f"draft= takes two to {MOST} different lengths, for example draft=0,2,4,8.")
    return drafts


def _measured(
    servers: ServerList, item: RaceItem, lengths: Sequence[DraftLength], repeats: int
) -> Iterator[ReportEvent]:
    """Two passes over the lengths; then the server is restored."""
    before = servers.local.launch_of(item.group)
    try:
        for number in range(PASSES):
            for length in list(lengths)[:: -1 if number % 2 else 1]:
                if not length.failure:
                    yield from _runs(servers, item, length, range(number * repeats, (number + 1) * repeats))
    finally:
        for line in servers.restart(item.group, before):
            yield Progress(line)


def _runs(servers: ServerList, item: RaceItem, length: DraftLength, numbers: range) -> Iterator[ReportEvent]:
    """One start of the server and these runs. An error is noted."""
    where = f"{item.group} with {length.name}, pass {numbers.start // len(numbers) + 1} of {PASSES}"
    runs: dict[int, Run] = {}
    try:
        for line in servers.restart(item.group, length.launch):
            yield Progress(Count(f"{where}: {line}") if isinstance(line, Count) else f"{where}: {line}")
        length.run(item.prompt.text, item.settings)  # the first answer includes the first use
        for number in numbers:
            yield Progress(f"{where}: run {number - numbers.start + 1} of {len(numbers)} ...")
            runs[number] = length.run(item.prompt.text, item.settings)
    except UserError as error:
        length.failure = str(error)
        yield Note(f"{length.name}: {error}")
    length.runs |= runs


def _rows(item: RaceItem, lengths: Sequence[DraftLength]) -> Iterator[dict[str, Any]]:
    """The figures of each length. Runs of the same number in the same pass are compared."""
    results: list[RaceResult] = []
    for number in dict.fromkeys(number for length in lengths for number in length.runs):
        runs = [(length, (length.runs[number],)) for length in lengths if number in length.runs]
        results += RaceResult.of(item, number, runs)
    for length in lengths:
        if own := [result for result in results if result.arm is length]:
            same = [result.same for result in own if result.same is not None]
            row = race_row(item.group, own) | {"draft": length.launch.drafts}
            yield row | {"same_as_draft_0": all(same) if same else None}


def conclusion(findings: Sequence[Finding]) -> list[str]:
    """The fastest draft length, and whether the difference is distinguishable from noise."""
    rows = figures_of(findings)
    if not rows:
        return []
    others = [row for row in rows if row["draft"]]
    if not any(row["verdict"] == BASELINE for row in rows):
        best = max(rows, key=lambda row: median(row["tokens_per_second"]))
        return [NO_BASE, f"The highest is {best['strategy']}: {median(best['tokens_per_second']):.1f} tokens/s."]
    compared = [row for row in others if row["speedup"] is not None and not row["without_gain"]]
    lines = [f"{row['strategy']}: no draft saved a forward pass." for row in others if row["without_gain"]]
    if compared:
        lines.append(_best(max(compared, key=lambda row: float(row["speedup"]))))
    if any(row["same_as_draft_0"] is False for row in others):
        lines.append(DIFFERENT)
    lines += [line for row in rows for line in server_notes(row["strategy"], row)]
    return [*lines, MEASURED] if compared else lines


def _best(row: Row) -> str:
    text = claim_text(row)
    if row["verdict"] == FASTER:
        return f"{row['strategy']} is the fastest: {text}."
    if row["verdict"] == TOO_FEW:
        return f"The highest is {row['strategy']}: {text}, but there are too few runs to tell."
    return f"No draft length is measurably faster than {BASE}; the highest is {row['strategy']}: {text}."
