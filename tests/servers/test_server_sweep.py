"""/server sweep: every draft length has its turn in both passes, and the server is left as it was."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, records_of
from servers.launches import fake_program, family
from servers.server_sessions import server_session

from utils.commands.servers.server_sweep import conclusion
from utils.comparison.reports import Finding
from utils.comparison.speed_claims import SpeedClaim
from utils.decode.steps import FinishReason
from utils.repl.repl_session import ReplSession
from utils.repl.runner import Verdict
from utils.servers.connection import Connection


@pytest.fixture
def session(view: Screen, tmp_path: Path) -> Iterator[ReplSession]:
    made = server_session(view, records=tmp_path / "r.jsonl")
    program = fake_program(tmp_path, "picky")
    assert (
        made.handle(f"/server start llama.cpp a.gguf program={program} drafter=ngram draft=3 name=one") is Verdict.DONE
    )
    yield made
    made.close()


def sweep(session: ReplSession, line: str, tmp_path: Path) -> dict[str, Any]:
    """The record of a sweep."""
    session.handle("Hello there")
    session.handle(line)
    return dict(records_of(tmp_path / "r.jsonl")[-1])


def test_lengths_are_compared_and_the_server_stays(session: ReplSession, view: Screen, tmp_path: Path) -> None:
    before = family()
    record = sweep(session, "/server sweep one draft=0,2 repeats=3", tmp_path)
    assert record["record"] == "server sweep" and record["finished"]
    plain, two = record["findings"]
    assert (plain["draft"], plain["verdict"], two["draft"]) == (0, "baseline", 2)
    assert len(plain["tokens_per_second"]) == len(two["speedups"]) == 6
    assert two["speedup"] > 1.2 and two["same_as_draft_0"]
    ratios = [ours / theirs for ours, theirs in zip(two["tokens_per_second"], plain["tokens_per_second"], strict=True)]
    # The second pass runs the lengths backwards, but runs are stored by length.
    assert two["speedups"] == pytest.approx(ratios)
    assert "draft 2" in record["conclusion"][0]
    servers = session.harness.state.servers
    assert servers.local.launch_of("one").drafts == 3 and "one" in servers.local
    assert len(family()) == len(before) and session.handle("Hello") is Verdict.DONE


def test_a_length_that_does_not_start_is_left_out(session: ReplSession, view: Screen, tmp_path: Path) -> None:
    record = sweep(session, "/server sweep one draft=0,8,4 repeats=1", tmp_path)
    assert [row["draft"] for row in record["findings"]] == [0, 4]
    shown = "".join(view.take())
    assert shown.count("eight drafts are too many") == 1 and "one" in session.harness.state.servers.local


def test_ctrl_c_keeps_what_was_measured_and_restores_the_server(
    session: ReplSession, view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = [], Connection.ask

    def interrupted(connection: Connection, *arguments: Any) -> Any:
        asked.append(connection)
        if len(asked) == 7:  # the prompt; a warm-up and two runs of draft 0; a warm-up and one run of draft 2
            raise KeyboardInterrupt
        return ask(connection, *arguments)

    monkeypatch.setattr(Connection, "ask", interrupted)
    record = sweep(session, "/server sweep one draft=0,2 repeats=2", tmp_path)
    monkeypatch.undo()
    assert not record["finished"] and [row["draft"] for row in record["findings"]] == [0]
    assert len(record["findings"][0]["tokens_per_second"]) == 2
    assert session.harness.state.servers.local.launch_of("one").drafts == 3
    assert session.handle("Hello") is Verdict.DONE


def test_ctrl_c_in_a_warm_up_ends_the_sweep(
    session: ReplSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = [], Connection.ask

    def interrupted(connection: Connection, *arguments: Any) -> Any:
        asked.append(connection)
        answer = ask(connection, *arguments)
        # As a client returns the answer that Ctrl-C has ended.
        return replace(answer, finish=FinishReason.INTERRUPTED) if len(asked) == 4 else answer

    monkeypatch.setattr(Connection, "ask", interrupted)
    record = sweep(session, "/server sweep one draft=0,2 repeats=1", tmp_path)
    assert len(asked) == 4  # the prompt, a warm-up and a run of draft 0, a warm-up of draft 2
    assert not record["finished"] and [row["draft"] for row in record["findings"]] == [0]
    assert session.harness.state.servers.local.launch_of("one").drafts == 3


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("/server sweep", "name a server"),
        ("/server sweep one", "draft lengths"),
        ("/server sweep two draft=0,2", "'two' was not started by this session"),
        ("/server sweep one draft=2", "two to 16 different lengths"),
        ("/server sweep one draft=0,x", "not a whole number"),
        ("/server sweep one draft=0,2 repeats=0", "1 to 100"),
        ("/server sweep one draft=0,2", "a prompt is needed"),
    ],
)
def test_lines_that_are_refused(line: str, part: str, session: ReplSession, view: Screen) -> None:
    assert session.handle(line) is Verdict.FAILED
    assert part in " ".join("".join(view.take()).split())


def row(draft: int, speedups: list[float], *, per_forward: float | None = 2.0, same: bool = True) -> Finding:
    claim = SpeedClaim.of([speedups], baseline=not draft, tokens_per_forward=per_forward if draft else None)
    figures = {"draft": draft, "strategy": f"draft {draft}", "speedups": speedups}
    figures |= {"baseline": "draft 0", "same_as_draft_0": same, "other_tokens": [], "acceptance_unknown": []}
    return Finding((), figures | {"tokens_per_second": [10.0]} | claim.figures)


def test_conclusions() -> None:
    base = row(0, [1.0] * 6)
    fast, slow = row(2, [1.5, 1.51, 1.49, 1.5, 1.52, 1.5]), row(4, [0.9, 0.91, 0.89, 0.9, 0.92, 0.9])
    assert conclusion([base, slow, fast])[0].startswith("draft 2 is the fastest: 1.50x draft 0")
    assert conclusion([base, slow])[0].startswith("No draft length is measurably faster than draft 0")
    assert "too few runs" in conclusion([base, row(2, [1.5, 1.6])])[0]
    assert "saved a forward pass" in conclusion([base, row(2, [1.5] * 6, per_forward=1.0)])[0]
    assert any("texts differ" in line for line in conclusion([base, row(2, [1.5] * 6, same=False)]))
    alone = conclusion([fast])[0]  # there is nothing to be faster than
    assert "draft=0" in alone and "fastest" not in alone
