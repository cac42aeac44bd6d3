"""Programs that a session has started. They end with it, and the temporary folders of their logs are removed.

A guard (`guard.py`) between this program and each server ends the server however this program ends.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from utils.errors import UserError
from utils.servers.processes.flags import LLAMA
from utils.servers.processes.guard import GRACE
from utils.servers.processes.programs import EMBEDDED, HOST, Launch, command_line
from utils.text import Count, visible

READY_SECONDS = 1800.0  # large models take minutes to load; Ctrl-C ends the waiting
ENDING_SECONDS = 1.0  # for a process to end after its last connection
GUARD = Path(__file__).parent / "guard.py"
EMPTY_LOG = "Its log is empty."
POLL = 0.2  # seconds between two checks whether the server is ready
SOON = 0.01  # seconds between two checks whether a program has begun
COUNT = 1.0  # seconds between two lines of progress
LAST_LINES, LINE_LENGTH = 5, 200
TAIL_BYTES = 16_384
# The OpenMP variables that infer.py and the package sampling set unless the user has set them.
OUR_VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    """The variables of this process, without those that it has set for its own threads.

    A server must be as fast as if the user had started it.
    """
    return {name: value for name, value in os.environ.items() if OUR_VARIABLES.get(name) != value}


class GuardedProcess:
    """A program that ends with this one. Its output goes to its log file. What else is in the folder of that file is
    removed, too, if this program is killed.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        """Start the command. Raises UserError if that is not possible here."""
        self.name, self.log = name, log
        self.command = tuple(command)
        self._status = log.with_suffix(".status")  # written when the server has ended on its own
        guarded = [sys.executable, "-P", str(GUARD), str(os.getpid()), str(self._status), *command]
        try:
            with log.open("wb") as output:
                # A separate session, so that Ctrl-C in the terminal does not reach the server.
                self._guard = subprocess.Popen(
                    guarded,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment(),
                    start_new_session=True,
                )
        except OSError as error:
            raise UserError(f"{name} could not be started: {error.strerror}.") from error

    @property
    def is_running(self) -> bool:
        return self._guard.poll() is None and not self._status.exists()

    def send(self, number: int) -> None:
        """Send a signal to the program and to all processes that it has started, but not to its guard."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._guard.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def wait_for_program(self) -> None:
        """Wait until the guard has started the program, so that signals reach it.

        Before, its process is a copy of the guard. The guard waits for it, and SIGSTOP would stop both.
        """
        while self.is_running and not Path(f"{self._status}.begun").exists():
            time.sleep(SOON)

    def stop(self) -> None:
        """End the program and all processes that it has started. Does nothing the second time."""
        assert self._guard.stdin is not None
        self._guard.terminate()
        self._guard.stdin.close()
        try:
            self._guard.wait(2 * GRACE)
        except subprocess.TimeoutExpired:  # the guard itself hangs
            self._guard.kill()
            self._guard.wait()

    def ending(self, *, wait: float = 0.0) -> str:
        """How the server has ended, with the end of its log. It is empty if it still runs after `wait` seconds."""
        end = time.monotonic() + wait
        while self.is_running:
            if time.monotonic() >= end:
                return ""
            time.sleep(POLL)
        status = self._status.read_text() if self._status.exists() else self._guard.returncode
        return f"{self.name} ended with status {status}. {self.last_words()}"

    def last_words(self) -> str:
        """The last lines of the log that are not empty, made safe to show, as a sentence."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            text = ""
        lines = [line.strip() for line in visible(text.replace("\r", "\n")).splitlines()]
        shown = [line[:LINE_LENGTH] for line in lines if line][-LAST_LINES:]
        return "Its log ends with:\n" + "\n".join(shown) if shown else EMPTY_LOG


class LocalServer(GuardedProcess):
    """A server program on a free port of the loopback interface. Its log is in a temporary folder of its own.

    `launch` is how it was started, with the files of the embedded model in place of its name.
    """

    def __init__(self, name: str, launch: Launch) -> None:
        """Start it. Raises UserError if the program is not installed or does not support the launch."""
        self.launch, port = _with_files(launch), free_port()
        self.url = f"http://{HOST}:{port}"
        command = command_line(self.launch, port)
        folder = Path(tempfile.mkdtemp(prefix="speculative-decoding-"))
        super().__init__(name, command, folder / f"{name}.log")

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self.log.parent, ignore_errors=True)

    def wait_until_ready(self, is_ready: Callable[[str], bool]) -> Iterator[str]:
        """Wait until the server is ready. Yields a line of progress every second.

        `is_ready` sends a request to the server at a URL. Raises UserError, with the end of its log, if it exits or
        takes too long. The server ends after any error, Ctrl-C, or if the generator is closed before it is ready.
        """
        start = reported = time.monotonic()
        try:
            while True:
                ready, now = is_ready(self.url), time.monotonic()
                if not self.is_running:  # if it seems ready, another program answers on its port
                    raise UserError(self.ending())
                if ready:
                    return
                if now - start > READY_SECONDS:
                    raise UserError(f"{self.name} was not ready after {READY_SECONDS:.0f} s. {self.last_words()}")
                if now - reported >= COUNT:
                    reported = now
                    yield Count(f"starting {self.name}: {now - start:.0f} s")
                time.sleep(POLL)
        except BaseException:
            self.stop()
            raise


def _with_files(launch: Launch) -> Launch:
    """The launch with the file or folder of the embedded model instead of its name. This may download it."""
    if EMBEDDED not in (launch.model, launch.drafter):
        return launch
    from utils.models.embedded import embedded_folder, embedded_gguf

    found = str((embedded_gguf if launch.kind == LLAMA else embedded_folder)(lambda line: None))
    model, drafter = (found if name == EMBEDDED else name for name in (launch.model, launch.drafter))
    return replace(launch, model=model, drafter=drafter)
