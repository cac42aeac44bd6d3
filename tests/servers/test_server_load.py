"""/server load: what is sent, in which order, what is compared, and where speculation stops paying."""

from collections.abc import Callable, Iterator
from csv import DictReader
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Screen, records_of
from servers.loopback import Faults, Loopback
from servers.server_sessions import count_tokens, server_session

from utils.commands.servers import server_load
from utils.commands.servers.load_figures import (
    LatencyLimits,
    Load,
    LoadCell,
    conclusion,
)
from utils.comparison.speed_claims import speed_claim
from utils.decode.steps import FinishReason
from utils.repl.repl_session import ReplSession, Verdict
from utils.servers.address import ServerAddress
from utils.servers.kinds.completion import Piece, ServerAcceptance, ServerCompletion
from utils.servers.kinds.server_kind import ServerKind
from utils.servers.load_slice import LoadRequest, LoadSlice


@pytest.fixture
def plain() -> Iterator[Loopback]:
    with Loopback() as running:
        yield running


@pytest.fixture
def spec() -> Iterator[Loopback]:
    """It answers one request at a time."""
    with Loopback(slots=1) as running:
        yield running


@pytest.fixture
def session(plain: Loopback, spec: Loopback, view: Screen, tmp_path: Path) -> Iterator[ReplSession]:
    addresses = ServerAddress("plain", plain.url), ServerAddress("spec", spec.url, baseline="plain")
    made = server_session(view, *addresses, records=tmp_path / "r.jsonl")
    for prompt in ("First", "Second"):
        made.handle(prompt)
    plain.log.clear()
    spec.log.clear()
    yield made
    made.close()


def record(tmp_path: Path, name: str = "server load") -> dict[str, Any]:
    """The last record of this name."""
    return dict([row for row in records_of(tmp_path / "r.jsonl") if row["record"] == name][-1])


def test_speculation_pays_alone_and_not_under_load(
    session: ReplSession, plain: Loopback, spec: Loopback, view: Screen, tmp_path: Path
) -> None:
    plain.faults, spec.faults = Faults(chunk_delay=0.03), Faults(chunk_delay=0.012)
    line = "/server load spec concurrency=4,1 requests=5 length=3 turns=5"
    assert session.handle(line) is Verdict.DONE
    rows = record(tmp_path)["findings"]
    assert [(row["concurrency"], row["server"]) for row in rows] == [
        (1, "spec"),
        (1, "plain"),
        (4, "spec"),
        (4, "plain"),
    ]
    alone, _, loaded, base = rows
    assert alone["speedup"] > 1.5 and loaded["speedup"] < 0.9 and len(alone["speedups"]) == 5
    assert (alone["verdict"], loaded["verdict"], base["verdict"]) == ("faster", "slower", "-")
    assert alone["interval"][0] > 1 > loaded["interval"][1]
    assert (alone["requests"], loaded["requests"]) == (5 * 4, 5 * 12)  # three for each client, and both prompts
    assert base["speedups"] == [] and base["baseline"] is None
    assert loaded["tokens_per_second"] == pytest.approx(sum(loaded["tokens"]) / sum(loaded["seconds"]))
    assert loaded["first_token_seconds"][0] > alone["first_token_seconds"][0]  # it waits for the slot
    assert "stops paying between 1 and 4 requests at once" in " ".join(record(tmp_path)["conclusion"])
    for server in (plain, spec):
        sent = server.posts()
        warm_up = 2 + 1 + 4
        assert len(sent) == warm_up + 20 + 60 and {one.body["max_tokens"] for one in sent} == {3}
        texts = {one.body["messages"][-1]["content"] for one in sent}
        assert texts == {"First", "Second"}
    assert 4 <= plain.most_at_once <= 8  # the next request may arrive before the server has ended the last one
    assert "about" in (shown := "".join(view.take())) and "160 requests" in shown


def test_every_concurrency_sends_every_prompt_equally_often(
    session: ReplSession, plain: Loopback, view: Screen, tmp_path: Path
) -> None:
    """With other prompts at each concurrency, a load curve would compare prompts, not loads."""
    session.handle("Third")
    session.handle("Fourth")
    for requests, per_turn in ((2, (3, 6, 12)), (8, (4, 8, 12))):
        plain.log.clear()
        assert (
            session.handle(f"/server load plain concurrency=1,2,4 requests={requests} length=2 turns=2") is Verdict.DONE
        )
        sent = [one.body["messages"][-1]["content"] for one in plain.posts()]
        del sent[: 2 + 1 + 2 + 4]  # the warm-up
        for number in per_turn:
            ours, sent = sent[: 2 * number], sent[2 * number :]
            assert len({ours.count(text) for text in set(ours)}) == 1
            assert len(set(ours)) == per_turn[0]
        assert not sent
    assert "3 of 4 prompts are sent, evenly spaced; requests=8 sends all." in "".join(view.take())


def test_servers_take_turns_at_going_first(
    session: ReplSession, plain: Loopback, spec: Loopback, tmp_path: Path
) -> None:
    session.handle("/server load spec concurrency=1 requests=2 length=2 turns=2")
    sent = sorted([(one.at, "plain") for one in plain.posts()] + [(one.at, "spec") for one in spec.posts()])
    names = [name for _, name in sent]
    warm_up = ["spec", "spec", "plain", "plain", "spec", "plain"]
    assert names == [*warm_up, *["spec"] * 4, *["plain"] * 8, *["spec"] * 4]


def test_a_server_without_a_baseline_is_measured_alone(session: ReplSession, spec: Loopback, tmp_path: Path) -> None:
    assert session.handle("/server load plain concurrency=2 requests=2 length=3 turns=1") is Verdict.DONE
    (row,) = record(tmp_path)["findings"]
    assert row["server"] == "plain" and row["speedup"] is None and not spec.posts()
    assert "Nothing to compare with" in " ".join(record(tmp_path)["conclusion"])


def test_answers_end_by_themselves_unless_their_length_is_fixed(
    session: ReplSession, plain: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerKind, "further_fields", lambda kind, request: {"ignore_eos": request.ignore_eos})
    plain.stops_after = 3
    assert session.handle("/server load plain concurrency=1 requests=1 length=8 turns=1") is Verdict.DONE
    (row,) = record(tmp_path)["findings"]
    assert row["tokens"] == [3 * row["requests"]] and "End tokens" not in str(record(tmp_path)["conclusion"])
    assert session.handle("/server load plain concurrency=1 requests=1 fixed=8 turns=1") is Verdict.DONE
    (row,) = record(tmp_path)["findings"]
    assert row["tokens"] == [8 * row["requests"]] and "End tokens were ignored" in str(record(tmp_path)["conclusion"])


def timed(monkeypatch: pytest.MonkeyPatch, single: Callable[[int], float]) -> None:
    """Measure on a clock of its own: one request after the other takes single(slices so far) seconds."""
    run, now, slices = server_load.run_slice, [0.0], count()

    def quick(target: Any, requests: Any, *, limit: float, **options: Any) -> LoadSlice:
        seconds = single(next(slices)) * len(requests)
        now[0] += seconds
        measured = run(target, requests, limit=60, **options)
        return replace(measured, seconds=seconds, unfinished=int(seconds > limit))

    monkeypatch.setattr(server_load, "run_slice", quick)
    monkeypatch.setattr(server_load, "time", SimpleNamespace(monotonic=lambda: now[0]))


@pytest.mark.parametrize(
    ("seconds", "turns", "loads", "note"),
    [
        pytest.param(1000, 8, [1, 2, 4], "", marks=pytest.mark.full),
        # A turn of both servers takes 8 s alone, 12 s with 2 at once and 24 s with 4.
        (240, 5, [1, 2, 4], "is enough for 5 of 8 turns; everything takes at least 352 s."),
        pytest.param(
            *(200, 8, [1, 2], "is enough for 8 of 8 turns, but not for 4 at once; everything takes at least 352 s."),
            marks=pytest.mark.full,
        ),
        (110, 5, [1, 2], "is enough for 5 of 8 turns, but not for 4 at once; everything takes at least 208 s."),
    ],
)
def test_turns_and_then_loads_are_left_out_and_slices_stay_whole(
    seconds: int,
    turns: int,
    loads: list[int],
    note: str,
    session: ReplSession,
    plain: Loopback,
    spec: Loopback,
    view: Screen,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed(monkeypatch, lambda slices: 1.0)
    line = f"/server load spec concurrency=1,2,4 requests=8 length=2 turns=8 seconds={seconds}"
    assert session.handle(line) is Verdict.DONE
    rows = record(tmp_path)["findings"]
    assert [row["concurrency"] for row in rows] == [load for load in loads for _ in range(2)]
    assert all(len(row["speedups"]) == turns for row in rows[::2])
    per_turn = {1: 4, 2: 6, 4: 12}
    assert all(row["requests"] == turns * per_turn[row["concurrency"]] for row in rows)
    shown = " ".join("".join(view.take()).split())
    assert note in shown and ("is enough for" in shown) == bool(note)


def test_too_short_a_time_is_refused_with_what_is_needed(
    session: ReplSession, view: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, lambda slices: 1.0)
    assert session.handle("/server load spec concurrency=2 length=2 seconds=30 requests=1") is Verdict.FAILED
    shown = " ".join("".join(view.take()).split())
    assert "seconds=30 is too short: 2 at once takes about 60 s with 5 turns" in shown


def test_a_slice_that_takes_too_long_is_not_counted(
    session: ReplSession, view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two warm-ups of each server, one at the load, and six slices.
    timed(monkeypatch, lambda slices: 1.0 if slices < 2 * 2 + 2 + 6 else 90.0)
    assert session.handle("/server load spec concurrency=1 requests=5 length=2 turns=5 seconds=60") is Verdict.DONE
    rows = record(tmp_path)["findings"]
    assert [row["requests"] for row in rows] == [12, 12] and len(rows[0]["speedups"]) == 3
    lines = " ".join(record(tmp_path)["conclusion"])
    assert "Fewer than 5 turns of both were measured" in lines and "turns=5" not in lines
    assert "seconds=" in " ".join("".join(view.take()).split())


def test_a_server_that_fails_keeps_what_was_measured(
    session: ReplSession, plain: Loopback, view: Screen, tmp_path: Path
) -> None:
    def fails_later(*ignored: Any) -> dict[str, Any]:
        if len(plain.posts()) == 2 + 1 + 2 + 4:  # the warm-up and the first load
            plain.faults = Faults(status=500, message="out of memory")
        return {}

    plain.extras = fails_later
    assert session.handle("/server load spec concurrency=1,2 requests=4 length=3 turns=1") is Verdict.FAILED
    last = record(tmp_path)
    assert not last["finished"] and [row["concurrency"] for row in last["findings"]] == [1, 1, 2]
    assert "out of memory" in "".join(view.take()) and session.handle("/server") is Verdict.DONE


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("/server load", "which server? This session has plain, spec"),
        ("/server load speck", "Did you mean spec"),
        ("/server load spec concurrency=0", "1 to 64"),
        ("/server load spec requests=x", "not a whole number"),
        ("/server load spec length=1", "2 to"),
        ("/server load spec request=2", "Did you mean requests"),
        ("/server load spec rate=2 concurrency=1", "exclude each other"),
        ("/server load spec fixed=9 length=9", "exclude each other"),
        ("/server load spec rate=0/s", "0.001 to 100"),
        ("/server load spec rate=2/min", "not a number"),
        ("/server load spec ttft=fast", "ttft=50ms"),
        ("/server load spec tpot=0ms", "tpot=50ms"),
        ("/server load spec cache=1", "on, off"),
        ("/server load spec no-such-file.txt", "no-such-file.txt"),
    ],
)
def test_lines_that_are_refused(line: str, part: str, view: Screen) -> None:
    """Before any server is asked: these do not exist."""
    gone = "http://127.0.0.1:9"
    session = server_session(view, ServerAddress("plain", gone), ServerAddress("spec", gone, baseline="plain"))
    session.harness.state.prompts.append("First")
    assert session.handle(line) is Verdict.FAILED
    shown = " ".join("".join(view.take()).split())
    assert part in shown and "cannot be reached" not in shown


def row(concurrency: int, ratios: list[float], /, **values: Any) -> dict[str, Any]:
    figures = {
        "server": "spec",
        "baseline": "plain",
        "concurrency": concurrency,
        "rate": None,
        "turns": len(ratios),
        "fixed": False,
        "limits": "",
        "not_compared": "",
        "speedups": ratios,
        **speed_claim([ratios]),
        "tokens_per_second": 10.0 * concurrency,
        "token_seconds": (0.01, 0.02),
        "drafted": 10,
        "accepted": 5,
        "acceptance_notes": [],
        "acceptance_unknown": [],
        "other_tokens": [None],
    }
    return figures | values


def test_conclusions_name_every_load_once() -> None:
    ahead, mixed, behind = [1.5, 1.4, 1.45, 1.5, 1.4], [1.1, 0.9, 1.1, 0.9, 1.0], [0.8, 0.7, 0.75, 0.8, 0.7]
    lines = " ".join(conclusion([row(1, ahead), row(2, mixed), row(8, behind)]))
    assert "faster than plain with this many requests at once: 1 (1.45x)" in lines
    assert "not distinguishable from plain with this many requests at once: 2 (1.00x)" in lines
    assert "slower than plain with this many requests at once: 8 (0.75x)" in lines
    assert "stops paying between 1 and 8 requests" in lines, "2 shows neither a gain nor a loss"
    assert "stops paying" not in (undecided := " ".join(conclusion([row(1, ahead), row(2, mixed)])))
    assert "more than 1 request " in undecided
    for rows in ([row(1, behind), row(2, behind)], [row(1, ahead), row(2, [0.8])]):
        assert "stops paying" not in (few := " ".join(conclusion(rows))) and "no gain" not in few
    assert "another reason than speculation" in " ".join(conclusion([row(1, ahead, drafted=None, accepted=None)]))
    assert "another reason" not in lines
    assert "stops paying" not in " ".join(conclusion([row(1, ahead), row(2, ahead)]))
    assert "No draft was accepted" in " ".join(conclusion([row(1, ahead, accepted=0)]))


def test_a_few_turns_are_no_winner() -> None:
    lines = " ".join(conclusion([row(1, [1.5, 1.4]), row(2, [0.8, 0.7])]))
    assert "faster" not in lines and "slower" not in lines and "stops paying" not in lines
    assert "1 (about 1.45x), 2 (about 0.75x)" in lines and "turns=5" in lines


def test_rates_are_named_as_such() -> None:
    rows = [row(0, [1.5] * 5, rate=rate, concurrency=None) for rate in (0.5, 2.0)]
    lines = " ".join(conclusion(rows))
    assert "spec is faster than plain with this many requests a second: 0.5 (1.50x), 2 (1.50x)" in lines


def test_every_note_is_shown_once_and_other_requests_are_marked() -> None:
    disturbed = {"disturbed": True, "acceptance_unknown": ["the server had other requests meanwhile"]}
    rows = [row(count, [1.5] * 5, other_tokens=[0, 9, 0, 4, 0], **disturbed) for count in (1, 2, 4)]
    lines = conclusion([*rows, row(8, [1.5] * 5, acceptance_notes=["b"]), row(16, [1.5] * 5, acceptance_notes=["b"])])
    assert "1 (1.50x*), 2 (1.50x*), 4 (1.50x*), 8 (1.50x)" in lines[0]
    assert sum("other requests during 6 of 17 turns (39 tokens more)" in line for line in lines) == 1
    assert sum("its acceptance is not known" in line for line in lines) == 1 and lines.count("Acceptance: b.") == 1


NO_LIMITS = LatencyLimits()


def test_another_client_in_one_turn_is_named(plain: Loopback, spec: Loopback, view: Screen, tmp_path: Path) -> None:
    warm_up, per_turn = 1 + 2 + 1, 3  # with the prompt
    count_tokens(plain)
    count_tokens(spec, [0] * (warm_up + per_turn) + [9], drafts=True)
    addresses = ServerAddress("plain", plain.url), ServerAddress("spec", spec.url, baseline="plain")
    session = server_session(view, *addresses, records=tmp_path / "r.jsonl")
    session.handle("First")
    assert session.handle("/server load spec concurrency=1 requests=1 length=4 turns=3") is Verdict.DONE
    row, base = record(tmp_path)["findings"]
    assert row["other_tokens"] == [0, 9, 0] and row["disturbed"] and not base["disturbed"]
    assert row["drafted"] is None and row["speedup"] is not None
    shown = "".join(view.take()[0])
    assert shown.count("spec had other requests during 1 of 3 turns (9 tokens more)") == 1
    assert shown.count("spec: its acceptance is not known") == 1
    assert f"{row['speedup']:.2f}x*" in shown and f"{row['tokens_per_second']:.1f}*" in shown
    assert f"{base['tokens_per_second']:.1f}*" not in shown


def cell(*slices: LoadSlice, limits: LatencyLimits = NO_LIMITS) -> LoadCell:
    address = ServerAddress("spec", "http://127.0.0.1:1")
    return LoadCell(Load(2), address, 5, limits, slices=dict(enumerate(slices)))


def answered(first: float, each: float, tokens: int = 11, number: int = 0) -> LoadRequest:
    """A request of 11 tokens that took so many seconds until the first, and for each further one."""
    pieces = (Piece("a", seconds=first), Piece("b", finish_reason="length", seconds=first + each * (tokens - 1)))
    seconds = pieces[1].seconds
    return LoadRequest(
        number, 0.0, ServerCompletion("ab", pieces, FinishReason.LENGTH, "length", seconds, usage_tokens=tokens)
    )


def test_the_acceptance_of_one_turn_is_not_that_of_all() -> None:
    valid, invalid = (
        ServerAcceptance(8, 4, 4, ((3, 4), (1, 4)), forwards=5),
        ServerAcceptance(9, 9, valid=False, note="x: 3"),
    )
    turns = [LoadSlice((answered(0.1, 0.1),), 0, 1.0, found) for found in (valid, invalid, None)]
    row = cell(*turns).figures(None)
    assert (row["drafted"], row["accepted"], row["accepted_by_position"]) == (None, None, None)
    assert row["acceptance_unknown"] == ["x"] and row["tokens_per_target_forward"] is None
    row = cell(turns[0], turns[0], turns[2]).figures(None)
    assert (row["drafted"], row["accepted"], row["accepted_by_position"]) == (16, 8, [[6, 8], [2, 8]])
    assert row["tokens_per_target_forward"] == 33 / (5 + 5 + 11)
    sentence = "spec, 2 at once: of drafts at position 1, 2, ... these shares were accepted: 0.75 0.25."
    assert sentence in conclusion([row])


def test_other_machines_are_not_compared_unless_they_are_equal() -> None:
    turn = LoadSlice((answered(0.1, 0.1),), 0, 1.0)
    base, ours = cell(turn), cell(turn)
    base.address = ServerAddress("plain", "http://192.0.2.1:1")
    ours.address = ServerAddress("spec", "http://192.0.2.2:1", baseline="plain")
    row = ours.figures(base)
    assert row["speedups"] == [] and any("different hosts" in line for line in conclusion([row] * 2))
    ours.address = replace(ours.address, same="plain")
    row = ours.figures(base)
    assert row["speedups"] == [1.0] and not any("different hosts" in line for line in conclusion([row]))


def test_percentiles_and_goodput() -> None:
    requests = [answered(number / 100, 0.01, number=number) for number in range(1, 100)]
    requests += [answered(0.1, 0.2), LoadRequest(100, 0.0, error="refused")]
    row = cell(LoadSlice(tuple(requests), 0, 10.0), limits=LatencyLimits(0.5, 0.05)).figures(None)
    assert row["first_token_seconds"] == pytest.approx([0.49, 0.89, 0.98])  # of 100 values, one of them twice
    assert row["token_seconds"] == pytest.approx([0.01, 0.01, 0.01]) and row["failed"] == 1
    assert row["request_seconds"][0] == pytest.approx(0.6, abs=0.011)
    assert (row["within_limits"], row["goodput"], row["limits"]) == (50, 5.0, "ttft=500ms and tpot=50ms")
    assert "Goodput counts the requests a second with ttft=500ms and tpot=50ms." in conclusion([row])


def test_prompts_of_a_file_arrive_at_random_times(
    session: ReplSession, plain: Loopback, spec: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, view: Screen
) -> None:
    file, arrivals, run = tmp_path / "p.jsonl", [], server_load.run_slice
    file.write_text('{"prompt": "One two"}\n{"turns": ["Three", "Four"]}\n{"prompt": "One two"}\n')

    def at_once(*arguments: Any, **options: Any) -> LoadSlice:
        arrivals.append(times := options.pop("arrivals", ()))
        return run(*arguments, **options, arrivals=[0.0] * len(times))

    monkeypatch.setattr(server_load, "run_slice", at_once)
    monkeypatch.setattr(server_load, "ARRIVALS", 6)
    line = f"/server load spec {file} rate=4/s,0.5 requests=1 turns=2 length=2 ttft=9s cache=on"
    assert session.handle(line) is Verdict.DONE, view.take()
    rows = record(tmp_path, "server load")["findings"]
    assert [(row["rate"], row["requests"], row["concurrency"]) for row in rows] == [(0.5, 12, None)] * 2 + [
        (4, 12, None)
    ] * 2
    assert all(row["within_limits"] == 12 for row in rows) and len(rows[0]["speedups"]) == 2
    measured = [times for times in arrivals if len(times) == 6]
    assert all(times[0] == 0 and sorted(times) == times for times in measured)
    # The same times for both servers, others in the next turn, and the rate on average.
    assert measured[0] == measured[1] != measured[2] == measured[3]
    assert measured[4] == pytest.approx([time / 8 for time in measured[0]])
    texts = [one.body["messages"][-1]["content"] for one in plain.posts()][-12:]
    assert texts.count("One two") == 8 and texts.count("Three") == 4, "with repeated prompts, as they are"


def test_requests_have_records_and_a_table(session: ReplSession, view: Screen, tmp_path: Path) -> None:
    assert session.handle("/server load spec concurrency=1,2 requests=4 length=3 turns=1") is Verdict.DONE
    rows = [row for row in records_of(tmp_path / "r.jsonl") if row["record"] == "server load request"]
    assert len(rows) == 2 * (4 + 6) and {row["schema"] for row in rows} == {2}
    assert {(row["server"], row["concurrency"], row["turn"]) for row in rows} == {
        (name, count, 1) for name in ("spec", "plain") for count in (1, 2)
    }
    assert all(row["new_tokens"] == 3 and row["seconds"] >= row["first_token_seconds"] > 0 for row in rows)
    assert [row["sent_seconds"] for row in rows[:4]] == sorted(row["sent_seconds"] for row in rows[:4])
    assert session.handle(f"/export {tmp_path / 'load.csv'}") is Verdict.DONE
    with (tmp_path / "load.csv").open(newline="") as file:
        table = list(DictReader(file))
    assert len(table) == len(rows) and float(table[0]["seconds"]) == rows[0]["seconds"]
    assert session.handle(f"/export {tmp_path / 'report.html'}") is Verdict.DONE
