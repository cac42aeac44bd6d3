"""/server load: many requests at the same time on a server and its baseline, in turns: where does speculation stop
paying? Requests are the prompts of this session, without end tokens where the engine can.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from math import ceil

from utils.bounds import WholeRange
from utils.commands.experiments.repeated_runs import rotated, then_findings
from utils.commands.outcomes import Outcome, RunReport
from utils.commands.registry import CommandContext
from utils.commands.servers.load_figures import HEADINGS, OPTIONAL, Cell, findings_of
from utils.commands.servers.load_findings import conclusion, load_charts
from utils.commands.servers.words import parse_words
from utils.comparison.harness import Harness
from utils.comparison.reports import Note, Progress, Report, ReportEvent
from utils.comparison.server_requests import request_maker
from utils.config.settings import Settings
from utils.errors import UserError, check_choice
from utils.servers.address_list import TARGET
from utils.servers.connection import Connection
from utils.servers.load import TooSlow, run_slice
from utils.servers.request import ServerRequest
from utils.text import count_of

CONCURRENCIES = (1, 2, 4, 8, 16)
AT_ONCE = WholeRange(1, 64)
RANGES = {
    "requests": WholeRange(1, 10_000),
    "turns": WholeRange(1, 50),
    "length": WholeRange(2, 100_000),
    "seconds": WholeRange(1, 86_400),
}
DEFAULTS = {"requests": 10, "turns": 5, "length": 64, "seconds": 600}
OPTIONS = ("concurrency", *RANGES)
NO_PROMPT = "a prompt is needed: send one first; the requests are the prompts of this session."
EXAMPLE = "/server load spec concurrency=1,4,16"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. requests: at least so many for each server and concurrency. seconds: the time limit."""

    connections: Sequence[Connection]
    texts: Sequence[str]
    concurrencies: Sequence[int]
    requests: int
    turns: int
    length: int
    seconds: int
    cells: dict[tuple[int, str], Cell] = field(default_factory=dict)

    def per_turn(self, concurrency: int) -> int:
        """Requests of one turn: a multiple of the concurrency, so that nearly all of the time has full load."""
        return ceil(self.requests / (self.turns * concurrency)) * concurrency

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
    plan = Plan(
        _with_baseline(name, context.harness),
        list(dict.fromkeys(state.prompts)),
        _concurrencies(words.options.get("concurrency")),
        requests=_number("requests", words.options),
        turns=_number("turns", words.options),
        length=_number("length", words.options),
        seconds=_number("seconds", words.options),
    )
    events = _events(context.harness, plan, context.settings)
    title = f"/server load {name}, {count_of(plan.length, 'token')} a request"
    report = Report(
        *("server load", state.prompts[-1], context.settings, HEADINGS, events, conclusion),
        charts=load_charts,
        optional=OPTIONAL,
        title=title,
    )
    return [RunReport(report)]


def _number(option: str, options: Mapping[str, str]) -> int:
    return RANGES[option].parse(options[option]) if option in options else DEFAULTS[option]


def _concurrencies(text: str | None) -> tuple[int, ...]:
    if text is None:
        return CONCURRENCIES
    return tuple(sorted({AT_ONCE.parse(word.strip()) for word in text.split(",")}))


def _with_baseline(name: str, harness: Harness) -> list[Connection]:
    """The server, and its baseline if that is a server, too."""
    servers = harness.state.servers
    baseline = servers.connections[name].address.baseline
    return [servers.connections[one] for one in (name, baseline) if one not in (None, TARGET)]


def _events(harness: Harness, plan: Plan, settings: Settings) -> Iterator[ReportEvent]:
    yield from then_findings(_measured(harness, plan, settings), lambda: findings_of(plan.cells))


def _measured(harness: Harness, plan: Plan, settings: Settings) -> Iterator[ReportEvent]:
    singles: dict[str, float] = {}
    requests: dict[str, Sequence[ServerRequest]] = {}
    for connection in plan.connections:
        name = connection.address.name
        yield Progress(f"warming up {name} ...")
        requests[name] = _requests(harness, plan, settings, connection)
        for _ in range(2):  # the first answer pays for a first use
            one = run_slice(connection, requests[name][:1], concurrency=1, limit=plan.seconds)
        singles[name] = one.seconds
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
        plan.cells.setdefault((concurrency, name), Cell(concurrency, connection.address)).slices[turn] = measured
        if measured.failures:
            yield Note(f"{name}, {concurrency} at once: {len(measured.failures)} failed: {measured.failures[0]}")


def _requests(harness: Harness, plan: Plan, settings: Settings, connection: Connection) -> list[ServerRequest]:
    client, kind = connection.client, connection.kind
    made = [request_maker(harness, text, settings)(kind, client) for text in plan.texts]
    return [replace(request, max_tokens=plan.length, ignore_eos=True) for request in made]


def _estimate(plan: Plan, singles: dict[str, float]) -> str:
    """How long it takes at most, from one request alone on each server."""
    counts = [(plan.per_turn(count), connection.address.name) for count, _, connection in plan.slices()]
    total = sum(count for count, _ in counts)
    most = sum(count * singles[name] for count, name in counts)
    return (
        f"{count_of(total, 'request')}: about {most:.0f} s if requests at the same time gain nothing, less if they do; "
        f"none is sent after {plan.seconds} s (seconds=)."
    )
