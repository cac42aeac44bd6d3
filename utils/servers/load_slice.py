"""Load on one server: each client sends its next request as soon as the last one is answered (a closed loop).

Nothing is retried: a failed request is counted and the next one is sent.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median

from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.servers.connection import Connection
from utils.servers.kinds.completion import Counters, Piece, ServerAcceptance, ServerCompletion, ServerRequest
from utils.servers.kinds.server_kind import ServerKind

POLL = 0.05  # seconds between two checks of the clients
LETTING_GO = 2.0  # seconds for clients to end after Ctrl-C; one that waits for a silent server is abandoned
NO_ANSWER = "no request was answered within {:.0f} s."


@dataclass(frozen=True, slots=True)
class LoadSlice:
    """The answers to a number of requests.

    `completions` are the complete answers in the order of their ends, and `numbers` their places among the requests.
    `failures` has one sentence for each failed request. `unfinished` counts requests that were not sent or were ended
    when the time was over. `seconds` is the time from the first request to the last complete answer. `acceptance`
    covers all requests, or is None if nothing was drafted or known.
    """

    completions: tuple[ServerCompletion, ...]
    failures: tuple[str, ...]
    unfinished: int
    seconds: float
    acceptance: ServerAcceptance | None = None
    numbers: tuple[int, ...] = ()

    @property
    def tokens(self) -> int | None:
        """The number of new tokens of all complete answers, or None if the server does not count them."""
        return total_tokens(self.completions)

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all clients per second, including the time for the prompts."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    @property
    def first_token_seconds(self) -> list[float]:
        """The time to the first token of each answer."""
        return [one.first_seconds for one in self.completions if one.first_seconds is not None]

    @property
    def token_seconds(self) -> list[float]:
        """Seconds per token after the first one, of each answer with several tokens."""
        return [1 / rate for one in self.completions if (rate := one.decode_tokens_per_second)]


def total_tokens(completions: Sequence[ServerCompletion]) -> int | None:
    """The number of new tokens, or None if one of the answers has no count."""
    counts = [one.token_count for one in completions]
    return None if None in counts or not counts else sum(count for count in counts if count is not None)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is at least as large as this share of all values (nearest rank)."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def median_and_p95(values: Sequence[float]) -> tuple[float, float] | None:
    """The median and the 95th percentile, or None. With fewer than 20 values the latter is the maximum."""
    return (median(values), percentile(values, 0.95)) if values else None


class TooSlow(UserError):
    """No answer was complete when the time was over."""


class _Over(Exception):
    """The time is over, or Ctrl-C was pressed."""


@dataclass(slots=True)
class _Clients:
    """The shared state of the clients of one slice."""

    target: Connection
    requests: Sequence[ServerRequest]
    soft: float
    hard: float
    sent: int = 0
    completions: list[ServerCompletion] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    last_end: float = 0.0
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def work(self) -> None:
        """One client: it sends requests until there are no more or the time is over."""
        while (number := self._next()) is not None:
            try:
                completion = self.target.client.complete(self.requests[number], self.target.kind, self._watch)
            except _Over:
                return
            except UserError as error:
                with self.lock:
                    self.failures.append(str(error))
            else:
                with self.lock:
                    self.completions.append(completion)
                    self.numbers.append(number)
                    self.last_end = time.perf_counter()

    def _next(self) -> int | None:
        with self.lock:
            if self.sent >= len(self.requests) or self.ended.is_set() or time.perf_counter() >= self.soft:
                return None
            self.sent += 1
            return self.sent - 1

    def _watch(self, piece: Piece) -> None:
        if self.ended.is_set() or time.perf_counter() >= self.hard:
            raise _Over


def run_slice(target: Connection, requests: Sequence[ServerRequest], *, concurrency: int, limit: float) -> LoadSlice:
    """Send the requests, `concurrency` at a time.

    After `limit` seconds no more requests are sent; after twice that time, running ones are ended. Ctrl-C ends them at
    once and raises KeyboardInterrupt. Raises UserError without a complete answer, which is TooSlow if only time was
    missing.
    """
    kind, before = target.kind, target.kind.counters(target.client)
    began = time.perf_counter()
    clients = _Clients(target, requests, began + limit, began + 2 * limit)
    threads = [threading.Thread(target=clients.work, daemon=True) for _ in range(min(concurrency, len(requests)))]
    try:
        for thread in threads:
            thread.start()
        _join(threads, clients.hard + LETTING_GO)
    finally:
        clients.ended.set()
        _join(threads, time.perf_counter() + LETTING_GO)
    with clients.lock:
        completions, failures = tuple(clients.completions), tuple(clients.failures)
        numbers = tuple(clients.numbers)
    if not completions:
        raise UserError(failures[0]) if failures else TooSlow(NO_ANSWER.format(time.perf_counter() - began))
    unfinished = len(requests) - len(completions) - len(failures)
    seconds = clients.last_end - began
    after = kind.counters(target.client)
    acceptance = pooled_acceptance(kind, completions, seconds, before=before, after=after)
    return LoadSlice(completions, failures, unfinished, seconds, acceptance, numbers)


def _join(threads: Sequence[threading.Thread], end: float) -> None:
    for thread in threads:
        while thread.ident is not None and thread.is_alive() and time.perf_counter() < end:
            thread.join(POLL)


def pooled_acceptance(
    kind: ServerKind,
    completions: Sequence[ServerCompletion],
    seconds: float,
    *,
    before: Counters,
    after: Counters,
) -> ServerAcceptance | None:
    """The drafts of all answers: their own figures if they have them, otherwise the server's counters.

    Counters are not valid if the server generated other tokens meanwhile, such as those of failed requests.
    """
    own = [found for one in completions if (found := kind.acceptance(one, {}, {})) is not None]
    if own:
        valid = [found for found in own if found.valid]
        return ServerAcceptance(sum(one.drafted for one in valid), sum(one.accepted for one in valid))
    tokens = total_tokens(completions)
    together = ServerCompletion("", (), FinishReason.LENGTH, "", seconds, usage_tokens=tokens)
    return kind.acceptance(together, before, after)
