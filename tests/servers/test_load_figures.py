"""Load on a server: how many requests run at once, what is counted, and that it ends in time and after Ctrl-C."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from servers.loopback import Faults, Loopback

from utils.errors import UserError
from utils.servers.address import ServerAddress
from utils.servers.client import ServerClient
from utils.servers.kinds.completion import Counters, ServerAcceptance, ServerCompletion, ServerRequest
from utils.servers.kinds.server_kind import ServerKind, ServerReader
from utils.servers.load_slice import LoadSlice, run_slice, sum_of_drafts

LENGTH = 5


class CountingKind(ServerKind):
    """A kind whose drafts are in the answers (`timings`), or else in counters of the whole server."""

    def further_fields(self, request: ServerRequest) -> dict[str, Any]:
        return {"ignore_eos": request.ignore_eos}

    figures = ("timings",)

    def counters(self, server: ServerReader) -> Counters:
        return server.get_json("/counters") or {}

    def drafts(self, completion: ServerCompletion, before: Counters, after: Counters) -> ServerAcceptance | None:
        if timings := completion.figures.get("timings"):
            return ServerAcceptance(timings["drafted"], timings["accepted"])
        if not before or not after:
            return None
        tokens = after["tokens"] - before["tokens"]
        return ServerAcceptance(
            int(after["drafted"] - before["drafted"]),
            int(after["accepted"] - before["accepted"]),
            valid=tokens == completion.token_count,
        )


@dataclass
class Target:
    client: ServerClient
    kind: ServerKind


@pytest.fixture
def server() -> Iterator[Loopback]:
    with Loopback() as running:
        yield running


@pytest.fixture
def target(server: Loopback) -> Iterator[Target]:
    with ServerClient(ServerAddress("one", server.url)) as client:
        yield Target(client, CountingKind())


def requests(count: int) -> list[ServerRequest]:
    return [ServerRequest(f"prompt {number}", LENGTH, ignore_eos=True) for number in range(count)]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_so_many_requests_run_at_once(concurrency: int, server: Loopback, target: Target) -> None:
    server.faults = Faults(first_delay=0.05, chunk_delay=0.01)
    measured = run_slice(target, requests(6), concurrency=concurrency, limit=60)
    assert server.most_at_once == concurrency
    assert sorted(one.body["prompt"] for one in server.posts()) == [f"prompt {number}" for number in range(6)]
    assert (len(measured.completions), measured.failures, measured.unfinished) == (6, [], 0)
    assert measured.tokens == 6 * LENGTH
    assert measured.speed() == pytest.approx(30 / measured.seconds)
    rounds = 6 / concurrency
    assert rounds * 0.09 <= measured.seconds  # the delays of a server that answers so many at once
    assert all(one.first_seconds >= 0.05 for one in measured.completions)
    assert all((one.token_seconds or 0) > 0 for one in measured.requests)
    assert measured.speed(of_requests=True) == pytest.approx(30 / sum(one.seconds for one in measured.completions))


def test_requests_that_wait_for_a_slot_have_a_later_first_token(target: Target, server: Loopback) -> None:
    with (
        Loopback(slots=1, faults=Faults(first_delay=0.1)) as single,
        ServerClient(ServerAddress("one", single.url)) as client,
    ):
        measured = run_slice(Target(client, ServerKind()), requests(3), concurrency=3, limit=60)
    first = sorted(one.first_seconds or 0 for one in measured.completions)
    assert first[0] >= 0.1 and first[1] >= 0.15 and first[2] >= 0.25  # they are not sent at the same instant


def test_failures_are_counted_and_nothing_is_tried_again(server: Loopback, target: Target) -> None:
    class Sometimes(CountingKind):
        def body(self, request: ServerRequest, model: str) -> dict[str, Any]:
            return super().body(request, "other" if request.prompt == "prompt 1" else model)

    target.kind = Sometimes()
    measured = run_slice(target, requests(4), concurrency=2, limit=60)
    assert len(measured.completions) == 3 and len(server.posts()) == 4
    assert len(measured.failures) == 1 and "does not exist" in measured.failures[0]


def test_a_server_that_answers_nothing_is_an_error(server: Loopback, target: Target) -> None:
    target.client.model()
    server.faults = Faults(status=500, message="out of memory")
    with pytest.raises(UserError, match="out of memory"):
        run_slice(target, requests(4), concurrency=2, limit=60)


def test_the_time_limit_ends_sending_and_then_the_rest(server: Loopback, target: Target) -> None:
    target.client.model()
    server.faults = Faults(first_delay=0.15)
    measured = run_slice(target, requests(50), concurrency=1, limit=0.3)
    assert 1 <= len(measured.completions) <= 2 and measured.unfinished == 50 - len(measured.completions)
    assert len(server.posts()) <= 2  # two answers take 0.3 s
    server.faults = Faults(chunk_delay=0.2)  # an answer takes 0.8 s, and twice the limit is 0.4 s
    began = time.monotonic()
    measured = run_slice(target, requests(2), concurrency=2, limit=0.2)
    assert (measured.requests, measured.unfinished, measured.seconds, measured.tokens) == ((), 2, 0.0, None)
    assert time.monotonic() - began < 3


def test_ctrl_c_ends_the_requests(server: Loopback, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    target.client.model()
    server.faults = Faults(chunk_delay=0.05, wordy=True)  # an answer without an end
    joined = threading.Thread.join

    def interrupt(thread: threading.Thread, timeout: float | None = None) -> None:
        if len(server.posts()) == 2 and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        joined(thread, timeout)

    interrupted: list[bool] = []
    monkeypatch.setattr(threading.Thread, "join", interrupt)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_slice(target, requests(9), concurrency=2, limit=60)
    monkeypatch.undo()
    assert interrupted and len(server.posts()) == 2
    end = time.monotonic() + 5
    while threading.active_count() > before + 2 and time.monotonic() < end:  # the server's own threads end later
        time.sleep(0.02)
    assert threading.active_count() <= before + 2


def test_drafts_of_answers_are_added(server: Loopback, target: Target) -> None:
    server.extras = lambda request, answer: {"timings": {"drafted": 4, "accepted": 3}}
    found = run_slice(target, requests(3), concurrency=2, limit=60).acceptance
    assert found == ServerAcceptance(12, 9)


@pytest.mark.parametrize("others", [0, 7])
def test_drafts_from_counters_are_those_of_all_answers(others: int, server: Loopback, target: Target) -> None:
    reads = iter((0, 3 * LENGTH + others))

    def counters() -> tuple[int, str, str]:
        tokens = next(reads)
        return 200, "application/json", f'{{"tokens": {tokens}, "drafted": {2 * tokens}, "accepted": {tokens}}}'

    server.pages["/counters"] = counters
    found = run_slice(target, requests(3), concurrency=3, limit=60).acceptance
    assert found is not None and found.valid == (others == 0) and found.drafted == 2 * found.accepted


def test_events_without_counts_give_no_throughput(server: Loopback, target: Target) -> None:
    server.faults = Faults(usage=False)
    measured = run_slice(target, requests(2), concurrency=1, limit=60)
    assert measured.tokens is None and measured.speed() is None and measured.requests[0].token_seconds is None


@pytest.mark.parametrize("others", [0, 7])
def test_tokens_of_other_clients_are_noticed(others: int, server: Loopback, target: Target) -> None:
    """Also those of a server without drafts, whose counters show nothing else."""

    class Counted(CountingKind):
        generated = "tokens"

    target.kind = Counted()
    reads = iter((10, 10 + 3 * LENGTH + others) * 2)
    server.pages["/counters"] = lambda: (200, "application/json", f'{{"tokens": {next(reads)}, "drafted": 0}}')
    target.kind.acceptance = lambda *arguments: None  # type: ignore[method-assign]
    assert run_slice(target, requests(3), concurrency=2, limit=60).other_tokens == others
    server.faults = Faults(cut_after=2)
    with pytest.raises(UserError):
        run_slice(target, requests(3), concurrency=2, limit=60)


def test_requests_arrive_at_their_times_whether_or_not_others_are_answered(server: Loopback, target: Target) -> None:
    holding = threading.Event()
    server.extras = lambda request, answer: {"held": holding.wait(10)}
    arrivals = [0.0, 0.05, 0.1]
    found: list[LoadSlice] = []
    running = threading.Thread(
        target=lambda: found.append(run_slice(target, requests(3), concurrency=9, arrivals=arrivals, limit=60))
    )
    running.start()
    end = time.monotonic() + 10
    while len(server.posts()) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(server.posts()) == 3, "all have arrived, and none was answered"
    holding.set()
    running.join()
    sent = sorted(one.sent for one in found[0].requests)
    assert all(time >= arrival for time, arrival in zip(sent, arrivals, strict=True)) and found[0].unfinished == 0


def test_drafts_are_added_and_one_invalid_part_makes_all_invalid() -> None:
    one = ServerAcceptance(4, 3, 2, ((2, 2), (1, 2)), forwards=3)
    two = ServerAcceptance(5, 1, 3, ((1, 3),), forwards=4, note="n")
    assert sum_of_drafts([(one, 6), (two, 5), (None, 7)]) == ServerAcceptance(
        9, 4, 5, ((3, 5), (1, 2)), note="n", forwards=14
    )
    assert sum_of_drafts([(None, 7)]) is None
    found = sum_of_drafts([(one, 6), (ServerAcceptance(1, 1, valid=False), 2)])
    assert found is not None and not found.valid and found.by_position == ()
