"""Helpers for tests that start servers: a program that acts as one, and what is left of processes."""

import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from utils.servers.processes.local_servers import LocalServer
from utils.servers.processes.programs import Launch

FAKE = Path(__file__).parent / "fake_program.py"


def fake_program(folder: Path, behaviour: str = "serve", name: str = "llama-server") -> str:
    """The path of a program that takes the flags of a server program."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / name
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" {behaviour} "$@"\n')
    script.chmod(0o755)
    return str(script)


def started(name: str, launch: Launch) -> LocalServer:
    """A server that has started."""
    server = LocalServer(name, launch)
    for _ in server.wait_until_ready(is_ready):
        pass
    return server


def is_ready(url: str) -> bool:
    """Whether a server answers /health."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def family() -> set[psutil.Process]:
    """All processes that this one has started, and theirs."""
    return set(psutil.Process().children(recursive=True))


def gone(processes: set[psutil.Process], seconds: float = 15.0) -> bool:
    """Whether all these processes end within so many seconds."""
    end = time.monotonic() + seconds
    while any(_is_alive(process) for process in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
