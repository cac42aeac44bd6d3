"""/verdict with servers: which one is judged, on which prompts, against what; its claims, texts and failures."""

from collections.abc import Iterator
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from fakes import Screen, records_of, table_pair
from servers.loopback import Faults, Loopback
from servers.server_sessions import count_tokens, server_session

from utils.commands.verdicts import measurement
from utils.repl.repl_session import Verdict
from utils.servers.address import ServerAddress
from utils.servers.connection import Connection, ServerList
from utils.servers.kinds.completion import ServerAcceptance
from utils.servers.kinds.server_kind import ServerKind
from utils.servers.processes.flags import Speculation

TOTAL_SECONDS = measurement.TOTAL_SECONDS
TEXTS = [f"Say the word {number}" for number in range(8)]


@pytest.fixture(autouse=True)
def one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "TOTAL_SECONDS", 0.0)


@pytest.fixture
def two() -> Iterator[tuple[Loopback, Loopback]]:
    with Loopback() as plain, Loopback() as spec:
        yield plain, spec


def addresses(two: tuple[Loopback, Loopback]) -> tuple[ServerAddress, ServerAddress]:
    return ServerAddress("plain", two[0].url), ServerAddress("spec", two[1].url, baseline="plain")


def verdict(session: Any, view: Screen, folder: Path, texts: list[str] = TEXTS) -> tuple[dict[str, Any], str]:
    """The judged server's figures, and the screen."""
    (folder / "prompts.txt").write_text("".join(f"{text}\n" for text in texts))
    result = session.handle(f"/verdict {folder / 'prompts.txt'}")
    shown = " ".join(" ".join(view.take()).split())
    assert result is Verdict.DONE, shown
    (record,) = [row for row in records_of(folder / "r.jsonl") if row["record"] == "server_verdict"]
    return record["findings"][-1], shown


def accepted(drafted: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ServerAcceptance(drafted, count, forwards=6 - count)  # of answers of 6 tokens
    monkeypatch.setattr(ServerKind, "acceptance", lambda *arguments: found)


def test_a_server_that_helps(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted(6, 3, monkeypatch)
    two[0].faults = Faults(chunk_delay=0.015)
    started = {"spec": Speculation("lookup", 3)}
    monkeypatch.setattr(ServerList, "speculation_of", lambda servers, name: started.get(name))
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    row, shown = verdict(session, view, tmp_path)
    assert '"num_speculative_tokens": 3' in shown and "prompt_lookup_num_tokens=3" in shown
    assert (row["strategy"], row["baseline"], row["verdict"], row["prompts"]) == (
        "server spec",
        "server plain",
        "faster",
        6,
    )
    assert row["speedup"] == pytest.approx(exp(mean(map(log, row["speedups"])))) and row["interval"][0] > 1
    assert row["same_texts"] == row["compared_texts"] == 6 and row["considered"] == {}
    low, high = row["interval"]
    assert f"Use server spec: {row['speedup']:.2f}x server plain (95 % interval {low:.2f} to {high:.2f}" in shown
    assert "text identical on 6 of 6" in shown
    # Tuning prompts warm the servers up, and are not measured.
    measured = [post.body["messages"][0]["content"] for post in two[1].posts()][2:]
    assert len(set(measured)) == len(measured) == 6 and set(measured) < set(TEXTS)


def test_without_accepted_drafts_nothing_is_recommended(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted(6, 0, monkeypatch)
    two[0].faults = Faults(chunk_delay=0.015)
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    row, shown = verdict(session, view, tmp_path)
    assert row["speedup"] > 1 and row["without_gain"] and row["verdict"] == "not distinguishable"
    assert "does not help" in shown and "Use server" not in shown


def test_the_best_of_several_is_chosen_on_other_prompts(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path
) -> None:
    two[0].faults = two[1].faults = Faults(chunk_delay=0.015)
    with Loopback() as quick:
        third = ServerAddress("quick", quick.url, baseline="plain")
        session = server_session(view, *addresses(two), third, records=tmp_path / "r.jsonl")
        row, shown = verdict(session, view, tmp_path)
        assert row["strategy"] == "server quick" and row["considered"]["server quick"] > 1.5
        assert "Measured on other prompts: server spec" in shown
        first = [post.body["messages"][0]["content"] for post in two[1].posts()]
        last = [post.body["messages"][0]["content"] for post in quick.posts()][len(first) :]
    assert len(last) == 6 and not set(first) & set(last)
    assert "no drafts of these answers are known" in shown  # so the speed may come from elsewhere


def test_a_few_prompts_are_repeated_and_differing_texts_are_named(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "TOTAL_SECONDS", TOTAL_SECONDS)
    monkeypatch.setattr(measurement, "NARROW", 1e9)  # so that the fewest passes are enough
    two[1].texts = ("other",)
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    row, shown = verdict(session, view, tmp_path, TEXTS[:2])
    assert (row["prompts"], row["passes"], row["pairs"], row["interval_over"]) == (2, 3, 6, "repeats")
    assert row["other_texts_at_prompts"] == [1, 2] and "/server text spec" in shown and "these 2 prompts" in shown
    (tmp_path / "r.jsonl").unlink()
    row, _ = verdict(session, view, tmp_path, TEXTS[:1])
    assert (row["prompts"], row["pairs"], row["interval_over"]) == (1, 5, "repeats")


def test_prompts_and_servers_that_fail(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    ask, asked = Connection.ask, []

    def breaks(own: Connection, *arguments: Any) -> Any:
        asked.append(own)
        if len(asked) == 8:
            two[0].die()
        elif len(asked) == 9:
            two[0].revive()
        return ask(own, *arguments)

    monkeypatch.setattr(Connection, "ask", breaks)
    row, shown = verdict(session, view, tmp_path)
    assert row["prompts"] == 5 == len(row["speedups"]) and len(row["skipped"]) == 1
    assert "is left out" in shown and "over 5 prompts" in shown
    two[1].die()
    assert session.handle(f"/verdict {tmp_path / 'prompts.txt'}") is Verdict.FAILED
    assert "cannot be reached" in view.take()[1]


def test_what_cannot_be_compared_is_refused(two: tuple[Loopback, Loopback], view: Screen) -> None:
    session = server_session(view, ServerAddress("plain", two[0].url))
    assert session.handle("/verdict") is Verdict.FAILED and "baseline=NAME" in view.take()[1]
    elsewhere = ServerAddress("far", "http://192.0.2.1:8000", baseline="plain")
    session = server_session(view, ServerAddress("plain", two[0].url), elsewhere)
    assert session.handle("/verdict") is Verdict.FAILED and "same host" in view.take()[1]
    assert not two[0].log and not two[1].log


def test_servers_that_count_no_tokens_have_no_verdict(two: tuple[Loopback, Loopback], view: Screen) -> None:
    two[0].faults = two[1].faults = Faults(usage=False)
    session = server_session(view, *addresses(two))
    assert session.handle("/verdict builtin") is Verdict.FAILED
    assert "token ids nor usage" in " ".join(view.take()[1].split())


def test_the_loaded_models_come_first(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ServerAddress("own", two[0].url, baseline="target")
    session = server_session(view, own, pair=table_pair(), monkeypatch=monkeypatch, records=tmp_path / "r.jsonl")
    row, _ = verdict(session, view, tmp_path, TEXTS[:6])
    assert [one["record"] for one in records_of(tmp_path / "r.jsonl")] == ["verdict", "server_verdict"]
    assert row["baseline"] == "target" and len(row["speedups"]) == row["prompts"]


def test_ctrl_c_keeps_what_was_finished(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    ask, asked = Connection.ask, []

    def interrupt(own: Connection, *arguments: Any) -> Any:
        asked.append(own)
        if len(asked) == 4 + 5:
            raise KeyboardInterrupt
        return ask(own, *arguments)

    monkeypatch.setattr(Connection, "ask", interrupt)
    (tmp_path / "p.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    assert session.handle(f"/verdict {tmp_path / 'p.txt'}") is Verdict.INTERRUPTED
    (record,) = records_of(tmp_path / "r.jsonl")
    baseline, candidate = record["findings"]
    assert candidate["prompts"] == baseline["runs"] == candidate["runs"] == 2
    assert "Too few runs" in " ".join(view.take()[0].split()) or record["findings"][-1]["interval"]


def test_a_server_that_stays_away_ends_the_verdict(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies in the second pass: the first one is kept, and not every prompt is tried."""
    monkeypatch.setattr(measurement, "TOTAL_SECONDS", TOTAL_SECONDS)
    monkeypatch.setattr(measurement, "NARROW", 0.0)
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    ask, asked = Connection.ask, []

    def dies(own: Connection, *arguments: Any) -> Any:
        asked.append(own)
        if len(asked) == 4 + 2 * 6 + 3:  # in the second prompt of the second pass
            two[1].die()
        return ask(own, *arguments)

    monkeypatch.setattr(Connection, "ask", dies)
    row, shown = verdict(session, view, tmp_path)
    assert row["prompts"] == 6 and sorted(map(len, row["speedups_by_prompt"])) == [1] * 5 + [2]
    assert len(row["skipped"]) == 3 and "has not answered 2 prompts in a row" in shown
    assert len(asked) == 4 + 2 * 6 + 2 + 4
    two[0].die()
    assert session.handle(f"/verdict {tmp_path / 'prompts.txt'}") is Verdict.FAILED


def test_other_clients_are_named(two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path) -> None:
    count_tokens(two[0], [0] * 4 + [5])
    count_tokens(two[1], [0] * 4 + [6, 6], drafts=True)
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    row, shown = verdict(session, view, tmp_path)
    assert row["disturbed"] and f"{row['speedup']:.2f}x* server plain" in shown
    assert "* server spec had other requests during 2 of 6 answers (12 tokens more)" in shown
    assert "* server plain had other requests during 1 of 6 answers (5 tokens more)" in shown
    assert "server spec: its acceptance is not known" in shown
