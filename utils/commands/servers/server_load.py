"""/server load: many requests to a server and its baseline, in turns. At which load does speculation stop paying?

Requests are the prompts of a file or of this session, sent by clients in a closed loop (`concurrency=`) or arriving at
random times (`rate=`). Every load sends the same prompts equally often, so that loads are compared, not prompts.
"""

import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, cycle, islice
from math import ceil, inf
from random import Random

from utils.bounds import WholeRange
from utils.commands.experiments.race_runs import rotated, then_findings
from utils.commands.servers.load_figures import (
    LatencyLimits,
    Load,
    LoadCell,
    conclusion,
    load_charts,
    load_findings,
    load_table,
    position_tables,
)
from utils.commands.servers.server_words import Words, parse_numbers, parse_words
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.paths import path_in
from utils.commands.shared.registry import CommandContext
from utils.comparison.arms import request_maker
from utils.comparison.harness import Harness
from utils.comparison.reports import Note, Progress, Report, ReportEvent
from utils.comparison.speed_claims import MIN_VALUES
from utils.config.settings import Settings
from utils.errors import UserError, check_choice
from utils.prompts.prompt_files import read_prompts, spaced
from utils.servers.address import TARGET
from utils.servers.connection import Connection
from utils.servers.kinds.completion import ServerRequest
from utils.servers.load_slice import LoadSlice, run_slice
from utils.text import count_of

CONCURRENCIES = (1, 2, 4, 8, 16)
AT_ONCE = WholeRange(1, 64)
RATE, LARGEST_RATE = re.compile(r"(\d{1,3}(?:\.\d{1,3})?)(?:/s)?", re.ASCII), 100  # arrivals a second
SECONDS = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)(ms|s)", re.ASCII)
NUMBERS = {
    "requests": (40, WholeRange(1, 10_000)),
    "turns": (5, WholeRange(1, 50)),
    "length": (64, WholeRange(2, 100_000)),
    "fixed": (64, WholeRange(2, 100_000)),
    "seconds": (600, WholeRange(1, 86_400)),
}
LIMITS = ("ttft", "tpot")
OPTIONS = ("concurrency", "rate", *NUMBERS, *LIMITS, "cache")
EITHER = (("concurrency", "rate"), ("length", "fixed"))  # pairs of which only one can be given
EACH = 3  # requests for each client of a turn; with one, a turn would be a burst, not a closed loop
ARRIVALS = 20  # fewest requests of a turn at a rate, since fewer random arrivals differ too much between turns
WARM_UP_ARRIVALS = 5
NO_PROMPT = "a prompt is needed: send one first, or name a file of prompts."
EXAMPLE = "/server load spec concurrency=1,4,16"
PART_SENT = "{} of {} are sent, evenly spaced; requests={} sends all."
TOO_SHORT = "seconds={} is too short: {} takes about {} s with {}. Fewer requests= or a lower length= take less."
LEFT_OUT = "seconds={} is enough for {}{}; everything takes at least {} s."
NO_ANSWER = "{} has not answered one request within {} s. More time is given with seconds=."
TIME_OVER = "The time limit of {} s was reached: what follows was not measured. More time is given with seconds=."


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is measured. `fewest` is the minimum of requests in a turn, and `seconds` the time limit.

    `length` counts new tokens. With `is_fixed`, answers do not end earlier. `reuses_prefix` permits prefix caching.
    """

    connections: Sequence[Connection]
    texts: Sequence[str]
    loads: Sequence[Load]
    fewest: int
    turns: int
    length: int
    seconds: int
    seed: int
    is_fixed: bool = False
    reuses_prefix: bool = False

    def request(self, made: ServerRequest) -> ServerRequest:
        """A request of this length."""
        ends = replace(made, max_tokens=self.length, ignore_eos=self.is_fixed)
        return replace(ends, reuses_prefix=self.reuses_prefix)

    def per_turn(self, load: Load) -> int:
        """Requests of one turn: each prompt equally often."""
        return ceil(_fewest(load, self.fewest) / len(self.texts)) * len(self.texts)

    def arrivals(self, load: Load, turn: int, count: int) -> list[float]:
        """The random times of a Poisson process, the same for every server, or nothing for a closed loop."""
        if not load.is_rate:
            return []
        random = Random(f"{self.seed} {turn}")
        return list(accumulate((random.expovariate(load.value) for _ in range(count - 1)), initial=0.0))

    def slices(self) -> Iterator[tuple[Load, int, Connection]]:
        """Load, turn and server, in the order of the measurement. Servers take turns at going first."""
        for load in self.loads:
            for turn in range(self.turns):
                for connection in rotated(self.connections, turn):
                    yield load, turn, connection


def _fewest(load: Load, fewest: int) -> int:
    return max(fewest, ARRIVALS if load.is_rate else EACH * int(load.value))


@dataclass(slots=True)
class LoadMeasurement:
    """Runs a plan. `cells` has the results, in the order of the plan, and `singles` the time of one request to each
    server.
    """

    harness: Harness
    settings: Settings
    plan: LoadPlan
    limits: LatencyLimits
    cells: dict[tuple[Load, str], LoadCell] = field(default_factory=dict)
    requests: dict[str, Sequence[ServerRequest]] = field(default_factory=dict)
    singles: dict[str, float] = field(default_factory=dict)

    def events(self) -> Iterator[ReportEvent]:
        """Warm up at each load, choose what fits into the time, and measure that."""
        yield from self._first_requests()
        yield from self._fit_into_time()
        for load in self.plan.loads:
            for address in (connection.address for connection in self.plan.connections):
                cell = LoadCell(load, address, self.plan.turns, self.limits, self.plan.is_fixed)
                self.cells[load, address.name] = cell
        began, notes = time.monotonic(), set[str]()
        for load, turn, connection in self.plan.slices():
            left = max(0.0, self.plan.seconds - (time.monotonic() - began))
            name = connection.address.name
            place = f"turn {turn + 1} of {self.plan.turns}"
            yield Progress(f"{name}, {load}, {place}, at most {left:.0f} s left ...")
            measured = self._send(load, turn, connection, count=self.plan.per_turn(load), limit=left)
            if measured.unfinished:  # a part of a slice had other prompts, and fewer clients at its end
                yield Note(TIME_OVER.format(self.plan.seconds))
                return
            self.cells[load, name].slices[turn] = measured
            for failure in set(measured.failures) - notes:
                yield Note(f"{name}, {load}: {failure}")
            notes.update(measured.failures)

    def _send(self, load: Load, turn: int, connection: Connection, *, count: int, limit: float) -> LoadSlice:
        sent = list(islice(cycle(self.requests[connection.address.name]), count))
        arrivals = self.plan.arrivals(load, turn, count)
        return run_slice(connection, sent, concurrency=load.clients, arrivals=arrivals, limit=limit)

    def _first_requests(self) -> Iterator[Progress]:
        """Two requests to each server: the first answer includes the first use, the second one is timed."""
        for connection in self.plan.connections:
            name = connection.address.name
            yield Progress(f"warming up {name} ...")
            makers = (request_maker(self.harness.loaded, text, self.settings) for text in self.plan.texts)
            made = [make(connection.kind, connection.client) for make in makers]
            self.requests[name] = list(map(self.plan.request, made))
            for _ in range(2):
                one = run_slice(connection, self.requests[name][:1], concurrency=1, limit=self.plan.seconds)
                if one.unfinished:
                    raise UserError(NO_ANSWER.format(name, self.plan.seconds))
            self.singles[name] = one.seconds

    def _fit_into_time(self) -> Generator[ReportEvent, None, None]:
        """Reduce the plan to what fits: fewer turns, but enough for a verdict, then fewer loads. Slices stay whole."""
        plan, fewest = self.plan, min(self.plan.turns, MIN_VALUES)
        kept: dict[Load, float] = {}  # seconds of a turn of all servers
        dropped: dict[Load, float] = {}
        for load in plan.loads:
            seconds = self._estimate(load, self.singles)
            if fewest * (sum(kept.values()) + seconds) <= plan.seconds:
                seconds = yield from self._warm_up(load)
            fits = fewest * (sum(kept.values()) + seconds) <= plan.seconds
            (kept if fits else dropped)[load] = seconds
        if not kept:
            load, seconds = next(iter(dropped.items()))
            needed = ceil(fewest * seconds)
            raise UserError(TOO_SHORT.format(plan.seconds, load, needed, count_of(fewest, "turn")))
        turns = max(fewest, min(plan.turns, int(plan.seconds / sum(kept.values()))))
        if dropped or turns < plan.turns:
            without = f", but not for {', '.join(map(str, dropped))}" if dropped else ""
            everything = ceil(plan.turns * sum((*kept.values(), *dropped.values())))
            yield Note(LEFT_OUT.format(plan.seconds, f"{turns} of {plan.turns} turns", without, everything))
        self.plan = replace(plan, loads=list(kept), turns=turns)
        count = turns * len(plan.connections) * sum(map(plan.per_turn, kept))
        yield Note(f"{count_of(count, 'request')}: about {turns * sum(kept.values()):.0f} s.")

    def _estimate(self, load: Load, once: Mapping[str, float]) -> float:
        """The seconds of one turn of all servers. `once` has those of one request, or of as many as run at once."""
        count = self.plan.per_turn(load)
        if load.is_rate:
            return sum(count / load.value + single for single in self.singles.values())
        # The first requests at a load may be slow, but requests never gain from being sent one by one.
        return sum(min(count / load.value * once[name], count * self.singles[name]) for name in once)

    def _warm_up(self, load: Load) -> Generator[Progress, None, float]:
        """Send requests at this load to every server. Returns the estimated seconds of a turn of all servers."""
        once = dict[str, float]()
        for connection in self.plan.connections:
            name, count = connection.address.name, WARM_UP_ARRIVALS if load.is_rate else load.clients
            yield Progress(f"warming up {name}, {load} ...")
            sent = self._send(load, 0, connection, count=count, limit=self.plan.seconds)
            once[name] = inf if sent.unfinished else sent.seconds
        return self._estimate(load, once)


def load(argument: str, context: CommandContext) -> Outcome:
    words = parse_words(argument, OPTIONS, most=2)
    harness = context.harness
    names = [address.name for address in harness.state.servers.addresses]
    if not words.plain or not names:
        raise UserError(f"name a server of this session: {', '.join(names) or 'there is none'}; for example {EXAMPLE}")
    name = check_choice(words.plain[0], tuple(names), "server")
    texts = _texts(words.plain[1:], harness)
    plan = _plan(words, texts, _with_baseline(name, harness), context.settings.seed)
    limits = LatencyLimits(*(_seconds(option, words.options) for option in LIMITS))
    measurement, table = LoadMeasurement(harness, context.settings, plan, limits), load_table(limits)
    sizes = f"{'exactly' if plan.is_fixed else 'up to'} {count_of(plan.length, 'token')} a request"
    report = Report(
        *("server load", texts[0], context.settings, table.headings),
        then_findings(_events(measurement, texts), lambda: load_findings(measurement.cells, table)),
        conclusion,
        charts=load_charts,
        tables=position_tables,
        optional=table.optional,
        title=f"/server load {name}, {sizes}, times at 50/90/99 %",
        details=lambda: [row for cell in measurement.cells.values() for row in cell.request_records()],
    )
    return [RunReport(report)]


def _events(measurement: LoadMeasurement, texts: Sequence[str]) -> Iterator[ReportEvent]:
    plan = measurement.plan
    if len(plan.texts) < len(texts):
        every = len(texts) * plan.turns
        yield Note(PART_SENT.format(len(plan.texts), count_of(len(texts), "prompt"), every))
    yield from measurement.events()


def _texts(file: Sequence[str], harness: Harness) -> list[str]:
    """The prompts of a file as they are, or those of this session. Raises UserError without any."""
    if not file:
        texts = list(dict.fromkeys(harness.state.prompts))
    else:
        texts = [prompt.text for prompt in read_prompts(path_in(file[0], EXAMPLE))]
    if not texts:
        raise UserError(NO_PROMPT)
    return texts


def _plan(words: Words, texts: Sequence[str], connections: Sequence[Connection], seed: int) -> LoadPlan:
    options, numbers = words.options, parse_numbers(words.options, NUMBERS)
    for one, other in EITHER:
        if one in options and other in options:
            raise UserError(f"{one}= and {other}= exclude each other.")
    loads = _rates(options["rate"]) if "rate" in options else _concurrencies(options.get("concurrency"))
    fewest = ceil(numbers["requests"] / numbers["turns"])
    is_fixed = "fixed" in options
    return LoadPlan(
        connections,
        spaced(texts, min(_fewest(load, fewest) for load in loads)),
        loads,
        fewest,
        numbers["turns"],
        numbers["fixed" if is_fixed else "length"],
        numbers["seconds"],
        seed,
        is_fixed,
        check_choice(options.get("cache", "off"), ("on", "off"), "cache") == "on",
    )


def _concurrencies(text: str | None) -> list[Load]:
    if text is None:
        return [Load(count) for count in CONCURRENCIES]
    return [Load(count) for count in sorted({AT_ONCE.parse(word.strip()) for word in text.split(",")})]


def _rates(text: str) -> list[Load]:
    rates = set[float]()
    for word in text.split(","):
        match = RATE.fullmatch(word.strip())
        if match is None or not 0 < float(match[1]) <= LARGEST_RATE:
            raise UserError(f"'{word}' is not a rate of up to {LARGEST_RATE} requests a second, for example rate=2/s.")
        rates.add(float(match[1]))
    return [Load(rate, is_rate=True) for rate in sorted(rates)]


def _seconds(name: str, options: Mapping[str, str]) -> float | None:
    """A limit in seconds, or None if it is not given."""
    if name not in options:
        return None
    match = SECONDS.fullmatch(options[name])
    if match is None or not float(match[1]):
        raise UserError(f"{name}={options[name]} is not a time, for example {name}=50ms or {name}=0.5s.")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def _with_baseline(name: str, harness: Harness) -> list[Connection]:
    """The server, and its baseline if that is also a server."""
    servers = harness.state.servers
    baseline = servers.connections[name].address.baseline
    return [servers.connections[one] for one in (name, baseline) if one not in (None, TARGET)]
