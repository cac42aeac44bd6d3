"""/ladder with servers: prompts by the server's own count of tokens, acceptance from its own counters, and refusals.

The points of /whatif on= from the same counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, records_of, table_pair
from servers.loopback import Faults, Loopback
from servers.server_sessions import count_tokens, server_session

from utils.commands import whatif
from utils.commands.experiments.other_hardware import Deployment, Shape
from utils.repl.repl_session import Verdict
from utils.servers.address import ServerAddress
from utils.servers.kinds.completion import ServerCompletion
from utils.servers.kinds.vllm import VllmKind


@pytest.fixture
def two() -> Iterator[tuple[Loopback, Loopback]]:
    with Loopback() as plain, Loopback() as spec:
        yield plain, spec


def addresses(two: tuple[Loopback, Loopback]) -> tuple[ServerAddress, ServerAddress]:
    return ServerAddress("plain", two[0].url), ServerAddress("spec", two[1].url, baseline="plain")


def climbed(folder: Path, name: str = "server_ladder") -> tuple[dict[tuple[str, int], dict[str, Any]], str]:
    (record,) = [one for one in records_of(folder / "r.jsonl") if one["record"] == name]
    return {(row["strategy"], row["context"]): row for row in record["findings"]}, " ".join(record["conclusion"])


def test_acceptance_comes_from_the_counters(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for server in two:
        count_tokens(server, drafts=server is two[1])
    # The server counts a token for every three characters.
    monkeypatch.setattr(VllmKind, "tokens", lambda kind, server, text, special=False: range(len(_content(text)) // 3))
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    assert session.handle("/ladder 64 128") is Verdict.DONE, view.take()
    rows, conclusion = climbed(tmp_path)
    assert set(rows) == {(f"server {name}", length) for name in ("plain", "spec") for length in (64, 128)}
    for length in (64, 128):
        row = rows["server spec", length]
        assert (row["drafted"], row["accepted"], row["prompts"]) == (30, 15, 5) and row["acceptance_rate"] == 0.5
        assert len(row["speedups"]) == 5 and row["draft_cost"] is None
        assert rows["server plain", length]["speedup"] is None
    prompts = [_content(post.body["messages"]) for post in two[1].posts()]
    lengths = sorted({len(prompt) // 3 for prompt in prompts})
    assert all(0.95 * (least - 6) <= count <= least - 6 for least, count in ((64, lengths[0]), (128, lengths[-1])))
    assert "server spec" in conclusion and "server plain " not in conclusion
    shown = view.take()[0]
    assert "round cost" in shown and "draft cost" not in shown


def _content(messages: Any) -> str:
    return str(getattr(messages, "messages", messages)[-1]["content"])


def test_a_server_that_refuses_is_named(two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path) -> None:
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    two[1].faults = Faults(status=400, message="too long")
    assert session.handle("/ladder 128") is Verdict.DONE, view.take()
    rows, _ = climbed(tmp_path)
    assert set(rows) == {("server plain", 128)} and "too long" in view.take()[1] and len(two[1].posts()) >= 2


def test_local_strategies_and_servers_have_a_ladder_each(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = server_session(
        view, *addresses(two), pair=table_pair(), monkeypatch=monkeypatch, records=tmp_path / "r.jsonl"
    )
    assert session.handle("/ladder 200") is Verdict.DONE, view.take()
    assert {name for name, _ in climbed(tmp_path)[0]} == {"server plain", "server spec"}
    assert {name for name, _ in climbed(tmp_path, "ladder")[0]} == {"speculative", "ngram", "target"}


def test_a_server_without_a_baseline_has_its_acceptance(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path
) -> None:
    count_tokens(two[0], drafts=True)
    session = server_session(view, addresses(two)[0], records=tmp_path / "r.jsonl")
    assert session.handle("/ladder 128") is Verdict.DONE, view.take()
    rows, conclusion = climbed(tmp_path)
    row = rows["server plain", 128]
    assert row["acceptance_rate"] == 0.5 and row["speedup"] is None and "baseline=NAME" in conclusion
    assert "0.50" in view.take()[0], "the row is shown"


def test_a_server_gives_the_points_of_a_prediction(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for server in two:
        count_tokens(server, drafts=server is two[1])
    monkeypatch.setattr(whatif, "StepwiseDrafter", object)
    session = server_session(
        view, *addresses(two), pair=table_pair(), monkeypatch=monkeypatch, records=tmp_path / "r.jsonl"
    )
    monkeypatch.setattr(
        ServerCompletion,
        "decode_tokens_per_second",
        property(lambda answer: 120.0 if answer.acceptance and answer.acceptance.drafted else 100.0),
    )
    for line in ("Hello there", "/whatif on=H100 target=8B from=spec"):
        assert session.handle(line) is Verdict.DONE, view.take()
    shown = view.take()[0]
    assert "plain 100, k2 120 tokens/s" in shown
    *runs, report = records_of(tmp_path / "r.jsonl")
    length = next(run["new_tokens"] / run["target_forwards"] for run in runs if run["strategy"] == "server spec")
    ratio = Deployment(Shape(8e9, 8e9), "H100", plain=100.0, points={2.0: (120.0, length)}).ratio({})
    for row in report["findings"]:
        assert row["predicted_speedup"] == pytest.approx(row["tokens_per_round"] / ratio(row["gamma"]))
    assert session.handle("/whatif on=H100 target=8B from=plain") is Verdict.FAILED and "with drafts" in view.take()[1]
