"""/server load: what is sent, in which order, what is compared, and where speculation stops paying."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, records_of
from servers.loopback import Faults, Loopback
from servers.server_sessions import server_session

from utils.commands.servers.server_load import conclusion, load_charts
from utils.comparison.charts import LineChart
from utils.comparison.reports import Finding
from utils.comparison.speed_claims import SpeedClaim
from utils.repl.repl_session import ReplSession
from utils.repl.runner import Verdict
from utils.servers.address import ServerAddress


@pytest.fixture
def plain() -> Iterator[Loopback]:
    with Loopback(faults=Faults(chunk_delay=0.03)) as running:
        yield running


@pytest.fixture
def spec() -> Iterator[Loopback]:
    """Three times as fast, but it answers one request at a time."""
    with Loopback(faults=Faults(chunk_delay=0.01), slots=1) as running:
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


def record(tmp_path: Path) -> dict[str, Any]:
    return dict(records_of(tmp_path / "r.jsonl")[-1])


def test_speculation_pays_alone_and_not_under_load(
    session: ReplSession, plain: Loopback, spec: Loopback, view: Screen, tmp_path: Path
) -> None:
    line = "/server load spec concurrency=6,1 requests=5 length=8 turns=5"
    assert session.handle(line) is Verdict.DONE
    rows = record(tmp_path)["findings"]
    assert [(row["concurrency"], row["server"]) for row in rows] == [
        (1, "spec"),
        (1, "plain"),
        (6, "spec"),
        (6, "plain"),
    ]
    alone, _, loaded, base = rows
    assert alone["speedup"] > 1.5 and loaded["speedup"] < 0.9 and len(alone["speedups"]) == 5
    assert (alone["verdict"], loaded["verdict"], base["verdict"]) == ("faster", "slower", "-")
    assert alone["interval"][0] > 1 > loaded["interval"][1]
    assert (alone["requests"], loaded["requests"]) == (10, 30)  # both prompts in each turn, and at least 6 requests
    assert base["speedups"] == [] and base["baseline"] is None
    assert loaded["tokens_per_second"] == pytest.approx(sum(loaded["tokens"]) / sum(loaded["seconds"]))
    assert loaded["first_token_seconds"][0] > alone["first_token_seconds"][0]  # it waits for the slot
    assert "stops paying between 1 and 6 requests at once" in " ".join(record(tmp_path)["conclusion"])
    for server in (plain, spec):
        sent = server.posts()
        assert len(sent) == 2 + 10 + 30 and {one.body["max_tokens"] for one in sent} == {8}
        texts = {one.body["messages"][-1]["content"] for one in sent}
        assert texts == {"First", "Second"}
    assert plain.most_at_once == 6
    assert "about" in (shown := "".join(view.take())) and "80 requests" in shown


def test_every_concurrency_sends_every_prompt_equally_often(
    session: ReplSession, plain: Loopback, view: Screen, tmp_path: Path
) -> None:
    """With other prompts at each concurrency, a load curve would compare prompts, not loads."""
    session.handle("Third")
    for concurrencies, requests, per_turn in (("1,2,4", 2, (3, 3, 6)), ("1,2", 2, (2, 2))):
        plain.log.clear()
        line = f"/server load plain concurrency={concurrencies} requests={requests} length=2 turns=2"
        assert session.handle(line) is Verdict.DONE
        sent = [one.body["messages"][-1]["content"] for one in plain.posts()][2:]  # without the warm-up
        for count in per_turn:
            ours, sent = sent[: 2 * count], sent[2 * count :]
            assert len({ours.count(text) for text in set(ours)}) == 1
            assert len(set(ours)) == min(3, max(map(int, concurrencies.split(","))))
        assert not sent
    assert "The first 2 of 3 prompts are sent." in "".join(view.take())


def test_servers_take_turns_at_going_first(
    session: ReplSession, plain: Loopback, spec: Loopback, tmp_path: Path
) -> None:
    session.handle("/server load spec concurrency=1 requests=2 length=2 turns=2")
    sent = sorted([(one.at, "plain") for one in plain.posts()] + [(one.at, "spec") for one in spec.posts()])
    names = [name for _, name in sent]
    assert names == ["spec", "spec", "plain", "plain", "spec", "plain", "plain", "spec"]


def test_a_server_without_a_baseline_is_measured_alone(session: ReplSession, spec: Loopback, tmp_path: Path) -> None:
    assert session.handle("/server load plain concurrency=2 requests=2 length=3 turns=1") is Verdict.DONE
    (row,) = record(tmp_path)["findings"]
    assert row["server"] == "plain" and row["speedup"] is None and not spec.posts()
    assert "Nothing to compare with" in " ".join(record(tmp_path)["conclusion"])


def test_the_time_limit_ends_the_series(session: ReplSession, view: Screen, tmp_path: Path) -> None:
    assert session.handle("/server load spec concurrency=1 requests=200 length=20 turns=1 seconds=1") is Verdict.DONE
    rows = record(tmp_path)["findings"]
    assert rows and all(row["requests"] + row["unfinished"] == 200 for row in rows) and rows[0]["unfinished"] > 0


def test_a_server_that_fails_keeps_what_was_measured(
    session: ReplSession, plain: Loopback, view: Screen, tmp_path: Path
) -> None:
    def fails_later(*ignored: Any) -> dict[str, Any]:
        if len(plain.posts()) == 6:  # two before the measurement and four of the first load
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
        ("/server load", "name a server of this session: plain, spec"),
        ("/server load speck", "Did you mean spec"),
        ("/server load spec concurrency=0", "1 to 64"),
        ("/server load spec requests=x", "not a whole number"),
        ("/server load spec length=1", "2 to"),
        ("/server load spec request=2", "Did you mean requests"),
    ],
)
def test_lines_that_are_refused(line: str, part: str, session: ReplSession, view: Screen, plain: Loopback) -> None:
    assert session.handle(line) is Verdict.FAILED
    assert part in " ".join("".join(view.take()).split()) and not plain.posts()


def row(concurrency: int, ratios: list[float], **values: Any) -> Finding:
    figures = {
        "server": "spec",
        "baseline": "plain",
        "concurrency": concurrency,
        "speedups": ratios,
        **SpeedClaim.of([ratios]).figures,
        "tokens_per_second": 10.0 * concurrency,
        "token_seconds": (0.01, 0.02),
        "drafted": 10,
        "accepted": 5,
        "acceptance_notes": [],
    }
    return Finding((), figures | values)


def test_conclusions_name_every_load_once() -> None:
    ahead, mixed, behind = [1.5, 1.4, 1.45, 1.5, 1.4], [1.1, 0.9, 1.1, 0.9, 1.0], [0.8, 0.7, 0.75, 0.8, 0.7]
    lines = " ".join(conclusion([row(1, ahead), row(2, mixed), row(8, behind)]))
    assert "higher throughput than plain with this many requests at once: 1 (1.45x)" in lines
    assert "not distinguishable with this many requests at once: 2 (1.00x)" in lines
    assert "lower throughput than plain with this many requests at once: 8 (0.75x)" in lines
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
    assert "higher" not in lines and "lower" not in lines and "stops paying" not in lines
    assert "1 (about 1.45x), 2 (about 0.75x)" in lines and "turns=5" in lines


def test_the_plots_have_a_point_for_each_load() -> None:
    throughput, latency = load_charts([row(1, [1.5]), row(4, [0.9])])
    assert isinstance(throughput, LineChart) and throughput.ticks == ["1", "4"]
    assert throughput.series == {"spec": [10.0, 40.0]}
    assert isinstance(latency, LineChart) and latency.series == {"spec": [10.0, 10.0]}
