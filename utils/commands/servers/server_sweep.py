"""/server sweep: restarts a local server with several draft lengths and compares the answers.

Every length has its turn in two passes, the second one backwards, because the speed of a machine drifts. Afterwards the
server runs as before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from utils.bounds import WholeRange
from utils.commands.experiments.repeated_runs import median_text, range_text, then_findings
from utils.commands.servers.server_words import parse_words
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.registry import CommandContext
from utils.comparison.arms import request_maker
from utils.comparison.charts import DotChart, DotRow
from utils.comparison.harness import Harness
from utils.comparison.reports import Finding, Note, Progress, Report, ReportEvent, shortened
from utils.comparison.runs import Run
from utils.comparison.speed_claims import BASELINE, FASTER, TOO_FEW, Row, SpeedClaim, interval_text, speedup_text
from utils.comparison.strategies import is_greedy
from utils.config.settings import Settings
from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.metrics.results import first_difference
from utils.models import Count
from utils.servers.connection import ServerList
from utils.servers.processes.programs import DRAFTS, Launch
from utils.text import count_of

PASSES, REPEATS = 2, 3
MAX_REPEATS = WholeRange(1, 100)
MOST = 16  # maximum number of draft lengths
HEADINGS = (
    "draft",
    "tokens/s",
    "range",
    "decoding",
    "speed-up",
    "95 % interval",
    "acceptance",
    "tokens/forward",
    "text",
)
OPTIONAL = ("range", "95 % interval", "decoding", "tokens/forward")
OPTIONS = ("draft", "repeats")
EXAMPLE = "/server sweep llama.cpp-ngram4 draft=0,2,4,8"
NO_PROMPT = "a prompt is needed: send one first."
BASE = "draft 0"
NO_BASE = "No speed-up is given without draft=0, only the highest median."
MEASURED = "Repeats within one start share its luck, so the interval may be too narrow."
DIFFERENT = "The texts differ, so part of the difference in speed may come from the text."


@dataclass(slots=True)
class Length:
    """One draft length and its runs by pass. `failure` says why the server did not run with it."""

    launch: Launch
    runs: list[list[Run]] = field(default_factory=list)
    failure: str = ""

    @property
    def draft(self) -> int:
        return self.launch.drafts

    @property
    def all_runs(self) -> list[Run]:
        return [run for runs in self.runs for run in runs]


def sweep(argument: str, context: CommandContext) -> Outcome:
    words = parse_words(argument, OPTIONS, most=1)
    servers, prompts = context.harness.state.servers, context.harness.state.prompts
    if not words.plain or "draft" not in words.options:
        raise UserError(f"name a server that this session has started, and draft lengths: {EXAMPLE}")
    name = words.plain[0]
    launch = servers.local.launch_of(name)
    if not launch.drafter:
        raise UserError(f"{name} has no drafter, so draft lengths change nothing; /server start with drafter= first.")
    lengths = [Length(launch.with_draft(draft)) for draft in _drafts(words.options["draft"])]
    repeats = MAX_REPEATS.parse(words.options["repeats"]) if "repeats" in words.options else REPEATS
    if not prompts:
        raise UserError(NO_PROMPT)
    settings, text = context.settings, prompts[-1]
    events = _events(context.harness, name, lengths, text=text, settings=settings, repeats=repeats)
    title = f'/server sweep {name}, {count_of(PASSES, "start")} x {count_of(repeats, "run")} of "{shortened(text)}"'
    report = Report(
        "server sweep",
        text,
        settings,
        HEADINGS,
        events,
        conclusion,
        charts=sweep_charts,
        optional=OPTIONAL,
        title=title,
    )
    return [RunReport(report)]


def _drafts(text: str) -> list[int]:
    drafts = list(dict.fromkeys(DRAFTS.parse(word.strip()) for word in text.split(",")))
    if not 2 <= len(drafts) <= MOST:
        raise UserError(f"draft= takes two to {MOST} different lengths, for example draft=0,2,4,8.")
    return drafts


def _events(
    harness: Harness, name: str, lengths: Sequence[Length], *, text: str, settings: Settings, repeats: int
) -> Iterator[ReportEvent]:
    greedy = is_greedy(settings)
    servers = harness.state.servers
    measured = _measured(harness, name, lengths, text=text, settings=settings, repeats=repeats)
    yield from then_findings(_restored(measured, servers, name), lambda: _findings(lengths, greedy=greedy))


def _restored(events: Iterator[ReportEvent], servers: ServerList, name: str) -> Iterator[ReportEvent]:
    """The events; then the server is restored."""
    before = servers.local.launch_of(name)
    try:
        yield from events
    finally:
        for line in servers.restart(name, before):
            yield Progress(line)


def _measured(
    harness: Harness, name: str, lengths: Sequence[Length], *, text: str, settings: Settings, repeats: int
) -> Iterator[ReportEvent]:
    servers, make = harness.state.servers, request_maker(harness.loaded, text, settings)
    for number in range(PASSES):
        for length in list(lengths)[:: -1 if number % 2 else 1]:
            if length.failure:
                continue
            where = f"{name} with draft {length.draft}, pass {number + 1} of {PASSES}"
            runs: list[Run] = []
            try:
                for line in servers.restart(name, length.launch):
                    yield Progress(Count(f"{where}: {line}") if isinstance(line, Count) else f"{where}: {line}")
                connection = servers.connections[name]
                connection.ask(make)  # the first answer includes the first use
                for repeat in range(repeats):
                    yield Progress(f"{where}: run {repeat + 1} of {repeats} ...")
                    run = Run.of_server(connection.address, connection.ask(make))
                    if run.finish is FinishReason.INTERRUPTED:
                        raise KeyboardInterrupt
                    runs.append(run)
            except UserError as error:
                length.failure = str(error)
                yield Note(f"draft {length.draft}: {error}")
            length.runs.append(runs)


def _findings(lengths: Sequence[Length], *, greedy: bool) -> Iterator[Finding]:
    base = next((length for length in lengths if length.draft == 0), None)
    for length in lengths:
        if runs := length.all_runs:
            figures = _figures(length, base, greedy=greedy)
            yield Finding(_cells(figures, runs), figures)


def _figures(length: Length, base: Length | None, *, greedy: bool) -> dict[str, Any]:
    runs = length.all_runs
    pairs = [] if base is None else _pairs(length, base)
    speedups = [
        ours.tokens_per_second / theirs.tokens_per_second
        for ours, theirs in pairs
        if ours.tokens_per_second and theirs.tokens_per_second
    ]
    same = [_first_difference(ours, theirs) is None for ours, theirs in pairs] if greedy else []
    per_forward = runs[0].tokens_per_target_forward if length.draft else None
    claim = SpeedClaim.of([speedups], baseline=length is base, tokens_per_forward=per_forward)
    return {
        "setting": f"draft {length.draft}",
        "draft": length.draft,
        "tokens_per_second": [run.tokens_per_second or 0.0 for run in runs],
        "decode_tokens_per_second": [run.decode_tokens_per_second for run in runs],
        "first_token_seconds": [run.first_seconds for run in runs],
        "drafted": _total(run.drafted for run in runs),
        "accepted": _total(run.accepted for run in runs),
        "tokens_per_target_forward": per_forward,
        "same_as_draft_0": all(same) if same else None,
        "speedups": speedups,
        **claim.figures,
    }


def _pairs(length: Length, base: Length) -> list[tuple[Run, Run]]:
    """The runs and those of the base with the same number in the same pass. After Ctrl-C one list may be shorter."""
    passes = zip(length.runs, base.runs, strict=False)
    return [pair for ours, theirs in passes for pair in zip(ours, theirs, strict=False)]


def _first_difference(ours: Run, theirs: Run) -> int | None:
    """The index of the first different token if both servers return ids, otherwise of the first different character."""
    ids = ours.tokens, theirs.tokens
    if ids[0] is not None and ids[1] is not None:
        return first_difference(ids[0], ids[1])
    return first_difference(ours.text, theirs.text)


def _total(counts: Iterator[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _cells(row: dict[str, Any], runs: Sequence[Run]) -> tuple[str, ...]:
    decode = [speed for speed in row["decode_tokens_per_second"] if speed]
    same = {None: "-", True: "same", False: "differs"}[row["same_as_draft_0"]]
    return (
        str(row["draft"]),
        median_text(row["tokens_per_second"], "{:.1f}"),
        range_text(row["tokens_per_second"]),
        f"{median(decode):.1f}" if decode else "-",
        speedup_text(row),
        interval_text(row["interval"]),
        f"{row['accepted'] / row['drafted']:.3f}" if row["drafted"] else "-",
        f"{row['tokens_per_target_forward']:.2f}" if row["tokens_per_target_forward"] else "-",
        same,
    )


def conclusion(findings: Sequence[Finding]) -> list[str]:
    """The fastest draft length, and whether the difference is distinguishable from noise."""
    rows: list[dict[str, Any]] = [finding.figures for finding in findings]
    if not rows:
        return []
    others = [row for row in rows if row["draft"]]
    if not any(row["verdict"] == BASELINE for row in rows):
        best = max(rows, key=lambda row: median(row["tokens_per_second"]))
        return [NO_BASE, f"The highest is {best['setting']}: {median(best['tokens_per_second']):.1f} tokens/s."]
    compared = [row for row in others if row["speedup"] is not None and not row["without_gain"]]
    lines = [f"{row['setting']}: no draft saved a forward pass." for row in others if row["without_gain"]]
    if compared:
        lines.append(_best(max(compared, key=lambda row: float(row["speedup"]))))
    if any(row["same_as_draft_0"] is False for row in others):
        lines.append(DIFFERENT)
    return [*lines, MEASURED] if compared else lines


def _best(row: Row) -> str:
    text = f"{row['speedup']:.2f}x {BASE}"
    if row["interval"] is not None:
        text += f" (95 % interval {row['interval'][0]:.2f} to {row['interval'][1]:.2f})"
    if row["verdict"] == FASTER:
        return f"{row['setting']} is the fastest: {text}."
    if row["verdict"] == TOO_FEW:
        return f"The highest is {row['setting']}: {text}, but there are too few runs to tell."
    return f"No draft length is measurably faster than {BASE}; the highest is {row['setting']}: {text}."


def sweep_charts(findings: Sequence[Finding]) -> list[DotChart]:
    """The speed-up of each run over draft 0, or the throughput of each run without draft 0."""
    rows = [finding.figures for finding in findings]
    if any(row["speedups"] for row in rows if row["draft"]):
        dots = [DotRow(row["setting"], row["speedups"], series=row["setting"]) for row in rows if row["speedups"]]
        dots = [dot for dot in dots if dot.label != BASE]
        return [DotChart(f"speed-up over {BASE}, one dot per run", "speed-up", dots, 1.0, BASE)]
    speeds = [DotRow(row["setting"], row["tokens_per_second"], series=row["setting"]) for row in rows]
    return [DotChart("throughput, one dot per run", "tokens/s", speeds)]
