"""--server and [servers]: addresses, baselines and errors; a program that loads no model; the file of typed lines."""

import sys
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, constant_costs, constant_drafter, records_of, table_pair
from servers.launches import fake_program
from servers.loopback import Loopback
from servers.server_sessions import server_session

import infer
from utils.commands import default_registry
from utils.comparison import warm_up
from utils.config.arguments import parse_arguments, read_config
from utils.config.settings import Settings
from utils.engine import engine
from utils.errors import UserError
from utils.repl.line_input import LineHistory
from utils.repl.loaded_pair import SessionTools
from utils.repl.repl_session import ReplSession, Verdict
from utils.servers.address import ServerAddress

URL = "http://127.0.0.1:800"
KEY = "sk-4f9a1c77e2b0"
CONFIG = f"""
[servers.spec]
url = "{URL}1"
baseline = "plain"
timeout = 5

[servers.plain]
url = "{URL}"
model = "a/b"
key = "SERVER_KEY"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


def test_servers_of_the_config_file_keep_the_models(file: Path) -> None:
    arguments = parse_arguments(["--config", str(file)])
    spec = ServerAddress("spec", URL + "1", baseline="plain", timeout=5.0)
    plain = ServerAddress("plain", URL, model="a/b", key="SERVER_KEY")
    assert arguments.servers == (spec, plain) and not arguments.servers_only
    other = parse_arguments(["--config", str(file), "--server", f"plain={URL}2"])
    assert other.servers == (spec, ServerAddress("plain", URL + "2")) and other.servers_only


def test_servers_of_flags() -> None:
    arguments = parse_arguments(["--server", URL, "--server", f"fast={URL}1/v1 baseline=s1 key=K"])
    fast = ServerAddress("fast", f"{URL}1/v1", key="K", baseline="s1")
    assert arguments.servers == (ServerAddress("s1", URL), fast) and arguments.servers_only
    assert not parse_arguments(["--server", URL, "--target", "x"]).servers_only
    assert parse_arguments([]).servers == ()


@pytest.mark.parametrize(
    "flags",
    [
        *(["localhost:1"], [""], [f"{URL} baseline=nobody"], [f"{URL} key={KEY}"], [f"{URL} {KEY}"]),
        *([f"a={URL}", f"a={URL}1"], [f"target={URL}"], [f"a={URL} baseline=a"], [f"{URL}?key={KEY}"], [f"'{URL}"]),
        [f"http://me:{KEY}@localhost"],
    ],
)
def test_wrong_flags_are_one_line_without_a_key(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments([word for flag in flags for word in ("--server", flag)])
    message = capsys.readouterr().err
    assert caught.value.code == 2 and message.count("\n") == 1 and KEY not in message


@pytest.mark.parametrize(
    "text",
    [
        *('servers = "x"', "[servers.a]", '[servers.a]\nurl = "x"', '[servers."a b"]\nurl = "http://a"'),
        *('[servers.a]\nurl = "http://a"\nkye = "K"', f'[servers.a]\nurl = "http://a"\nkey = "{KEY}"'),
        '[servers.a]\nurl = "http://a"\ntimeout = 0',
    ],
)
def test_wrong_entries_name_the_file_and_no_key(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(UserError, match="config.toml") as caught:
        read_config(tmp_path / "config.toml")
    assert KEY not in str(caught.value) and "servers" in str(caught.value)


def test_a_program_with_servers_only_loads_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(infer, "load_pair", refuse)
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"/length 3\nHello\n/why\n")))
    with Loopback() as server:
        flags = ["--server", f"plain={server.url}", "--json", str(tmp_path / "r.jsonl")]
        assert infer.main(flags) == 1  # of the command that needs a model
    out, messages = capsys.readouterr()
    assert "server plain" in out and "/why: this needs a loaded model" in messages and "warming" not in messages
    (row,) = records_of(tmp_path / "r.jsonl")
    assert row["new_tokens"] == 3 and row["server"]["name"] == "plain"


def test_models_can_be_loaded_later(view: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "draft_seconds", constant_drafter(lambda job: 0.0))
    monkeypatch.setattr(engine, "verify_costs", constant_costs)
    monkeypatch.setattr(engine.ForwardProbe, "longer", lambda probe: None)
    tools = SessionTools(default_registry(), view.renderer, load=lambda request, note: table_pair())
    with Loopback() as server:
        settings = Settings(engine="plain", gamma=4, length=4)
        session = ReplSession(None, tools, settings, [ServerAddress("plain", server.url)])
        assert session.handle("/load dtype=float32") is Verdict.FAILED and "target" in view.take()[1]
        assert session.handle("/load target=tiny") is Verdict.DONE, view.take()
        assert session.handle("Hello") is Verdict.DONE
        out = view.take()[0]
        assert "server plain" in out and "speculative" in out and len(server.posts()) == 1
        session.close()


def test_keys_in_wrong_places_are_not_stored(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    monkeypatch.setattr(infer, "history_path", lambda: tmp_path / "history")
    session = server_session(view)
    start = f"/server start llama.cpp a.gguf program={fake_program(tmp_path)} name=c -- --api-key {KEY}"
    kept = [f"/server add a {URL} key=SERVER_KEY", f" /Server add b {URL}", "what does key=value mean?"]
    wrong = [f"d {URL} {word}{KEY}" for word in ("KEY=", "key=", "api_key=", "token=", "Key = ", '"key="', "", "x ")]
    wrong += [f"d http://user:{KEY}@host", f"d {URL}/?api_key={KEY}", f"d {URL} key=SERVER_KEY\n/server add e {KEY}"]
    lines = [kept[0], *(f"{name} add {text}" for name in ("/server", " /SERVER", "/sever") for text in wrong), start]
    typed = [*lines, *kept[1:]]

    def keyboard(*args: Any, history: LineHistory, **options: Any) -> Iterator[str]:
        for text in typed:
            history.append_string(text)
            yield from text.split("\n")

    monkeypatch.setattr(infer, "typed_lines", keyboard)
    verdicts = [session.handle(line) for line in infer.lines_for(None, session, view.renderer, interactive=True)]
    assert verdicts[0] is verdicts[-2] is Verdict.DONE and verdicts[-3] is Verdict.FAILED, view.take()
    session.close()
    history = LineHistory(tmp_path / "history", lambda text: None)
    assert list(history.load_history_strings()) == kept[::-1]
    assert KEY not in (tmp_path / "history").read_text()
