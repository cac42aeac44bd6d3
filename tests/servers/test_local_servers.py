"""Servers that a session starts: they get ready, their failures are explained, and they end with the session."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from paths import ROOT
from servers.launches import fake_program, family, gone, is_ready, started

from utils.errors import UserError
from utils.servers.address import ServerAddress, without_server
from utils.servers.connection import ServerList
from utils.servers.processes import local_servers
from utils.servers.processes.local_servers import LocalServer
from utils.servers.processes.programs import Launch

SESSION = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from servers.launches import started
from utils.servers.processes.programs import Launch
server = started("one", Launch("llama.cpp", "a.gguf", program={program!r}))
print(server.url, server.log.parent, flush=True)
sys.stdin.readline()
"""


def launch(folder: Path, behaviour: str = "serve") -> Launch:
    return Launch("llama.cpp", "a.gguf", program=fake_program(folder, behaviour))


def test_servers_are_started_and_stopped(tmp_path: Path) -> None:
    before, lines = family(), list[str]()
    servers = ServerList()
    for name, baseline in (("one", None), ("two", "one")):
        lines += servers.start(ServerAddress(name, "http://127.0.0.1:1", baseline=baseline), launch(tmp_path))
    one, two = (connection.local for connection in servers)
    assert one is not None and two is not None and one.url != two.url
    assert is_ready(one.url) and is_ready(two.url) and lines[0].startswith("starting one: llama.cpp")
    assert [address.url for address in servers.addresses] == [one.url, two.url]
    with pytest.raises(UserError, match=r"'three' was not started by this session.*: one, two\."):
        servers.launch_of("three")
    processes = family() - before
    assert "--alias a" in one.log.read_text()
    servers.use(without_server(servers.addresses, "one"))
    assert not is_ready(one.url) and is_ready(two.url) and not one.log.parent.exists()
    assert servers.launch_of("two") == launch(tmp_path) and servers.addresses[0].baseline is None
    servers.close()
    assert gone(processes) and not two.log.parent.exists()


def test_a_server_that_exits_is_explained_by_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"one ended with status 3\. Its log ends with:\n") as raised:
        started("one", launch(tmp_path, "fail"))
    text = str(raised.value)
    assert text.endswith("no such model␛[0m") and "\x1b" not in text and "line 15\n" not in text and "line 16\n" in text


def test_a_server_that_is_never_ready_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_servers, "READY_SECONDS", 0.3)
    before = family()
    with pytest.raises(UserError, match="was not ready after 0 s"):
        started("one", launch(tmp_path, "never"))
    assert gone(family() - before)


@pytest.mark.parametrize("ending", ["Ctrl-C", "closed"])
def test_ctrl_c_while_a_server_starts_ends_it(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_servers, "COUNT", 0.05)
    before, lines = family(), ServerList().start(ServerAddress("one", "http://127.0.0.1:1"), launch(tmp_path, "never"))
    assert next(lines).startswith("starting one: llama.cpp")
    while len(begun := family() - before) < 2:  # the guard and the server
        assert next(lines) == "starting one: 0 s"
    if ending == "closed":
        lines.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            lines.throw(KeyboardInterrupt)
    assert gone(begun)


def test_another_server_on_the_port_is_not_taken_for_the_started_one(tmp_path: Path) -> None:
    server = LocalServer("one", launch(tmp_path, "fail"))
    with pytest.raises(UserError, match="ended with status 3"):
        list(server.wait_until_ready(lambda url: bool(server.ending(wait=9))))  # something answers once it has ended


def test_a_server_that_has_died_can_be_started_again(tmp_path: Path) -> None:
    before, servers = family(), ServerList()
    list(servers.start(ServerAddress("one", "http://127.0.0.1:1"), launch(tmp_path)))
    begun, first = family() - before, servers.connections["one"].local
    for process in begun:
        process.kill()
    assert first is not None and gone(begun) and not first.is_running
    list(servers.restart("one", launch(tmp_path)))
    assert is_ready(servers.addresses[0].url) and len(servers) == 1
    servers.close()


@pytest.mark.skipif(sys.platform != "linux", reason="processes that leave their session are found on Linux only")
def test_stubborn_servers_and_their_children_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ignores SIGTERM, for which this guard waits half a second, and its child has a session of its own."""
    guard, program, grace = tmp_path / "guard.py", local_servers.GUARD.read_text(), f"GRACE = {local_servers.GRACE}"
    assert grace in program
    guard.write_text(program.replace(grace, "GRACE = 0.5"))
    monkeypatch.setattr(local_servers, "GUARD", guard)
    before = family()
    server = started("one", launch(tmp_path, "children"))
    begun = family() - before
    assert len(begun) == 3  # the guard, the server and its child
    server.stop()
    assert gone(begun)


@pytest.mark.parametrize(
    ("ending", "dies_first"),
    [
        *((ending, False) for ending in ("exit", "SIGINT", "SIGTERM", "SIGHUP", "SIGKILL")),
        ("exit", True),
        ("SIGKILL", True),
        *(pytest.param(ending, True, marks=pytest.mark.full) for ending in ("SIGINT", "SIGTERM", "SIGHUP")),
    ],
)
def test_no_server_survives_the_session(ending: str, dies_first: bool, tmp_path: Path) -> None:
    program = fake_program(tmp_path, "serve")
    code = SESSION.format(root=str(ROOT), tests=str(ROOT / "tests"), program=program)
    session = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert session.stdin is not None and session.stdout is not None
    url, _, folder = session.stdout.readline().strip().partition(" ")
    begun = set(psutil.Process(session.pid).children(recursive=True))
    assert is_ready(url) and len(begun) == 2 and Path(folder).is_dir()
    if dies_first:
        server = {process for process in begun if not process.children()}  # not its guard
        for process in server:
            process.kill()
        end = time.monotonic() + 15
        while not Path(folder, "one.status").exists() and time.monotonic() < end:  # the guard has noticed it
            time.sleep(0.05)
    if ending == "exit":
        session.stdin.close()
    else:
        os.kill(session.pid, getattr(signal, ending))
    session.wait(30)
    assert gone(begun) and not is_ready(url)
    assert not Path(folder).exists()
