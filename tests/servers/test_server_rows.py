"""Servers as rows of the comparison: what is sent, shown and recorded, and that the session survives their failures."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, records_of, screen, table_pair
from servers.loopback import Faults, Loopback
from servers.server_sessions import server_session

from utils.repl.repl_session import Verdict
from utils.screen.run_view import RunView
from utils.servers.address import ServerAddress

KEY = "sk-4f9a1c77e2b0"


@pytest.fixture
def two() -> Iterator[tuple[Loopback, Loopback]]:
    with Loopback() as plain, Loopback() as spec:
        yield plain, spec


def addresses(two: tuple[Loopback, Loopback], **options: str) -> tuple[ServerAddress, ServerAddress]:
    return ServerAddress("plain", two[0].url), ServerAddress("spec", two[1].url, baseline="plain", **options)


def test_two_servers_are_compared(two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path) -> None:
    two[0].faults = Faults(chunk_delay=0.2)  # the slower one by far, also on a busy machine
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    assert session.handle("Hello there") is Verdict.DONE
    plain, spec = records_of(tmp_path / "r.jsonl")
    text = "".join(two[0].answer({"messages": [{"role": "user", "content": "Hello there"}], "temperature": 0}).pieces)
    assert plain["text"] == spec["text"] and text.startswith(plain["text"])
    assert [row["strategy"] for row in (plain, spec)] == ["server plain", "server spec"]
    assert plain["speedup_vs_baseline"] is None and plain["same_as_baseline"] is None
    assert spec["speedup_vs_baseline"] == spec["tokens_per_second"] / plain["tokens_per_second"] > 1.1
    assert spec["decode_speedup_vs_baseline"] > 1.1
    assert spec["same_as_baseline"] and spec["new_tokens"] == 6 and spec["tokens_counted_by"] == "usage"
    assert spec["models"]["target"] is None and spec["seed"] == 42 and spec["settings"]["length"] == 6
    assert spec["server"] == {
        "name": "spec",
        "url": two[1].url,
        "baseline": "plain",
        "same": None,
        "model": "tiny",
        "kind": spec["server"]["kind"],
        "prompt_form": "messages",
    }
    table = view.take()[0]
    assert "= same text" in table


def test_prompt_and_settings_reach_the_server(two: tuple[Loopback, Loopback], view: Screen) -> None:
    session = server_session(view, *addresses(two))
    lines = ("/length 4", "/processor nucleus 0.7 0.9", "/seed 7", "/system Be brief.", "Hi\\nyou", "/chat off", "Hi")
    assert all(session.handle(line) is Verdict.DONE for line in lines), view.take()
    chat, text = two[1].posts()
    assert chat.body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\nyou"},
    ]
    assert {name: chat.body[name] for name in ("max_tokens", "temperature", "top_p", "seed")} == {
        "max_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 7,
    }
    assert text.path == "/v1/completions" and text.body["prompt"] == "Hi"


def test_a_different_text_is_shown_from_its_first_difference(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path
) -> None:
    two[0].texts = ("One", " two", " three", " four", " five", " six")
    two[1].texts = ("One", " two", " tree", " four", " five", " six")
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    assert session.handle("Count") is Verdict.DONE
    shown = view.take()[0]
    assert "differs from character 10: tree four" in shown.replace("... ", "").replace("One two ", "")
    row = records_of(tmp_path / "r.jsonl")[1]
    assert (row["same_as_baseline"], row["first_difference"], row["first_difference_in"]) == (False, 9, "characters")
    assert session.handle("/texts") is Verdict.DONE
    out = view.take()[0]
    assert "One two t»ree four five six" in out and "One two three four" in out and "differs from server plain" in out


def test_speeds_are_compared_with_the_baseline_and_on_its_host_only(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, spec = addresses(two)
    monkeypatch.setattr(ServerAddress, "host", property(lambda address: address.name))
    session = server_session(view, plain, spec, records=tmp_path / "r.jsonl")
    session.handle("Hello")
    row = records_of(tmp_path / "r.jsonl")[1]
    assert row["speedup_vs_baseline"] is None and row["decode_speedup_vs_baseline"] is None
    assert row["same_as_baseline"] and "different hosts" in view.take()[0]
    equal = server_session(view, plain, replace(spec, same="plain"), records=tmp_path / "e.jsonl")
    equal.handle("Hello")
    assert records_of(tmp_path / "e.jsonl")[1]["speedup_vs_baseline"] and "different hosts" not in view.take()[0]
    other = server_session(view, plain, ServerAddress("spec", spec.url), records=tmp_path / "s.jsonl")
    other.handle("Hello")
    assert records_of(tmp_path / "s.jsonl")[1]["speedup_vs_baseline"] is None
    assert "baseline=NAME" in view.take()[0]


def test_servers_beside_the_local_target(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ServerAddress("plain", two[0].url)
    own = ServerAddress("own", two[1].url, baseline="target")
    session = server_session(view, plain, own, pair=table_pair(), monkeypatch=monkeypatch, records=tmp_path / "r.jsonl")
    assert session.handle("Hello") is Verdict.DONE, view.take()
    rows = records_of(tmp_path / "r.jsonl")
    by_name = {row["strategy"]: row for row in rows}
    assert [row["strategy"] for row in rows] == ["speculative", "ngram", "target", "server plain", "server own"]
    assert by_name["server plain"]["speedup_vs_baseline"] is None
    ratio = by_name["server own"]["tokens_per_second"] / by_name["target"]["tokens_per_second"]
    assert by_name["server own"]["speedup_vs_baseline"] == pytest.approx(ratio)
    assert by_name["server own"]["same_as_baseline"] is False
    assert session.handle("/why") is Verdict.DONE
    for line in ("/speculative off", "/ngram off", "/target off", "Hello"):
        assert session.handle(line) is Verdict.DONE, view.take()
    view.take()
    assert session.handle("/why") is Verdict.FAILED


def test_a_server_that_fails_leaves_the_others_and_the_session(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path
) -> None:
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    two[0].faults = Faults(die_after=2)
    assert session.handle("Hello") is Verdict.FAILED
    out, messages = view.take()
    assert "server spec" in out and "ended the connection" in messages and "Traceback" not in messages
    assert [row["strategy"] for row in records_of(tmp_path / "r.jsonl")] == ["server spec"]
    assert session.handle("Hello") is Verdict.FAILED and "cannot be reached" in view.take()[1]
    two[0].faults, two[0].model, two[1].model = Faults(), "newer", "newer"
    two[0].revive()
    session.handle("/server remove spec")
    assert session.handle("Hello") is Verdict.DONE, view.take()
    assert records_of(tmp_path / "r.jsonl")[-1]["server"]["model"] == "newer"


def test_ctrl_c_keeps_the_text_so_far(
    two: tuple[Loopback, Loopback], view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = server_session(view, *addresses(two), records=tmp_path / "r.jsonl")
    show, shown = RunView.piece, []

    def interrupt(own: RunView, piece: object) -> None:
        show(own, piece)  # type: ignore[arg-type]
        shown.append(piece)
        if len(shown) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunView, "piece", interrupt)
    assert session.handle("Hello") is Verdict.INTERRUPTED
    (row,) = records_of(tmp_path / "r.jsonl")
    assert row["finish"] == "interrupted" and row["text"].count(" w") == 3 and not two[1].posts()
    assert session.handle("Hello") is Verdict.DONE


def test_a_conversation_is_continued_by_each_server(two: tuple[Loopback, Loopback], view: Screen) -> None:
    session = server_session(view, *addresses(two))
    for line in ("/turns on", "One", "Two"):
        assert session.handle(line) is Verdict.DONE
    first, second = two[1].posts()
    answer = "".join(two[1].answer(first.body).pieces)
    assert second.body["messages"] == [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "Two"},
    ]


def test_commands_that_need_a_model_say_so(two: tuple[Loopback, Loopback], view: Screen) -> None:
    session = server_session(view, *addresses(two))
    session.handle("Hello")
    for line in ("/why", "/whatif", "/lossless", "/audit", "/pair", "/engine", "/costs"):
        view.take()
        assert session.handle(line) in (Verdict.FAILED, Verdict.DONE)
        out, messages = view.take()
        assert "Traceback" not in messages, (line, messages)
        assert "model" in messages or line in ("/engine", "/costs"), (line, out, messages)
    empty = server_session(view)
    assert empty.handle("Hello") is Verdict.FAILED and "/server add" in view.take()[1]


def test_adding_listing_and_removing(
    two: tuple[Loopback, Loopback], view: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    session = server_session(view)
    wrong = {
        f"/server add plain {two[0].url} baseline=nobody": "baseline",
        "/server add plain": "address",
        "/server add plain localhost:1": "http://",
        f"/server add plain {two[0].url} key={KEY}": "environment variable",
        f"/server add plain {two[0].url} key=NOT_SET_AT_ALL": "NOT_SET_AT_ALL",
        f"/server add target {two[0].url}": "local target",
        f"/server add plain {two[0].url} modle=x": "model",
        f"/server add plain {two[0].url} timeout=0": "timeout",
        "/server remove plain": "no server",
        "/server text plain": "there is none.",
        "/server addd": "add",
    }
    for line, part in wrong.items():
        assert session.handle(line) is Verdict.FAILED
        message = view.take()[1]
        assert part in message and KEY not in message and not len(session.harness.state.servers)
    assert session.handle(f"/server add plain {two[0].url} key=SERVER_KEY model=tiny") is Verdict.DONE
    assert session.handle(f'/server add spec {two[1].url} "baseline=plain" timeout=5') is Verdict.DONE
    assert session.handle(f"/server add spec {two[1].url}") is Verdict.FAILED
    view.take()
    session.handle("/server")
    listed = view.take()[0]
    assert "$SERVER_KEY" in listed and KEY not in listed and two[1].url in listed
    assert not two[0].log and not two[1].log  # nothing was contacted
    assert session.handle("/server remove plain") is Verdict.DONE
    assert session.harness.state.servers.addresses == (ServerAddress("spec", two[1].url, timeout=5.0),)


def test_a_key_is_in_nothing_that_a_session_writes(
    two: tuple[Loopback, Loopback], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    view = screen()
    for server in two:
        server.key, server.texts = KEY, (" the key is sk-4f9", "a1c77", "e2b0 and", " no more")
    session = server_session(view, *addresses(two, key="SERVER_KEY"), records=tmp_path / "r.jsonl")
    session.handle("/server remove plain")
    assert session.handle("Hello") is Verdict.DONE, view.take()
    two[1].faults = Faults(status=400, message=f"Bearer {KEY} is wrong")
    assert session.handle("Hello") is Verdict.FAILED
    for name in ("a.html", "a.json", "s.txt"):
        command = "save" if name == "s.txt" else "export"
        two[1].faults = Faults()
        session.handle("Hello")
        assert session.handle(f"/{command} {tmp_path / name}") is Verdict.DONE, view.take()
    written = [file.read_text(encoding="utf-8") for file in tmp_path.iterdir()]
    assert len(written) == 4 and all(KEY not in text for text in (*written, view.take()[1]))
    view.take()
    for line in ("/texts", "/show"):
        session.handle(line)
    assert all(KEY not in text for text in view.take())
    assert "[key]" in (tmp_path / "r.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("owner", "extras"),
    [
        ("me", {"usage": {"completion_tokens": 10**400}}),
        ("llamacpp", {"timings": {"draft_n": "x", "draft_n_accepted": 0, "predicted_n": 6}}),
        ("me\ud800", {}),
    ],
)
def test_odd_answers_are_recorded(owner: str, extras: dict[str, Any], view: Screen, tmp_path: Path) -> None:
    with Loopback(model=f"tiny-{owner}", faults=Faults(usage="usage" not in extras)) as server:
        models = {"data": [{"id": server.model, "owned_by": owner}]}
        server.pages["/v1/models"] = (200, "application/json", json.dumps(models))
        server.extras = lambda request, answer: extras
        session = server_session(view, ServerAddress("spec", server.url), records=tmp_path / "r.jsonl")
        assert session.handle("Hello") is Verdict.DONE and session.handle("/server") is Verdict.DONE, view.take()
    (row,) = records_of(tmp_path / "r.jsonl")
    assert row["text"] and row["drafted"] is None and row["new_tokens"] == (None if "usage" in extras else 6)
