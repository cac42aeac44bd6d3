"""/compare with the answers of servers: which runs belong together, over which baseline, and what differs."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, records_of
from servers.loopback import Faults, Loopback
from servers.server_sessions import server_session

from utils.comparison.records import read_records
from utils.repl.repl_session import Verdict
from utils.servers.address import ServerAddress


def test_servers_are_compared_by_their_rows(view: Screen, tmp_path: Path) -> None:
    files = []
    for name, delay in (("a", 0.05), ("b", 0.01)):
        with Loopback(faults=Faults(chunk_delay=delay)) as plain, Loopback() as spec:
            servers = ServerAddress("plain", plain.url), ServerAddress("spec", spec.url, baseline="plain")
            session = server_session(view, *servers, records=tmp_path / name)
            for line in ("one", "two", "three", "four"):
                assert session.handle(line) is Verdict.DONE, view.take()
        files.append(tmp_path / name)
    session = server_session(view, records=tmp_path / "c.jsonl")
    assert session.handle(f"/compare {files[0]} {files[1]}") is Verdict.DONE, view.take()
    report = records_of(tmp_path / "c.jsonl")[-1]
    rows = {(row["prompt"], row["strategy"]): row for row in report["findings"]}
    assert len(rows) == 8 and all(row["same_text"] for row in rows.values())
    assert rows["one", "server plain"]["ratios"][0] > 2
    conclusion = " ".join(report["conclusion"])
    assert "server plain: B is faster than A" in conclusion
    assert "server, url: http" in conclusion and "models" not in conclusion


@pytest.mark.parametrize("change", [{"server": 3}, {"token_ids": "x"}, {"speedup_vs_baseline": "fast"}, {"history": 5}])
def test_damaged_records_of_servers_are_named(change: dict[str, Any], view: Screen, tmp_path: Path) -> None:
    with Loopback() as plain:
        session = server_session(view, ServerAddress("plain", plain.url), records=tmp_path / "a")
        session.handle("one")
        session.handle("two")
    good, other = records_of(tmp_path / "a")
    (tmp_path / "b").write_text(f"{json.dumps(good | change)}\n{json.dumps(other)}\n")
    found = read_records(tmp_path / "b")
    assert [one.row["prompt"] for one in found.runs] == ["two"] and "damaged" in found.left_out[0]
