"""/server load: many requests to a server and its baseline, in turns. At which load does speculation stop paying?

Requests are the prompts of a file or of this session, sent by clients in a closed loop (`concurrency=`) or arriving at
random times (`rate=`). Every load sends the same prompts equally often, so that loads are compared, not prompts. With
`draft=`, a local server is restarted with several draft lengths, since no server program takes one per request.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, cycle, islice, product
from math import ceil, inf
from random import Random

from utils.bounds import RealRange, WholeRange
from utils.commands.experiments.races import rotated, then_rows
from utils.commands.servers.load_figures import (
    LatencyLimits,
    Load,
    LoadCell,
    conclusion,
    load_rows,
    load_settings,
    load_table,
)
from utils.commands.shared.registry import CommandContext, Outcome, path_in
from utils.comparison.arms import request_maker
from utils.comparison.harness import Harness
from utils.comparison.speed_claims import MIN_VALUES
from utils.config.settings import Settings
from utils.errors import UserError, check_choice
from utils.prompts.prompt_files import read_prompts, spaced
from utils.servers.address import TARGET, parse_numbers, parse_words
from utils.servers.connection import Connection, ServerList
from utils.servers.kinds.completion import ServerRequest
from utils.servers.load_slice import LoadSlice, run_slice
from utils.servers.processes.programs import DRAFTS, Launch
from utils.text import Count, count_of, split_words

CONCURRENCIES = "1,2,4,8,16"
AT_ONCE, RATE = WholeRange(1, 64), RealRange("rate", 0.001, 100)  # requests, and arrivals a second
SECONDS = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)(ms|s)", re.ASCII)
NUMBERS = {
    "requests": (40, WholeRange(1, 10_000)),
    "turns": (5, WholeRange(1, 50)),
    "length": (64, WholeRange(2, 100_000)),
    "fixed": (64, WholeRange(2, 100_000)),
    "seconds": (600, WholeRange(1, 86_400)),
}
LIMITS = ("ttft", "tpot")
OPTIONS = ("concurrency", "rate", "draft", *NUMBERS, *LIMITS, "cache")
MOST_LENGTHS = 16  # of drafts
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
class LoadArm:
    """A server by name. With a `launch`, it is restarted in this way before its turns."""

    server: str
    launch: Launch | None = None

    @property
    def draft(self) -> int | None:
        """Its draft length, or None if the server runs as it is."""
        return None if self.launch is None else self.launch.drafts

    @property
    def label(self) -> str:
        return self.server if self.launch is None else f"draft={self.draft}"


@dataclass(slots=True)
class LoadMeasurement:
    """What is measured, and what was.

    `arms` are the server and its baseline, or one server with several draft lengths. `fewest` is the minimum of
    requests in a turn. `loads` and `turns` are reduced to what fits into `seconds`. `requests` has one for each prompt
    by server, and `singles` the time of one request to each server. `running` is the arm that was started last, and
    `starting` the seconds of its start.
    """

    harness: Harness
    settings: Settings
    arms: Sequence[LoadArm]
    prompts: Sequence[str]
    loads: Sequence[Load]
    fewest: int
    turns: int
    length: int
    seconds: int
    limits: LatencyLimits
    is_fixed: bool
    reuses_prefix: bool
    cells: dict[tuple[Load, str], LoadCell] = field(default_factory=dict)
    requests: dict[str, Sequence[ServerRequest]] = field(default_factory=dict)
    singles: dict[str, float] = field(default_factory=dict)
    running: LoadArm | None = None
    starting: float = 0.0
    failed: list[LoadArm] = field(default_factory=list)

    @property
    def _servers(self) -> ServerList:
        return self.harness.state.servers

    @property
    def _connections(self) -> list[Connection]:
        return [self._servers.connections[name] for name in dict.fromkeys(arm.server for arm in self.arms)]

    def _at_least(self, load: Load) -> int:
        return max(self.fewest, ARRIVALS if load.is_rate else EACH * int(load.value))

    def _per_turn(self, load: Load) -> int:
        """Requests of one turn: each prompt equally often."""
        texts = len(next(iter(self.requests.values())))
        return ceil(self._at_least(load) / texts) * texts

    def run(self) -> None:
        """Measure everything. A server that was restarted runs as before afterwards."""
        first = self.arms[0]
        before = None if first.launch is None else self._servers.launch_of(first.server)
        try:
            if before is not None:
                began = time.monotonic()
                self._start(first)
                self.starting = time.monotonic() - began
            self._first_requests()
            self._fit_into_time()
            self._measure()
        finally:
            for line in () if before is None else self._servers.restart(first.server, before):
                self.harness.progress(line)

    def _measure(self) -> None:
        for load, arm in product(self.loads, self.arms):
            address = self._servers.connections[arm.server].address
            cell = LoadCell(load, address, self.turns, self.limits, self.is_fixed, arm.draft)
            self.cells[load, arm.label] = cell
        began, notes = time.monotonic(), set[str]()
        for turn, load, arm in self._order():
            if arm in self.failed:
                continue
            try:
                self._start(arm)
                left = max(0.0, self.seconds - (time.monotonic() - began))
                where = f"{arm.label}, {load}, turn {turn + 1} of {self.turns}"
                self.harness.progress(f"{where}, at most {left:.0f} s left ...")
                connection = self._servers.connections[arm.server]
                measured = self._send(load, turn, connection, count=self._per_turn(load), limit=left)
            except UserError as error:
                if arm.launch is None:
                    raise
                self.failed.append(arm)  # another length may run
                self.harness.note(f"{arm.label}: {error}")
                continue
            if measured.unfinished:  # a part of a slice had other prompts, and fewer clients at its end
                self.harness.note(TIME_OVER.format(self.seconds))
                return
            self.cells[load, arm.label].slices[turn] = measured
            for failure in set(measured.failures) - notes:
                self.harness.note(f"{arm.label}, {load}: {failure}")
            notes.update(measured.failures)

    def _order(self) -> Iterator[tuple[int, Load, LoadArm]]:
        """Turns, loads and arms in the order of measurement. Servers take turns at going first.

        Draft lengths are measured at all loads after each start, every other turn backwards.
        """
        if self.arms[0].launch is None:
            for load, turn in product(self.loads, range(self.turns)):
                yield from ((turn, load, arm) for arm in rotated(self.arms, turn))
            return
        for turn in range(self.turns):
            for arm, load in product(self.arms[:: -1 if turn % 2 else 1], self.loads):
                yield turn, load, arm

    def _start(self, arm: LoadArm) -> None:
        """Restart the server if the arm has another draft length than the running one, and warm it up."""
        if arm.launch is None or arm is self.running:
            return
        self.running = None
        for line in self._servers.restart(arm.server, arm.launch):
            where = f"{arm.server} with {arm.label}: {line}"
            self.harness.progress(Count(where) if isinstance(line, Count) else where)
        for load in self.loads if self.requests else ():
            self._warm_up(load)
        self.running = arm

    def _send(self, load: Load, turn: int, connection: Connection, *, count: int, limit: float) -> LoadSlice:
        """Send so many requests. At a rate, they arrive at the random times of a Poisson process, the same for every
        server.
        """
        sent, arrivals = list(islice(cycle(self.requests[connection.address.name]), count)), list[float]()
        if load.is_rate:
            random = Random(f"{self.settings.seed} {turn}")
            arrivals = list(accumulate((random.expovariate(load.value) for _ in range(count - 1)), initial=0.0))
        return run_slice(connection, sent, concurrency=load.clients, arrivals=arrivals, limit=limit)

    def _first_requests(self) -> None:
        """Two requests to each server: the first answer includes the first use, the second one is timed."""
        texts = spaced(self.prompts, min(map(self._at_least, self.loads)))
        if len(texts) < (count := len(self.prompts)):
            self.harness.note(PART_SENT.format(len(texts), count_of(count, "prompt"), count * self.turns))
        for connection in self._connections:
            name = connection.address.name
            self.harness.progress(f"warming up {name} ...")
            makers = (request_maker(self.harness.loaded, text, self.settings) for text in texts)
            made = (make(connection.kind, connection.client) for make in makers)
            self.requests[name] = [
                replace(one, max_tokens=self.length, ignore_eos=self.is_fixed, reuses_prefix=self.reuses_prefix)
                for one in made
            ]
            for _ in range(2):
                one = run_slice(connection, self.requests[name][:1], concurrency=1, limit=self.seconds)
                if one.unfinished:
                    raise UserError(NO_ANSWER.format(name, self.seconds))
            self.singles[name] = one.seconds

    def _fit_into_time(self) -> None:
        """Reduce the plan to what fits: fewer turns, but enough for a verdict, then fewer loads. Slices stay whole."""
        fewest, planned = min(self.turns, MIN_VALUES), self.turns
        starts = self.starting * (len(self.arms) - 1)  # seconds of a turn, whose first length runs already
        kept: dict[Load, float] = {}  # seconds of a turn of all servers
        dropped: dict[Load, float] = {}
        for load in self.loads:
            seconds = self._estimate(load, self.singles)
            if fewest * (starts + sum(kept.values()) + seconds) <= self.seconds:
                seconds = self._warm_up(load)
            fits = fewest * (starts + sum(kept.values()) + seconds) <= self.seconds
            (kept if fits else dropped)[load] = seconds
        if not kept:
            load, seconds = next(iter(dropped.items()))
            needed = ceil(fewest * (starts + seconds))
            raise UserError(TOO_SHORT.format(self.seconds, load, needed, count_of(fewest, "turn")))
        turns = max(fewest, min(planned, int(self.seconds / (starts + sum(kept.values())))))
        if dropped or turns < planned:
            without = f", but not for {', '.join(map(str, dropped))}" if dropped else ""
            everything = ceil(planned * sum((starts, *kept.values(), *dropped.values())))
            self.harness.note(LEFT_OUT.format(self.seconds, f"{turns} of {planned} turns", without, everything))
        self.loads, self.turns = list(kept), turns
        count = turns * len(self.arms) * sum(map(self._per_turn, kept))
        self.harness.note(f"{count_of(count, 'request')}: about {turns * (starts + sum(kept.values())):.0f} s.")

    def _estimate(self, load: Load, once: Mapping[str, float]) -> float:
        """The seconds of one turn of all arms. `once` has those of one request, or of as many as run at once."""
        servers = [arm.server for arm in self.arms]
        count = self._per_turn(load) + (0 if self.arms[0].launch is None else _warm_up_count(load))
        if load.is_rate:
            return sum(count / load.value + self.singles[name] for name in servers)
        # The first requests at a load may be slow, but requests never gain from being sent one by one.
        return sum(min(count / load.value * once[name], count * self.singles[name]) for name in servers)

    def _warm_up(self, load: Load) -> float:
        """Send requests at this load to every server. Returns the estimated seconds of a turn of all arms."""
        once = dict[str, float]()
        for connection in self._connections:
            name = connection.address.name
            self.harness.progress(f"warming up {name}, {load} ...")
            sent = self._send(load, 0, connection, count=_warm_up_count(load), limit=self.seconds)
            once[name] = inf if sent.unfinished else sent.seconds
        return self._estimate(load, once)


def _warm_up_count(load: Load) -> int:
    return WARM_UP_ARRIVALS if load.is_rate else load.clients


def load(argument: str, context: CommandContext) -> Outcome:
    plain, options = parse_words(split_words(argument), OPTIONS, most=2)
    servers = context.harness.state.servers
    name = servers.named(plain, EXAMPLE).address.name
    arms = _arms(servers, name, options.get("draft"))
    launch = arms[-1].launch
    started = servers.speculation_of(name) if launch is None else launch.speculation
    if len(plain) > 1:
        prompts = [prompt.text for prompt in read_prompts(path_in(plain[1], EXAMPLE))]
    else:
        prompts = list(dict.fromkeys(context.harness.state.prompts))
    if not prompts:
        raise UserError(NO_PROMPT)
    measurement = _measurement(context, arms, prompts, options)
    cells = measurement.cells
    sizes = f"{'exactly' if measurement.is_fixed else 'up to'} {count_of(measurement.length, 'token')} a request"
    report = load_table(measurement.limits).report(
        *("server load", prompts[0], context.settings),
        then_rows(measurement.run, partial(load_rows, cells)),
        conclude=conclusion,
        attachment=lambda rows: "\n".join(load_settings(rows, started)),
        title=f"/server load {name}, {sizes}, times at 50/90/99 %",
        details=lambda: [row for cell in cells.values() for row in cell.request_records()],
    )
    return [report]


def _arms(servers: ServerList, name: str, drafts: str | None) -> list[LoadArm]:
    """The server and its baseline, or the server without drafts and with each of these draft lengths."""
    if drafts is None:
        baseline = servers.connections[name].address.baseline
        return [LoadArm(one) for one in (name, baseline) if one is not None and one != TARGET]
    launch = servers.launch_of(name)
    if not launch.drafter:
        raise UserError(f"{name} has no drafter, so draft lengths change nothing; /server start with drafter= first.")
    lengths = sorted({0, *(DRAFTS.parse(word.strip()) for word in drafts.split(","))})
    if not 2 <= len(lengths) <= MOST_LENGTHS:
        raise UserError(f"draft= takes up to {MOST_LENGTHS} lengths, for example draft=0,1,3,5.")
    return [LoadArm(name, replace(launch, draft=length)) for length in lengths]


def _measurement(
    context: CommandContext, arms: Sequence[LoadArm], prompts: Sequence[str], options: Mapping[str, str]
) -> LoadMeasurement:
    for one, other in EITHER:
        if one in options and other in options:
            raise UserError(f"{one}= and {other}= exclude each other.")
    numbers, is_fixed = parse_numbers(options, NUMBERS), "fixed" in options
    if "rate" in options:
        rates = {RATE.parse(word.strip().removesuffix("/s")) for word in options["rate"].split(",")}
        loads = [Load(rate, is_rate=True) for rate in sorted(rates)]
    else:
        counts = {AT_ONCE.parse(word.strip()) for word in options.get("concurrency", CONCURRENCIES).split(",")}
        loads = [Load(count) for count in sorted(counts)]
    return LoadMeasurement(
        context.harness,
        context.settings,
        arms,
        prompts,
        loads,
        fewest=ceil(numbers["requests"] / numbers["turns"]),
        turns=numbers["turns"],
        length=numbers["fixed" if is_fixed else "length"],
        seconds=numbers["seconds"],
        limits=LatencyLimits(*(_seconds(option, options) for option in LIMITS)),
        is_fixed=is_fixed,
        reuses_prefix=check_choice(options.get("cache", "off"), ("on", "off"), "cache") == "on",
    )


def _seconds(name: str, options: Mapping[str, str]) -> float | None:
    if name not in options:
        return None
    match = SECONDS.fullmatch(options[name])
    if match is None or not float(match[1]):
        raise UserError(f"{name}={options[name]} is not a time, for example {name}=50ms or {name}=0.5s.")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)
