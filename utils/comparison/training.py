"""The training of a drafter behind the prompt: a process of its own, its files, and the prompts of the race after it.

The process is stopped where it is while a line runs, so that it never works beside a measurement. It ends with the
session, however that ends, and then leaves no files behind except a finished drafter.
"""

import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files import os_reason
from utils.prompts.prompt_files import Prompt
from utils.servers.processes.local_servers import EMPTY_LOG, POLL, GuardedProcess

ROOT = Path(__file__).parents[2]
# At the lowest priority. The module is found wherever the session was started.
PROGRAM = ("env", f"PYTHONPATH={ROOT}", "nice", "-n", "19", sys.executable, "-u", "-m", "sampling.distill")
ENDED = "the training has ended; /learn wait races the drafters"


class Training:
    """A drafter that learns from some prompts, and the prompts `apart` on which it is then raced.

    `was_raced` is True once a race has begun, which Ctrl-C may have ended.
    """

    def __init__(
        self, home: Path, prompts: Sequence[Prompt], apart: Sequence[Prompt], flags: Mapping[str, Any]
    ) -> None:
        """Start the training. Its drafter goes to a new folder in `home`. Raises UserError if that is not writable."""
        self.apart, self.was_raced, self._began = tuple(apart), False, time.monotonic()
        self._drafter: Path | None = None
        lines = (json.dumps({"prompt": prompt.text}) + "\n" for prompt in prompts)
        try:
            home.mkdir(parents=True, exist_ok=True)
            self._work = Path(tempfile.mkdtemp(prefix=".training-", dir=home))
            (self._work / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{home} cannot be written: {os_reason(error)}.") from error
        options = {"prompts": self._work / "prompts.jsonl", "out": self._work / "drafter", **flags}
        command = [*PROGRAM, *(part for name, value in options.items() for part in (f"--{name}", str(value)))]
        self._process = GuardedProcess("the training", command, self._work / "training.log")
        self._process.wait_for_program()

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    @property
    def summary(self) -> str:
        """Whether it runs, and for how long."""
        return f"learning for {time.monotonic() - self._began:.0f} s" if self.is_running else ENDED

    @property
    def state(self) -> str:
        """The summary and the last line of its log, if it has one, without the time left of one of its parts."""
        line = re.sub(r", [^,]* left$", "", self._process.last_words().rpartition("\n")[2])
        return f"{self.summary}: {line}" if self.is_running and line != EMPTY_LOG else self.summary

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._process.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send(signal.SIGCONT)

    def wait(self) -> Iterator[str]:
        """Let the process work, and yield its state until it has ended."""
        self._process.send(signal.SIGCONT)
        while self.is_running:
            yield self.state
            time.sleep(POLL)

    def drafter(self) -> Path:
        """The folder of the trained drafter, which is kept. Raises UserError if the training failed."""
        if self._drafter is None:
            if not (self._work / "drafter" / "README.md").is_file():  # its last file
                raise UserError(self._process.ending())
            home = self._work.parent
            free = next(path for number in count(1) if not (path := home / f"learned-{number}").exists())
            self._drafter = (self._work / "drafter").replace(free)
            self.close()
        return self._drafter

    def close(self) -> None:
        self._process.stop()
        shutil.rmtree(self._work, ignore_errors=True)
