"""Servers that a session starts: they get ready, their failures are explained, and they end with the session."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from paths import ROOT
from servers.launches import fake_program, family, gone, is_ready, started

from utils.errors import UserError
from utils.servers.processes import local_servers
from utils.servers.processes.local_servers import LocalServers
from utils.servers.processes.programs import Launch

SESSION = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from servers.launches import is_ready, started
from utils.servers.processes.programs import Launch
from utils.servers.processes.local_servers import LocalServers
servers = LocalServers(is_ready)
url = started(servers.start("one", Launch("llama.cpp", "a.gguf", program={program!r})))
print(url, servers.process_of("one").log.parent, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def servers() -> Iterator[LocalServers]:
    made = LocalServers(is_ready)
    yield made
    made.stop_all()


def launch(folder: Path, behaviour: str = "serve") -> Launch:
    return Launch("llama.cpp", "a.gguf", program=fake_program(folder, behaviour))


def test_a_server_is_started_and_stopped(servers: LocalServers, tmp_path: Path) -> None:
    before, lines = family(), list[str]()
    url = started(servers.start("one", launch(tmp_path)), lines.append)
    other = started(servers.start("two", launch(tmp_path)), lines.append)
    assert is_ready(url) and is_ready(other) and url != other
    assert servers.names() == ["one", "two"] and "one" in servers and lines[0].startswith("starting one: llama.cpp")
    processes, process = family() - before, servers.process_of("one")
    assert "--alias a" in process.log.read_text()
    servers.stop("one")
    assert not is_ready(url) and is_ready(other) and servers.names() == ["two"]
    servers.stop_all()
    assert gone(processes) and not process.log.parent.exists()


def test_a_server_that_was_not_started_has_no_launch(servers: LocalServers, tmp_path: Path) -> None:
    started(servers.start("one", launch(tmp_path)))
    with pytest.raises(UserError, match=r"'two' was not started by this session.*: one\."):
        servers.launch_of("two")


def test_a_server_that_exits_is_explained_by_the_end_of_its_log(servers: LocalServers, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"one ended with status 3\. Its log ends with:\n") as raised:
        started(servers.start("one", launch(tmp_path, "fail")))
    text = str(raised.value)
    assert text.endswith("no such model␛[0m") and "\x1b" not in text and "line 15\n" not in text and "line 16\n" in text
    assert not servers.names()


def test_a_server_that_is_never_ready_is_ended(
    servers: LocalServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_servers, "READY_SECONDS", 0.3)
    before = family()
    with pytest.raises(UserError, match="was not ready after 0 s"):
        started(servers.start("one", launch(tmp_path, "never")))
    assert gone(family() - before) and not servers.names()


@pytest.mark.parametrize("ending", ["Ctrl-C", "closed"])
def test_ctrl_c_while_a_server_starts_ends_it(
    ending: str, servers: LocalServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_servers, "COUNT", 0.05)
    before, lines = family(), servers.start("one", launch(tmp_path, "never"))
    assert next(lines).startswith("starting one: llama.cpp")
    while len(begun := family() - before) < 2:  # the guard and the server
        assert next(lines) == "starting one: 0 s"
    if ending == "closed":
        lines.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            lines.throw(KeyboardInterrupt)
    assert gone(begun) and not servers.names()


def test_another_server_on_the_port_is_not_taken_for_the_started_one(tmp_path: Path) -> None:
    servers = LocalServers(lambda url: bool(servers.ending_of("one")))  # something answers once the server has ended
    with pytest.raises(UserError, match="ended with status 3"):
        started(servers.start("one", launch(tmp_path, "fail")))
    servers.stop_all()


def test_a_server_that_has_died_can_be_started_again(servers: LocalServers, tmp_path: Path) -> None:
    before = family()
    started(servers.start("one", launch(tmp_path)))
    begun = family() - before
    for process in begun:
        process.kill()
    assert gone(begun) and "one" not in servers
    servers.stop("one")
    assert is_ready(started(servers.start("one", launch(tmp_path))))


@pytest.mark.skipif(sys.platform != "linux", reason="processes that leave their session are found on Linux only")
def test_stubborn_servers_and_their_children_end(
    servers: LocalServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ignores SIGTERM, for which this guard waits half a second, and its child has a session of its own."""
    guard, program, grace = tmp_path / "guard.py", local_servers.GUARD.read_text(), f"GRACE = {local_servers.GRACE}"
    assert grace in program
    guard.write_text(program.replace(grace, "GRACE = 0.5"))
    monkeypatch.setattr(local_servers, "GUARD", guard)
    before = family()
    started(servers.start("one", launch(tmp_path, "children")))
    begun = family() - before
    assert len(begun) == 3  # the guard, the server and its child
    servers.stop("one")
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
