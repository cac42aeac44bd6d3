"""/server load: concurrent requests to a server and its baseline, in turns. At which load does speculation stop paying?
Requests are the prompts of this session, without end tokens if the server supports that.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from math import ceil, isfinite
from typing import Any

from utils.bounds import WholeRange
from utils.commands.experiments.race_results import OTHER_REASON
from utils.commands.experiments.race_runs import rotated, then_findings
from utils.commands.servers.server_words import parse_numbers, parse_words
from utils.commands.shared.columns import ResultColumn, ResultTable, Row, figure, figures_of, rate_of
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.registry import CommandContext
from utils.comparison.arms import request_maker
from utils.comparison.charts import Chart, LineChart
from utils.comparison.harness import Harness
from utils.comparison.reports import Finding, Note, Progress, Report, ReportEvent
from utils.comparison.speed_claims import (
    FASTER,
    MIN_VALUES,
    NOT_DISTINGUISHABLE,
    SLOWER,
    TOO_FEW,
    SpeedClaim,
    interval_text,
    speedup_text,
)
from utils.config.settings import Settings
from utils.errors import UserError, check_choice
from utils.servers.address import TARGET, ServerAddress
from utils.servers.connection import Connection
from utils.servers.kinds.completion import ServerRequest
from utils.servers.load_slice import LoadSlice, TooSlow, median_and_p95, run_slice
from utils.text import count_of

CONCURRENCIES = (1, 2, 4, 8, 16)
AT_ONCE = WholeRange(1, 64)
NUMBERS = {
    "requests": (10, WholeRange(1, 10_000)),
    "turns": (5, WholeRange(1, 50)),
    "length": (64, WholeRange(2, 100_000)),
    "seconds": (600, WholeRange(1, 86_400)),
}
OPTIONS = ("concurrency", *NUMBERS)
NO_PROMPT = "a prompt is needed: send one first; the requests are the prompts of this session."
EXAMPLE = "/server load spec concurrency=1,4,16"
NO_BASELINE = "Nothing to compare with: a server that was added with baseline=NAME is measured beside that one."
SAMPLE = "Turns of one measurement share the state of the machine, so an interval may be too narrow."
COUNTED = "The server counts no tokens, so it has no throughput."
MORE_TURNS = f"Fewer than {MIN_VALUES} turns do not tell a difference from noise: turns={MIN_VALUES} does."
SAVED_NOTHING = "No draft was accepted, so drafts cannot have made it faster."
STOPS = "Speculation stops paying between {} and {} requests at once."
NO_GAIN = "With more than {} at once, neither a gain nor a loss was measured."
SENTENCES = {
    FASTER: "{server} has a higher throughput than {baseline} with this many requests at once: {loads}.",
    SLOWER: "{server} has a lower throughput than {baseline} with this many requests at once: {loads}.",
    NOT_DISTINGUISHABLE: "{server} and {baseline} are not distinguishable with this many requests at once: {loads}.",
    TOO_FEW: "{server} beside {baseline}, by requests at once: {loads}.",
}


@dataclass(slots=True)
class LoadCell:
    """One server at one concurrency, with its measurements by turn."""

    concurrency: int
    address: ServerAddress
    slices: dict[int, LoadSlice] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens of all turns divided by their seconds."""
        counted = [one for one in self.slices.values() if one.tokens is not None]
        seconds = sum(one.seconds for one in counted)
        return sum(one.tokens or 0 for one in counted) / seconds if seconds else None


LoadCells = Mapping[tuple[int, str], LoadCell]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is measured. `requests` is the minimum for each server and concurrency, `seconds` the time limit.

    Every turn sends every prompt equally often at every concurrency, so that figures of different loads are those of
    the same prompts.
    """

    connections: Sequence[Connection]
    texts: Sequence[str]
    concurrencies: Sequence[int]
    requests: int
    turns: int
    length: int
    seconds: int
    cells: dict[tuple[int, str], LoadCell] = field(default_factory=dict)

    @property
    def sent(self) -> Sequence[str]:
        """The prompts that are sent: as many as one turn needs."""
        return self.texts[: max(self.fewest, *self.concurrencies)]

    @property
    def fewest(self) -> int:
        """The fewest requests of a turn."""
        return ceil(self.requests / self.turns)

    def per_turn(self, concurrency: int) -> int:
        """Requests of one turn: at least as many as are sent at once."""
        return ceil(max(self.fewest, concurrency) / len(self.sent)) * len(self.sent)

    def slices(self) -> Iterator[tuple[int, int, Connection]]:
        """Concurrency, turn and server, in the order of the measurement. Servers take turns at going first."""
        for concurrency in self.concurrencies:
            for turn in range(self.turns):
                for connection in rotated(self.connections, turn):
                    yield concurrency, turn, connection


def load(argument: str, context: CommandContext) -> Outcome:
    words = parse_words(argument, OPTIONS, most=1)
    state = context.harness.state
    names = [address.name for address in state.servers.addresses]
    if not words.plain or not names:
        raise UserError(f"name a server of this session: {', '.join(names) or 'there is none'}; for example {EXAMPLE}")
    name = check_choice(words.plain[0], tuple(names), "server")
    if not state.prompts:
        raise UserError(NO_PROMPT)
    numbers = parse_numbers(words.options, NUMBERS)
    plan = LoadPlan(
        _with_baseline(name, context.harness),
        list(dict.fromkeys(state.prompts)),
        _concurrencies(words.options.get("concurrency")),
        requests=numbers["requests"],
        turns=numbers["turns"],
        length=numbers["length"],
        seconds=numbers["seconds"],
    )
    events = then_findings(_measured(context.harness, plan, context.settings), lambda: findings_of(plan.cells))
    title = f"/server load {name}, {count_of(plan.length, 'token')} a request"
    report = Report(
        *("server load", state.prompts[-1], context.settings, TABLE.headings, events, conclusion),
        charts=load_charts,
        optional=TABLE.optional,
        title=title,
    )
    return [RunReport(report)]


def _concurrencies(text: str | None) -> tuple[int, ...]:
    if text is None:
        return CONCURRENCIES
    return tuple(sorted({AT_ONCE.parse(word.strip()) for word in text.split(",")}))


def _with_baseline(name: str, harness: Harness) -> list[Connection]:
    """The server, and its baseline if that is also a server."""
    servers = harness.state.servers
    baseline = servers.connections[name].address.baseline
    return [servers.connections[one] for one in (name, baseline) if one not in (None, TARGET)]


def _measured(harness: Harness, plan: LoadPlan, settings: Settings) -> Iterator[ReportEvent]:
    singles: dict[str, float] = {}
    requests: dict[str, Sequence[ServerRequest]] = {}
    for connection in plan.connections:
        name = connection.address.name
        yield Progress(f"warming up {name} ...")
        requests[name] = _requests(harness, plan, settings, connection)
        for _ in range(2):  # the first answer includes the first use
            one = run_slice(connection, requests[name][:1], concurrency=1, limit=plan.seconds)
        singles[name] = one.seconds
    if len(plan.sent) < len(plan.texts):
        yield Note(f"The first {len(plan.sent)} of {count_of(len(plan.texts), 'prompt')} are sent.")
    yield Note(_estimate(plan, singles))
    began = time.monotonic()
    weights = [plan.per_turn(count) * singles[connection.address.name] for count, _, connection in plan.slices()]
    for index, (concurrency, turn, connection) in enumerate(plan.slices()):
        left = plan.seconds - (time.monotonic() - began)
        if left <= 0:
            yield Note(f"The time limit of {plan.seconds} s was reached: what follows was not measured.")
            return
        name = connection.address.name
        count = plan.per_turn(concurrency)
        yield Progress(f"{name}, {concurrency} at once, turn {turn + 1} of {plan.turns}, at most {left:.0f} s left ...")
        share = left * weights[index] / sum(weights[index:])
        sent = list(islice(cycle(requests[name]), count))
        try:
            measured = run_slice(connection, sent, concurrency=concurrency, limit=max(share, singles[name]))
        except TooSlow as error:
            yield Note(f"{name}, {concurrency} at once: {error} More time is given with seconds=.")
            continue
        plan.cells.setdefault((concurrency, name), LoadCell(concurrency, connection.address)).slices[turn] = measured
        if measured.failures:
            yield Note(f"{name}, {concurrency} at once: {len(measured.failures)} failed: {measured.failures[0]}")


def _requests(harness: Harness, plan: LoadPlan, settings: Settings, connection: Connection) -> list[ServerRequest]:
    client, kind = connection.client, connection.kind
    made = [request_maker(harness.loaded, text, settings)(kind, client) for text in plan.sent]
    return [replace(request, max_tokens=plan.length, ignore_eos=True) for request in made]


def _estimate(plan: LoadPlan, singles: dict[str, float]) -> str:
    """An upper bound of the duration, estimated from single requests to each server."""
    counts = [(plan.per_turn(count), connection.address.name) for count, _, connection in plan.slices()]
    total = sum(count for count, _ in counts)
    most = sum(count * singles[name] for count, name in counts)
    return (
        f"{count_of(total, 'request')}: about {most:.0f} s if requests at the same time gain nothing, less if they do; "
        f"none is sent after {plan.seconds} s (seconds=)."
    )


def findings_of(cells: LoadCells) -> Iterator[Finding]:
    """One finding for each cell, with the speed-up of a server over its baseline in the same turns."""
    for (concurrency, _), cell in cells.items():
        yield TABLE.finding(_figures(cell, cells.get((concurrency, cell.address.baseline or ""))))


def _figures(cell: LoadCell, baseline: LoadCell | None) -> dict[str, Any]:
    slices = list(cell.slices.values())
    ratios = [] if baseline is None else list(_ratios(cell, baseline))
    first = [seconds for one in slices for seconds in one.first_token_seconds]
    each = [seconds for one in slices for seconds in one.token_seconds]
    known = [one.acceptance for one in slices if one.acceptance is not None]
    valid = [one for one in known if one.valid]
    drafted, accepted = (
        (sum(one.drafted for one in valid), sum(one.accepted for one in valid)) if valid else (None, None)
    )
    claim = SpeedClaim.of([ratios], tokens_per_forward=1.0 if drafted and not accepted else None)
    return {
        "server": cell.address.name,
        "baseline": cell.address.baseline if baseline is not None else None,
        "concurrency": cell.concurrency,
        "requests": sum(len(one.completions) for one in slices),
        "failed": sum(len(one.failures) for one in slices),
        "unfinished": sum(one.unfinished for one in slices),
        "seconds": [one.seconds for one in slices],
        "tokens": [one.tokens for one in slices],
        "tokens_per_second": cell.tokens_per_second,
        "first_token_seconds": median_and_p95(first),
        "token_seconds": median_and_p95(each),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_notes": sorted({one.note for one in known if one.note}),
        "speedups": ratios,
        **claim.figures,
    }


def _ratios(cell: LoadCell, baseline: LoadCell) -> Iterator[float]:
    """The throughput over the baseline's, turn by turn. Only on the same host: other hosts are different machines."""
    if cell.address.host != baseline.address.host:
        return
    for turn, ours in cell.slices.items():
        theirs = baseline.slices.get(turn)
        if theirs is not None and ours.tokens_per_second and theirs.tokens_per_second:
            ratio = ours.tokens_per_second / theirs.tokens_per_second
            if isfinite(ratio):
                yield ratio


def _times(pair: tuple[float, float] | None) -> str:
    return "-" if pair is None else f"{1000 * pair[0]:.0f} ({1000 * pair[1]:.0f}) ms"


def _requests_text(row: Row) -> str:
    sent = row["requests"] + row["failed"] + row["unfinished"]
    return str(sent) if row["requests"] == sent else f"{row['requests']} of {sent}"


TABLE = ResultTable(
    figure("at once", "concurrency"),
    figure("server", "server"),
    figure("tokens/s", "tokens_per_second", "{:.1f}"),
    ResultColumn("first token (95 %)", lambda row: _times(row["first_token_seconds"]), drop=3),
    ResultColumn("per token (95 %)", lambda row: _times(row["token_seconds"])),
    rate_of("acceptance", "accepted", "drafted", drop=2),
    ResultColumn("speed-up", speedup_text),
    ResultColumn("95 % interval", lambda row: interval_text(row["interval"])),
    ResultColumn("requests", _requests_text, drop=1),
)


def conclusion(findings: Sequence[Finding]) -> list[str]:
    """The loads at which the server is faster than its baseline, and those at which it is not."""
    rows = figures_of(findings)
    lines = [COUNTED] if any(row["tokens_per_second"] is None for row in rows) else []
    compared = [row for row in rows if row["speedups"]]
    if not compared:
        return [*lines, NO_BASELINE] if all(row["baseline"] is None for row in rows) else lines
    lines += [_sentence(verdict, compared) for verdict in SENTENCES if verdict in _verdicts(compared)]
    lines += _crossing(compared)
    if any(row["verdict"] == FASTER and not row["drafted"] for row in compared):
        lines.append(OTHER_REASON.format(compared[0]["server"]))
    if all(row["drafted"] and not row["accepted"] for row in compared):
        lines.append(SAVED_NOTHING)
    notes = dict.fromkeys(note for row in compared for note in row["acceptance_notes"])
    return [
        *lines,
        *(f"Acceptance: {note}." for note in notes),
        MORE_TURNS if TOO_FEW in _verdicts(compared) else SAMPLE,
    ]


def _verdicts(rows: Sequence[Row]) -> set[str]:
    return {row["verdict"] for row in rows}


def _sentence(verdict: str, rows: Sequence[Row]) -> str:
    chosen = [row for row in rows if row["verdict"] == verdict]
    about = "about " if verdict == TOO_FEW else ""
    loads = ", ".join(f"{row['concurrency']} ({about}{speedup_text(row)})" for row in chosen)
    return SENTENCES[verdict].format(server=chosen[0]["server"], baseline=chosen[0]["baseline"], loads=loads)


def _crossing(rows: Sequence[Row]) -> list[str]:
    """The loads between which speculation stops paying: the highest one with a gain and the next one with a loss.

    A load with neither shows no loss, so it gets a sentence of its own.
    """
    last = max((index for index, row in enumerate(rows) if row["verdict"] == FASTER), default=None)
    if last is None:
        return []
    later = [row for row in rows[last + 1 :] if row["verdict"] != TOO_FEW]
    slower = next((row for row in later if row["verdict"] == SLOWER), None)
    if slower is not None:
        return [STOPS.format(rows[last]["concurrency"], slower["concurrency"])]
    return [NO_GAIN.format(count_of(rows[last]["concurrency"], "request"))] if later else []


def load_charts(findings: Sequence[Finding]) -> list[Chart]:
    """Throughput and the median time per token over the concurrency."""
    rows = figures_of(findings)
    counts = sorted({row["concurrency"] for row in rows})
    if len(counts) < 2:
        return []
    ticks = [str(count) for count in counts]
    speeds = _series(rows, counts, lambda row: row["tokens_per_second"])
    times = _series(rows, counts, lambda row: row["token_seconds"] and 1000 * row["token_seconds"][0])
    return [
        LineChart("throughput, tokens/s of all requests", "requests at once", ticks, speeds),
        LineChart("milliseconds per token after the first, median", "requests at once", ticks, times),
    ]


def _series(
    rows: Sequence[Row], counts: Sequence[int], value: Callable[[Row], float | None]
) -> dict[str, list[float | None]]:
    """The values of each server by concurrency, with None for a concurrency that was not measured."""
    found = {(row["server"], row["concurrency"]): value(row) for row in rows}
    names = dict.fromkeys(row["server"] for row in rows)
    return {name: [found.get((name, count)) for count in counts] for name in names}
