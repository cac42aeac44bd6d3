"""/race with servers: turns, pairing within repeats, claims over the named baseline only, and what failures leave."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, records_of, table_pair
from servers.loopback import Faults, Loopback
from servers.server_sessions import count_tokens, server_session

from utils.commands.experiments.races import pooled_run
from utils.commands.verdicts import measurement
from utils.comparison.arms import Run
from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.repl.repl_session import Verdict
from utils.servers.address import ServerAddress
from utils.servers.client import ServerClient
from utils.servers.connection import Connection
from utils.servers.kinds.completion import ServerAcceptance, ServerCompletion
from utils.servers.kinds.server_kind import ServerKind


@pytest.fixture
def two() -> Iterator[tuple[Loopback, Loopback]]:
    with Loopback() as plain, Loopback() as spec:
        yield plain, spec


def addresses(two: tuple[Loopback, Loopback]) -> tuple[ServerAddress, ServerAddress]:
    return ServerAddress("plain", two[0].url), ServerAddress("spec", two[1].url, baseline="plain")


@pytest.mark.parametrize(
    ("second", "drafts"),
    [
        (ServerAcceptance(6, 2, forwards=3), (18, 6, 8)),
        (None, (12, 4, 9)),  # no drafts: a forward pass for each token
        (ServerAcceptance(6, 2), (18, 6, None)),
        (ServerAcceptance(6, 2, valid=False, forwards=3), (None, None, None)),
    ],
)
def test_what_a_server_does_not_say_is_not_made_up(second: ServerAcceptance | None, drafts: tuple[Any, ...]) -> None:
    def run(tokens: int, acceptance: ServerAcceptance | None) -> Run:
        made = ServerCompletion("x", (), FinishReason.LENGTH, "", 2.0, usage_tokens=tokens, acceptance=acceptance)
        return Run.of_server(ServerAddress("spec", "http://127.0.0.1:1"), made)

    both = pooled_run([run(8, ServerAcceptance(12, 4, forwards=5)), run(4, second)])
    assert (both.drafted, both.accepted, both.target_forwards) == drafts and both.tokens_per_second == 3.0


def rows_of(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The findings of the last race, by task and strategy."""
    (record,) = [row for row in records_of(file) if row["record"] == "server_race"]
    return {(row["task"], row["strategy"]): row for row in record["findings"]}


def test_a_race_of_the_last_prompt(two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path) -> None:
    two[0].faults, two[1].faults = Faults(chunk_delay=0.025), Faults()
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    assert session.handle("Hello") is Verdict.DONE
    for server in two:
        server.log.clear()
    assert session.handle("/race 5") is Verdict.DONE, view.take()
    rows = rows_of(tmp_path / "r.jsonl")
    plain, spec = rows["all", "server plain"], rows["all", "server spec"]
    ratios = [ours / theirs for ours, theirs in zip(spec["tokens_per_second"], plain["tokens_per_second"], strict=True)]
    assert spec["speedups"] == pytest.approx(ratios) and len(ratios) == 5
    assert spec["verdict"] == "faster" and spec["speedup"] > 1.1 and plain["speedup"] is None
    assert (spec["same_texts"], spec["compared_texts"]) == (1, 1)
    assert [len(server.posts()) for server in two] == [6, 6]  # one of them warms up
    merged = sorted(((post.at, name) for name, server in enumerate(two) for post in server.posts()))[2:]
    assert [name for _, name in merged] == [0, 1, 1, 0, 0, 1, 1, 0, 0, 1]
    assert "server spec is faster: " in view.take()[0]


def test_a_file_with_tasks_and_turns(two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path) -> None:
    two[1].texts = ("other",)
    prompts = [{"turns": ["One", "Two"], "task": "chat"}, {"prompt": "def f", "task": "code"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    assert session.handle(f"/race {tmp_path / 'p.jsonl'}") is Verdict.DONE, view.take()
    rows = rows_of(tmp_path / "r.jsonl")
    assert list(rows) == [(task, f"server {name}") for task in ("chat", "code", "all") for name in ("plain", "spec")]
    assert rows["chat", "server plain"]["new_tokens"] == 12 and rows["all", "server spec"]["prompts"] == 2
    # The second turn follows another answer, so its text is not compared.
    assert rows["all", "server spec"]["other_texts_at_prompts"] == [1, 2]
    second = two[1].posts()[2].body["messages"]
    assert [message["content"] for message in second][::2] == ["One", "Two"] and "other" in second[1]["content"]
    assert "server spec: text identical on 0 of 2 (not on prompt 1, 2: " in view.take()[0]


def test_a_server_that_fails_is_named_and_the_others_are_measured(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("One\nTwo\nThree\nFour\n")
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    two[0].die()
    assert session.handle(f"/race 2 {tmp_path / 'p.txt'}") is Verdict.DONE
    rows = rows_of(tmp_path / "r.jsonl")
    assert list(rows) == [("all", "server spec")] and rows["all", "server spec"]["prompts"] == 4
    shown, notes = view.take()
    assert notes.count("cannot be reached") == 2  # it is not asked a third time
    assert "server plain" in shown  # the baseline that is missing
    two[1].die()
    assert session.handle(f"/race 2 {tmp_path / 'p.txt'}") is Verdict.FAILED
    assert "none of the prompts could be run" in view.take()[1]


def test_a_server_that_comes_back_is_asked_again(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.txt").write_text("One\nBad\nThree\nBad\nFive\n")
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    ask = Connection.ask

    def failing(self: Connection, request_for: Any, *rest: Any) -> Any:
        if self.address.name == "spec" and "Bad" in str(request_for(self.kind, self.client).prompt):
            raise UserError("busy.")
        return ask(self, request_for, *rest)

    monkeypatch.setattr(Connection, "ask", failing)
    assert session.handle(f"/race {tmp_path / 'p.txt'}") is Verdict.DONE, view.take()
    rows = rows_of(tmp_path / "r.jsonl")
    assert [rows["all", f"server {name}"]["prompts"] for name in ("plain", "spec")] == [5, 3]


def test_the_local_target_as_baseline(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ServerAddress("own", two[0].url, baseline="target")
    session = server_session(view, own, pair=table_pair(), monkeypatch=monkeypatch, records=tmp_path / "r.jsonl")
    for line in ("/speculative off", "/ngram off", "Hello", "/race 2"):
        assert session.handle(line) is Verdict.DONE, view.take()
    kinds = [row["record"] for row in records_of(tmp_path / "r.jsonl")]
    assert kinds == ["generation", "generation", "race", "server_race"]
    row = rows_of(tmp_path / "r.jsonl")["all", "server own"]
    assert len(row["speedups"]) == 2 and row["baseline"] == "target" and row["compared_texts"] == 1


@pytest.mark.parametrize("command", ["/race 4", "/verdict {}"])
def test_the_local_target_takes_turns_at_going_first(
    command: str, two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from utils.comparison.arms import LocalArm
    from utils.servers.connection import Connection

    order: list[str] = []

    def logged(name: str, function: Any) -> Any:
        return lambda *arguments, **options: (order.append(name), function(*arguments, **options))[1]

    monkeypatch.setattr(measurement, "TOTAL_SECONDS", 0.0)
    own = ServerAddress("own", two[0].url, baseline="target")
    session = server_session(view, own, pair=table_pair(), monkeypatch=monkeypatch)
    for line in ("/speculative off", "/ngram off", "Hello"):
        assert session.handle(line) is Verdict.DONE, view.take()
    (tmp_path / "p.txt").write_text("".join(f"Say {number}\n" for number in range(8)))
    monkeypatch.setattr(Connection, "ask", logged("own", Connection.ask))
    monkeypatch.setattr(LocalArm, "run", logged("target", LocalArm.run))
    assert session.handle(command.format(tmp_path / "p.txt")) is Verdict.DONE, view.take()
    order = order[-8:]  # without the report of the local target alone, and without warm-up runs
    turns = [order[index : index + 2] for index in range(0, len(order), 2)]
    assert all(sorted(turn) == ["own", "target"] for turn in turns)
    first = [turn[0] for turn in turns][-4:]
    assert first in (["target", "own"] * 2, ["own", "target"] * 2)


def test_ctrl_c_keeps_what_was_finished(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from utils.servers.connection import Connection

    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    session.handle("Hello")
    ask, asked = Connection.ask, []

    def interrupt(own: Connection, *arguments: Any) -> Any:
        asked.append(own)
        if len(asked) == 9:  # two warm up, and three repeats are complete
            raise KeyboardInterrupt
        return ask(own, *arguments)

    monkeypatch.setattr(Connection, "ask", interrupt)
    assert session.handle("/race 5") is Verdict.INTERRUPTED
    assert [len(row["tokens_per_second"]) for row in rows_of(tmp_path / "r.jsonl").values()] == [3, 3]


@pytest.mark.parametrize("command", ["/race 3", "/verdict {}"])
def test_ctrl_c_in_the_warm_up_ends_the_command(
    command: str, two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lands in the client, which returns what has arrived so far."""
    (tmp_path / "p.txt").write_text("Hello\nGood evening\n")
    session = server_session(view, *addresses(two))
    session.handle("Hello")
    complete = ServerClient.complete
    sent: list[int] = []

    def interrupted(*arguments: Any) -> ServerCompletion:
        sent.append(len(sent))
        return replace(complete(*arguments), finish=FinishReason.INTERRUPTED)

    monkeypatch.setattr(ServerClient, "complete", interrupted)
    assert session.handle(command.format(tmp_path / "p.txt")) is Verdict.INTERRUPTED
    assert sent == [0]


def test_drafts_are_pooled_and_a_gain_needs_them(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two[0].faults = Faults(chunk_delay=0.015)
    found: list[ServerAcceptance | None] = []
    monkeypatch.setattr(ServerKind, "acceptance", lambda *arguments: found.pop(0) if found else None)
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    session.handle("Hello")
    cases = {
        (ServerAcceptance(8, 3, forwards=3), None): (8, 3, 12 / 9),
        # As vLLM counts: three of the accepted drafts are past the end of the answer.
        (ServerAcceptance(8, 7, forwards=2), ServerAcceptance(4, 4, forwards=2)): (12, 11, 12 / 4),
        (ServerAcceptance(8, 0, forwards=6), ServerAcceptance(4, 0, forwards=6)): (12, 0, 1.0),
        (ServerAcceptance(8, 3), ServerAcceptance(4, 0, forwards=6)): (12, 3, None),
        (ServerAcceptance(8, 3, forwards=3), ServerAcceptance(9, 9, valid=False)): (None, None, None),
        (None, None): (None, None, None),
    }
    for drafts, expected in cases.items():
        (tmp_path / "r.jsonl").write_text("")
        # The servers take turns: plain and spec warm up, then plain, spec and spec, plain.
        found[:] = [None, None, None, drafts[0], drafts[1], None]
        assert session.handle("/race 2") is Verdict.DONE
        row = rows_of(tmp_path / "r.jsonl")["all", "server spec"]
        assert (row["drafted"], row["accepted"], row["tokens_per_target_forward"]) == expected
        assert row["without_gain"] == (expected[2] == 1.0)
    view.take()
    assert session.handle("/race 5") is Verdict.DONE
    assert "may have another reason" in view.take()[0]


def test_other_clients_are_named_and_their_figures_marked(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path
) -> None:
    two[0].faults = Faults(chunk_delay=0.02)
    # A prompt and a warm-up, then the repeats: another client uses one in the second and the other in two of them.
    count_tokens(two[0], [0, 0, 0, 5])
    count_tokens(two[1], [0, 0, 7, 0, 8], drafts=True)
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    assert session.handle("Hello") is Verdict.DONE
    view.take()
    assert session.handle("/race 5") is Verdict.DONE
    shown, rows = " ".join(view.take()[0].split()), rows_of(tmp_path / "r.jsonl")
    plain, spec = rows["all", "server plain"], rows["all", "server spec"]
    assert plain["other_tokens"] == [0, 5, 0, 0, 0] and spec["other_tokens"] == [7, 0, 8, 0, 0]
    assert spec["disturbed"] and spec["acceptance_rate"] is None
    assert spec["acceptance_unknown"] == ["the server had other requests meanwhile"]
    conclusion = records_of(tmp_path / "r.jsonl")[-1]["conclusion"]
    assert f"server spec is faster: {spec['speedup']:.2f}x* server plain" in conclusion[0]
    for line in (
        "* server spec had other requests during 2 of 5 answers (15 tokens more)",
        "* server plain had other requests during 1 of 5 answers (5 tokens more)",
        "server spec: its acceptance is not known, because the server had other requests meanwhile.",
    ):
        assert shown.count(line) == 1 == sum(line in sentence for sentence in conclusion)
    assert f"{spec['speedup']:.2f}x*" in shown


def test_servers_with_requests_of_their_own_only_are_not_marked(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path
) -> None:
    count_tokens(two[0])
    count_tokens(two[1], drafts=True)
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    assert session.handle("Hello") is Verdict.DONE and session.handle("/race 2") is Verdict.DONE
    assert "*" not in view.take()[0]
    spec = rows_of(tmp_path / "r.jsonl")["all", "server spec"]
    assert spec["acceptance_rate"] == 0.5 and not spec["disturbed"] and spec["other_tokens"] == [0, 0]


def test_a_prompt_names_other_clients(two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path) -> None:
    count_tokens(two[1], [9], drafts=True)
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    assert session.handle("Hello") is Verdict.DONE
    shown = view.take()[0]
    assert shown.count("had other requests") == 1 and "(9 tokens more)" in shown and "x*" in shown
    assert [row["other_tokens"] for row in records_of(tmp_path / "r.jsonl")] == [None, 9]


def test_tokens_per_forward_limit_what_is_said_of_a_server(
    two: tuple[Loopback, Loopback], view: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    two[0].faults = Faults(chunk_delay=0.025)
    found = ServerAcceptance(6, 3, forwards=3)  # of 6 tokens
    monkeypatch.setattr(ServerKind, "acceptance", lambda *arguments: found)
    session = server_session(view, *addresses(two))
    assert session.handle("Hello") is Verdict.DONE
    shown = view.take()[0]
    assert "2.00 tokens per forward cannot make it so fast" in shown
    found = ServerAcceptance(60, 1, forwards=6)
    assert session.handle("Hello again") is Verdict.DONE
    shown = view.take()[0]
    assert "1.00 tokens per forward cannot" in shown and "noise" in shown


@pytest.mark.parametrize("value", ["NaN", "1e300", "-5", "x", pytest.param("+Inf", marks=pytest.mark.full)])
def test_counters_that_cannot_be_true_are_ignored(
    value: str, two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path
) -> None:
    count_tokens(two[1])
    pages = iter(("vllm:generation_tokens_total 3", f"vllm:generation_tokens_total {value}") * 9)
    two[1].pages["/metrics"] = lambda: (200, "text/plain", next(pages))
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    session.handle("Hello")
    for line in ("Hello", "/race 2", "/server load spec concurrency=1 requests=1 length=2 turns=1"):
        assert session.handle(line) is Verdict.DONE, view.take()
    assert records_of(tmp_path / "r.jsonl")[1]["other_tokens"] is None and "*" not in view.take()[0].replace(
        "* spec", ""
    )
