"""Load on one server. In a closed loop, each client sends its next request as soon as its last one is answered;
otherwise requests arrive at given times, whether or not earlier ones are answered.

Nothing is retried: a failed request is counted and the next one is sent.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.servers.connection import Connection
from utils.servers.kinds.completion import Counters, Piece, ServerAcceptance, ServerCompletion, ServerRequest
from utils.servers.kinds.server_kind import ServerKind, growth, with_positions

POLL = 0.05  # seconds between two checks of the clients
LETTING_GO = 2.0  # seconds for clients to end after Ctrl-C; one that waits for a silent server is abandoned
MOST_CLIENTS = 256  # at the same time, also for requests that arrive at given times


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request that was answered or has failed.

    `number` is its place among the requests, and `sent` the time in seconds after the beginning. `acceptance` is what
    the answer itself reports. A failed request has no `completion`.
    """

    number: int
    sent: float
    completion: ServerCompletion | None = None
    acceptance: ServerAcceptance | None = None
    error: str = ""

    @property
    def token_seconds(self) -> float | None:
        """Seconds per token after the first one."""
        rate = None if self.completion is None else self.completion.decode_tokens_per_second
        return 1 / rate if rate else None


@dataclass(frozen=True, slots=True)
class LoadSlice:
    """The answers to a number of requests.

    `requests` are in the order of their ends. `unfinished` counts those that were not sent or were ended when the time
    was over. `seconds` is the time from the first request to the last complete answer. `acceptance` covers all
    requests.
    """

    requests: tuple[LoadRequest, ...]
    unfinished: int
    seconds: float
    acceptance: ServerAcceptance | None = None
    other_tokens: int | None = None

    @property
    def completions(self) -> list[ServerCompletion]:
        return [one.completion for one in self.requests if one.completion is not None]

    @property
    def failures(self) -> list[str]:
        return [one.error for one in self.requests if one.error]

    @property
    def tokens(self) -> int | None:
        """The number of new tokens of all complete answers, or None if the server does not count them."""
        counts = [one.token_count for one in self.completions]
        return _sum(counts) if counts else None

    def speed(self, *, of_requests: bool = False) -> float | None:
        """New tokens of all clients per second, including the time for the prompts.

        With `of_requests`, the seconds are those of each request, from its sending to its end.
        """
        seconds = sum(one.seconds for one in self.completions) if of_requests else self.seconds
        return self.tokens / seconds if self.tokens and seconds else None


class _Over(Exception):
    """The time is over, or Ctrl-C was pressed."""


@dataclass(slots=True)
class _Clients:
    """The shared state of the clients of one slice. Times are those of perf_counter."""

    target: Connection
    requests: Sequence[ServerRequest]
    arrivals: Sequence[float]
    began: float
    soft: float
    hard: float
    sent: int = 0
    done: list[LoadRequest] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def work(self) -> None:
        """One client: it sends requests until there are no more or the time is over."""
        while (number := self._next()) is not None:
            sent, completion, acceptance, error = time.perf_counter() - self.began, None, None, ""
            try:
                completion = self.target.client.complete(self.requests[number], self.target.kind, self._watch)
                acceptance = self.target.kind.acceptance(completion, {}, {})
            except _Over:
                return
            except UserError as failure:
                error = str(failure)
            with self.lock:
                self.done.append(LoadRequest(number, sent, completion, acceptance, error))

    def _next(self) -> int | None:
        """The next request, once it is time to send it, or None if none is sent any more."""
        with self.lock:
            number = self.sent
            self.sent += 1
        if number >= len(self.requests):
            return None
        if self.arrivals:
            self.ended.wait(max(0.0, self.began + self.arrivals[number] - time.perf_counter()))
        return None if self.ended.is_set() or time.perf_counter() >= self.soft else number

    def _watch(self, piece: Piece) -> None:
        if self.ended.is_set() or time.perf_counter() >= self.hard:
            raise _Over


def run_slice(
    target: Connection,
    requests: Sequence[ServerRequest],
    *,
    concurrency: int,
    arrivals: Sequence[float] = (),
    limit: float,
) -> LoadSlice:
    """Send the requests, `concurrency` at a time. With `arrivals`, each is sent so many seconds after the beginning.

    After `limit` seconds no more requests are sent; after twice that time, running ones are ended. Ctrl-C ends them at
    once and raises KeyboardInterrupt. Raises UserError if requests failed and none was answered.
    """
    kind, before = target.kind, target.kind.counters(target.client)
    began = time.perf_counter()
    clients = _Clients(target, requests, arrivals, began, began + limit, began + 2 * limit)
    threads = [threading.Thread(target=clients.work, daemon=True) for _ in range(min(concurrency, len(requests)))]
    try:
        for thread in threads:
            thread.start()
        _join(threads, clients.hard + LETTING_GO)
    finally:
        clients.ended.set()
        _join(threads, time.perf_counter() + LETTING_GO)
    with clients.lock:
        done = tuple(clients.done)
    if done and all(one.error for one in done):
        raise UserError(done[0].error)
    seconds = max((one.sent + one.completion.seconds for one in done if one.completion is not None), default=0.0)
    return _measured(kind, LoadSlice(done, len(requests) - len(done), seconds), before, kind.counters(target.client))


def _join(threads: Sequence[threading.Thread], end: float) -> None:
    for thread in threads:
        while thread.ident is not None and thread.is_alive() and time.perf_counter() < end:
            thread.join(POLL)


def _measured(kind: ServerKind, answered: LoadSlice, before: Counters, after: Counters) -> LoadSlice:
    """The slice with its drafts: the answers' own figures if they have them, otherwise the server's counters.

    Counters are not valid if the server generated other tokens meanwhile, such as those of failed requests.
    """
    tokens = answered.tokens
    found = sum_of_drafts([(one.acceptance, one.completion.token_count) for one in answered.requests if one.completion])
    if found is not None:
        found = with_positions(found, growth(before, after) or {})
    else:
        together = ServerCompletion("", (), FinishReason.LENGTH, "", answered.seconds, usage_tokens=tokens)
        found = kind.acceptance(together, before, after)
    is_complete = not answered.unfinished and not answered.failures
    others = kind.other_tokens(tokens, before, after) if is_complete else None
    return replace(answered, acceptance=found, other_tokens=others)


def sum_of_drafts(parts: Sequence[tuple[ServerAcceptance | None, int | None]]) -> ServerAcceptance | None:
    """The drafts of several answers or slices, each with its number of tokens. They are valid if all of them are.

    A part without drafts needs a forward pass for each token.
    """
    known = [found for found, _ in parts if found is not None]
    if not known:
        return None
    rounds = [found.rounds for found in known]
    forwards = [tokens if found is None else found.forwards for found, tokens in parts]
    by_position = [found.by_position for found in known if found.drafted]
    pairs = zip_longest(*by_position, fillvalue=(0, 0))
    added = tuple((sum(one[0] for one in place), sum(one[1] for one in place)) for place in pairs)
    return ServerAcceptance(
        sum(found.drafted for found in known),
        sum(found.accepted for found in known),
        _sum(rounds),
        added if all(by_position) else (),
        valid=all(found.valid for found in known),
        note="; ".join(sorted({found.note for found in known if found.note})),
        forwards=_sum(forwards),
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
