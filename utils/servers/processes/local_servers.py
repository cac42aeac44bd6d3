"""The local servers that a session has started. They end with it, and so does the temporary folder of their logs."""

import atexit
import re
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from utils.errors import UserError
from utils.servers.address import ServerAddress
from utils.servers.client import ServerClient
from utils.servers.processes.launch import EMBEDDED, Launch
from utils.servers.processes.programs import LLAMA, PROGRAMS, command_line
from utils.servers.processes.server_process import ServerProcess, free_port

READY_SECONDS = 600.0  # large models take minutes to load
PATIENCE = 5.0  # seconds for one answer while a server starts
ENDING_SECONDS = 1.0  # for a process to end after its last connection


def _with_files(launch: Launch) -> Launch:
    """The launch with the embedded model's file or folder in the place of its name; it may be downloaded."""
    if EMBEDDED not in (launch.model, launch.drafter):
        return launch
    from utils.models.embedded import embedded_folder, embedded_gguf

    found = str((embedded_gguf if launch.engine == LLAMA else embedded_folder)(lambda line: None))
    model, drafter = (found if name == EMBEDDED else name for name in (launch.model, launch.drafter))
    return replace(launch, model=model, drafter=drafter)


def answers(url: str) -> bool:
    """Whether the server at a URL can take requests. Raises UserError if it answers with an error."""
    with ServerClient(ServerAddress("new", url, timeout=PATIENCE)) as client:
        return client.is_ready()


class LocalServers:
    """Servers by name. is_ready: asks the server at a URL whether it can answer."""

    def __init__(self, is_ready: Callable[[str], bool] = answers) -> None:
        self._is_ready = is_ready
        self._running: dict[str, tuple[Launch, ServerProcess]] = {}
        self._folder: Path | None = None

    def start(self, name: str, launch: Launch, *, limit: float = READY_SECONDS) -> Generator[str, None, str]:
        """Start a server and wait until it is ready, at most `limit` seconds. Yields progress and returns its URL.

        Raises UserError if the engine is not installed, or with the end of the server's log if it does not get ready.
        The server ends if the generator is closed or Ctrl-C comes before it is ready.
        """
        if name in self:
            raise UserError(f"{name} is running already; /server stop {name} ends it.")
        self._forget(name)
        port = free_port()
        yield f"starting {name}: {launch.engine}, {launch.model} ..."
        launch = _with_files(launch)
        command = command_line(launch, port)
        process = ServerProcess(name, command, port, self._log_of(name))
        self._running[name] = launch, process
        try:
            yield from process.wait_until_ready(lambda: self._is_ready(process.url), limit=limit)
        except BaseException:
            self._forget(name)
            raise
        return process.url

    def stop(self, name: str) -> None:
        """End a server. Raises UserError if this session has started none with this name."""
        if name not in self._running:
            started = ", ".join(self._running) or "none is running"
            raise UserError(f"{name} was not started by this session; /server stop takes one that was: {started}.")
        self._forget(name)

    def stop_all(self) -> None:
        """End all servers and remove their logs."""
        for name in list(self._running):
            self._forget(name)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        atexit.unregister(self.stop_all)

    def __contains__(self, name: str) -> bool:
        """Whether a server was started and has not ended."""
        return name in self._running and self._running[name][1].is_running

    def names(self) -> list[str]:
        """The names of all that were started and not stopped, in this order. Some may have ended on their own."""
        return list(self._running)

    def launch_of(self, name: str) -> Launch:
        """How a server was started. Raises UserError if this session has not started it."""
        if name not in self._running:
            raise UserError(f"{name} was not started by this session; /server start starts one.")
        return self._running[name][0]

    def model_of(self, name: str) -> str | None:
        """The name that requests need for the model of a server, or None if the server says it itself."""
        launch = self.launch_of(name)
        return None if PROGRAMS[launch.engine].lists_model else launch.model

    def process_of(self, name: str) -> ServerProcess | None:
        """The process of a server, or None if this session has not started it."""
        return self._running[name][1] if name in self._running else None

    def ending_of(self, name: str) -> str:
        """Why a server that this session has started does not answer any more; "" if it runs or is none of these."""
        process = self.process_of(name)
        return "" if process is None else process.ending(wait=ENDING_SECONDS)

    def _forget(self, name: str) -> None:
        if entry := self._running.pop(name, None):
            entry[1].stop()

    def _log_of(self, name: str) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="speculative-decoding-"))
            atexit.register(self.stop_all)
        path = self._folder / f"{re.sub('[^A-Za-z0-9.-]', '-', name)}.log"
        with suppress(OSError):
            path.unlink()
        return path
