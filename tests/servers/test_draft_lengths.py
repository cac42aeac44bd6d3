"""/server load with draft=: every length has its turns, winners need intervals, and the server is left as it was."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, records_of
from servers.launches import fake_program, family
from servers.loopback import Loopback
from servers.server_sessions import server_session

from utils.commands.servers import server_load
from utils.commands.servers.load_figures import (
    Load,
    LoadCell,
    conclusion,
    draft_schedule,
    load_rows,
    load_settings,
)
from utils.decode.steps import FinishReason
from utils.repl.repl_session import ReplSession, Verdict
from utils.servers.address import ServerAddress
from utils.servers.connection import ServerList
from utils.servers.kinds.completion import ServerAcceptance, ServerCompletion
from utils.servers.load_slice import LoadRequest, LoadSlice
from utils.servers.processes.flags import Speculation
from utils.servers.processes.programs import Launch

PROGRAM = "/server start llama.cpp a.gguf program={} drafter=ngram draft=3 name=one"


@pytest.fixture
def session(view: Screen, tmp_path: Path) -> Iterator[ReplSession]:
    made = server_session(view, records=tmp_path / "r.jsonl")
    assert made.handle(PROGRAM.format(fake_program(tmp_path, "picky"))) is Verdict.DONE
    yield made
    made.close()


def measured(session: ReplSession, line: str, tmp_path: Path) -> dict[str, Any]:
    """The record of a load."""
    session.handle("Hello there")
    session.handle(line)
    return dict([row for row in records_of(tmp_path / "r.jsonl") if row["record"] == "server load"][-1])


def test_lengths_are_compared_at_every_load(
    session: ReplSession, view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock of its own, on which every draft saves time, and with starts that only note their lengths."""
    local, run, starts = session.harness.state.servers.connections["one"].local, server_load.run_slice, []
    assert local is not None

    def restart(servers: ServerList, name: str, launch: Launch) -> Iterator[str]:
        starts.append(launch.drafts)
        local.launch = launch
        yield "starting"

    def timed(target: Any, requests: Any, **options: Any) -> LoadSlice:
        return replace(run(target, requests, **options), seconds=len(requests) / (1 + local.launch.drafts))

    monkeypatch.setattr(ServerList, "restart", restart)
    monkeypatch.setattr(server_load, "run_slice", timed)
    line = "/server load one draft=2 concurrency=1,2 requests=5 length=2 turns=5 seconds=9000"
    record = measured(session, line, tmp_path)
    assert record["finished"] and starts == [0, 2, 0, 2, 0, 2, 3], "the last one restores the server"
    rows = record["findings"]
    assert [(row["concurrency"], row["draft"]) for row in rows] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert [row["baseline"] for row in rows] == [None, "draft=0"] * 2 and all(len(row["tokens"]) == 5 for row in rows)
    assert all(row["speedup"] == pytest.approx(3) and row["fastest"] and row["advised"] for row in rows[1::2])
    assert "1 at once: draft=2 is the fastest, " in record["conclusion"][0]
    shown = "".join(view.take())
    assert '"num_speculative_tokens": 2' in shown
    requests = [row for row in records_of(tmp_path / "r.jsonl") if row["record"] == "server load request"]
    assert {row["draft"] for row in requests} == {0, 2}


def test_a_length_that_does_not_start_is_left_out_and_the_server_stays(
    session: ReplSession, view: Screen, tmp_path: Path
) -> None:
    before = family()
    line = "/server load one draft=0,8,4 concurrency=1 requests=1 length=2 turns=2"
    record = measured(session, line, tmp_path)
    assert [row["draft"] for row in record["findings"]] == [0, 4]
    shown = "".join(view.take())
    assert shown.count("eight drafts are too many") == 1
    assert "too little was measured to tell" in shown and "num_speculative_tokens" not in shown
    servers = session.harness.state.servers
    assert servers.launch_of("one").drafts == 3 and len(family()) == len(before)
    assert session.handle("Hello") is Verdict.DONE


def test_ctrl_c_keeps_what_was_measured_and_restores_the_server(
    session: ReplSession, view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, run = [], server_load.run_slice

    def interrupted(*arguments: Any, **options: Any) -> LoadSlice:
        sent.append(arguments)
        if len(sent) == 6:  # two first requests, a warm-up and a turn of draft 0; a warm-up and a turn of draft 2
            raise KeyboardInterrupt
        return run(*arguments, **options)

    monkeypatch.setattr(server_load, "run_slice", interrupted)
    record = measured(session, "/server load one draft=0,2 concurrency=1 requests=1 length=2 turns=1", tmp_path)
    assert not record["finished"] and [row["draft"] for row in record["findings"]] == [0]
    assert session.harness.state.servers.launch_of("one").drafts == 3
    assert session.handle("Hello") is Verdict.DONE


def test_lines_that_are_refused(session: ReplSession, view: Screen, tmp_path: Path) -> None:
    with Loopback() as other:
        session.handle(f"/server add two {other.url}")
        session.handle(f"/server start llama.cpp a.gguf program={fake_program(tmp_path)} name=plain")
        session.handle("Hello")
        view.take()
        for line, part in (
            ("two draft=2", "'two' was not started by this session"),
            ("plain draft=2", "plain has no drafter"),
            ("one draft=0", "up to 16 lengths"),
            ("one draft=0,x", "not a whole number"),
        ):
            assert session.handle(f"/server load {line}") is Verdict.FAILED
            assert part in " ".join("".join(view.take()).split())


ADDRESS = ServerAddress("spec", "http://127.0.0.1:1")


def cell(load: Load, draft: int, speeds: list[float]) -> LoadCell:
    """A cell with one turn for each speed."""
    slices = {}
    for turn, speed in enumerate(speeds):
        answer = ServerCompletion("", (), FinishReason.LENGTH, "", 1 / speed, usage_tokens=1)
        slices[turn] = LoadSlice((LoadRequest(0, 0.0, answer),), 0, 1 / speed)
    return LoadCell(load, ADDRESS, len(speeds), draft=draft, slices=slices)


def surface(*cells: LoadCell) -> list[dict[str, Any]]:
    return [*load_rows({(one.load, f"draft={one.draft}"): one for one in cells})]


ALONE, FOUR, MANY = Load(1), Load(4), Load(16)
NOISE = [1.0, 1.01, 0.99, 1.0, 1.02]


def times(factor: float) -> list[float]:
    return [10 * factor * noise for noise in NOISE]


def test_a_winner_needs_an_interval_against_every_other_length() -> None:
    mixed = [10 * factor for factor in (1.6, 1.4, 1.6, 1.4, 1.5)]
    rows = surface(cell(ALONE, 0, times(1.0)), cell(ALONE, 3, times(1.5)), cell(ALONE, 5, mixed))
    assert not any(row["fastest"] for row in rows) and [row["draft"] for row in rows if row["advised"]] == [3]
    assert conclusion(rows)[0].startswith("1 at once: no length is measurably faster than all others; draft=3 is")
    rows = surface(cell(ALONE, 0, times(1.0)), cell(ALONE, 3, times(1.5)), cell(ALONE, 5, times(1.2)))
    assert conclusion(rows)[0].startswith("1 at once: draft=3 is the fastest, 1.50x draft=0 (95 % interval")
    few = surface(cell(ALONE, 0, [10, 10]), cell(ALONE, 3, [15, 16]))
    assert (
        conclusion(few)[0] == "1 at once: too little was measured to tell; the highest is draft=3, about 1.5x draft=0."
    )
    assert load_settings(few, Speculation("EAGLE-3", 3, "a")) == []


def test_the_schedule_follows_the_loads() -> None:
    lengths = {ALONE: {0: 1.0, 3: 1.2, 5: 1.5}, FOUR: {0: 1.0, 3: 1.2, 5: 1.1}, MANY: {0: 1.0, 3: 0.8, 5: 0.6}}
    cells = [cell(load, draft, times(factor)) for load, own in lengths.items() for draft, factor in own.items()]
    rows = surface(*cells)
    assert draft_schedule(rows) == ((1, 3, 5), (4, 15, 3), (16, 16, 0))
    lines = load_settings(rows, Speculation("EAGLE-3", 9, "a"))
    (vllm,) = (line.partition(": ")[2] for line in lines if line.startswith("vLLM: "))
    config = json.loads(shlex.split(vllm)[1])
    assert config["num_speculative_tokens"] == 5
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 3, 5], [4, 15, 3], [16, 16, 0]]


def test_a_length_without_an_accepted_draft_is_not_the_fastest() -> None:
    lucky = cell(ALONE, 3, times(1.5))
    lucky.slices = {turn: replace(one, acceptance=ServerAcceptance(9, 0)) for turn, one in lucky.slices.items()}
    rows = surface(cell(ALONE, 0, times(1.0)), lucky, cell(ALONE, 5, times(1.2)))
    assert [row["draft"] for row in rows if row["fastest"]] == [5]


def test_a_load_without_advice_has_no_schedule() -> None:
    cells = [cell(load, draft, times(1 + draft)[:turns]) for load, turns in ((ALONE, 2), (FOUR, 5)) for draft in (0, 1)]
    assert draft_schedule(surface(*cells)) == ()


def test_one_length_for_all_loads_needs_no_schedule_and_no_gain_no_settings() -> None:
    same = surface(*(cell(load, draft, times(1 + draft)) for load in (ALONE, FOUR) for draft in (0, 1)))
    lines = load_settings(same, Speculation("EAGLE-3", 9, "a"))
    assert "per_batch_size" not in str(lines) and '"num_speculative_tokens": 1' in str(lines)
    loss = surface(*(cell(load, draft, times(1 / (1 + draft))) for load in (ALONE, FOUR) for draft in (0, 1)))
    assert load_settings(loss, Speculation("EAGLE-3", 9, "a")) == [] == load_settings(same, None)
    assert conclusion(loss)[0] == "1 at once: draft=0 is the fastest."
    rates = [Load(0.5, is_rate=True), Load(2, is_rate=True)]
    mixed = surface(*(cell(load, draft, times(1 + draft * load.value)) for load in rates for draft in (0, 1)))
    assert all(row["concurrency"] is None for row in mixed)
    assert '"num_speculative_tokens": 1' in str(load_settings(mixed, Speculation("EAGLE-3", 9, "a")))
