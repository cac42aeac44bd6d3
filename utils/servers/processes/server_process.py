"""One local server that this program has started: its process, its log, and waiting until it is ready.

Between this program and the server runs a guard (`guard.py`), which ends the server however this program ends.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from utils.errors import UserError
from utils.models import Count
from utils.servers.processes.guard import GRACE
from utils.servers.processes.programs import HOST
from utils.text import visible

GUARD = Path(__file__).parent / "guard.py"
POLL = 0.2  # seconds between two questions whether the server is ready
COUNT = 1.0  # seconds between two lines of progress
LAST_LINES, LINE_LENGTH = 5, 200
TAIL_BYTES = 16_384
# What infer.py and the package sampling set for OpenMP where the user has not.
OUR_VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


def free_port() -> int:
    """A port of the loopback interface that nothing listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    """The variables of this process, without those that it has set for its own threads.

    A server shall be as fast as if the user had started it.
    """
    return {name: value for name, value in os.environ.items() if OUR_VARIABLES.get(name) != value}


class ServerProcess:
    """A running server. Everything that it prints goes to its log file."""

    def __init__(self, name: str, command: Sequence[str], port: int, log: Path) -> None:
        """Start the command. Raises UserError if that is not possible here."""
        if os.name != "posix":
            raise UserError("servers can be started on Linux and macOS only; start it yourself and use /server add.")
        self.name, self.port, self.log = name, port, log
        self.command = tuple(command)
        read, self._write = os.pipe()
        guarded = [sys.executable, "-P", str(GUARD), str(read), str(os.getpid()), str(log.parent), *command]
        try:
            with log.open("wb") as output:
                # A session of its own: Ctrl-C in the terminal does not reach the server.
                self._guard = subprocess.Popen(
                    guarded,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(read,),
                    env=environment(),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(self._write)
            raise UserError(f"{name} could not be started: {error.strerror}.") from error
        finally:
            os.close(read)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._guard.poll() is None

    def wait_until_ready(self, is_ready: Callable[[], bool], *, limit: float) -> Iterator[str]:
        """Wait until the server is ready, at most `limit` seconds. Yields a line of progress every second.

        is_ready: asks the server. Raises UserError, with the end of its log, if it exits or needs too long. Whatever
        ends the waiting before the server is ready, Ctrl-C included, ends the server.
        """
        start = reported = time.monotonic()
        try:
            while not is_ready():
                now = time.monotonic()
                if not self.is_running:
                    raise UserError(self.ending())
                if now - start > limit:
                    raise UserError(f"{self.name} was not ready after {limit:.0f} s. {self.last_words()}")
                if now - reported >= COUNT:
                    reported = now
                    yield Count(f"starting {self.name}: {now - start:.0f} s")
                time.sleep(POLL)
            if not self.is_running:  # then something else answers on its port
                raise UserError(self.ending())
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and everything that it has started. Does nothing if that has happened before."""
        if self._write < 0:
            return
        if self.is_running:
            self._guard.terminate()
        os.close(self._write)
        self._write = -1
        try:
            self._guard.wait(2 * GRACE)
        except subprocess.TimeoutExpired:  # the guard itself hangs
            self._guard.kill()
            self._guard.wait()

    def last_lines(self, count: int = LAST_LINES) -> list[str]:
        """The last lines of the log that are not empty, safe to show."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return []
        lines = [line.strip() for line in visible(text.replace("\r", "\n")).splitlines()]
        return [line[:LINE_LENGTH] for line in lines if line][-count:]

    def ending(self, *, wait: float = 0.0) -> str:
        """How the server has ended, with the end of its log; "" if it is still running after `wait` seconds."""
        try:
            status = self._guard.wait(wait)
        except subprocess.TimeoutExpired:
            return ""
        return f"{self.name} ended with status {status}. {self.last_words()}"

    def last_words(self) -> str:
        """The end of the log as a sentence."""
        lines = self.last_lines()
        return "Its log ends with:\n" + "\n".join(lines) if lines else "Its log is empty."
