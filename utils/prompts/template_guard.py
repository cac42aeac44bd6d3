"""Bounds for chat templates, which are programs: each rendering is tried out in a process of its own first.

The process is started once and has limits of time and memory (`template_process`). What it renders is not used, so the
prompt is exactly what transformers renders. An ordinary template takes a fraction of a millisecond.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from utils.prompts.template_process import TOO_LARGE

PROCESS = Path(__file__).with_name("template_process.py")
SECONDS = 2  # of processor time
WAITING_SECONDS = 60  # on a machine that is so busy that the process does not get its time
MEMORY = 512_000_000
SPARE_CHARACTERS, GROWTH = 1_000_000, 8  # a text may be this much longer than what it is made from


class TemplateLimitError(Exception):
    """A chat template that exceeds the bounds; the message says which."""


class TemplateGuard:
    """The process that tries out templates. It ends with this one, because its input ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def check(self, template: str, variables: Mapping[str, Any]) -> None:
        """Raise TemplateLimitError if rendering takes too much time or memory, or gives too much text."""
        if os.name != "posix":  # without limits of time and memory, and without select on pipes
            return
        try:
            given = json.dumps(variables)
        except (TypeError, ValueError):  # not from this program; transformers decides about it
            return
        limit = SPARE_CHARACTERS + GROWTH * (len(given) + len(template))
        request = json.dumps({"template": template, "size": limit})[:-1] + f', "variables": {given}}}\n'
        with self._lock:
            try:
                reply = self._ask(request.encode())
            except OSError as error:
                raise TemplateLimitError(f"the process that tries it out does not start: {error.strerror}") from error
            except BaseException:  # Ctrl-C included: the process may still be at work
                self.close()
                raise
        if reply.get("size", 0) > limit:
            raise TemplateLimitError(f"it gives more than {limit:,} characters")

    def start(self) -> None:
        """Start the process before it is needed, since that takes a moment, and do not wait for it."""
        with self._lock, suppress(OSError):  # reported when it is needed
            self._process = self._running() or _start()

    def _running(self) -> subprocess.Popen[bytes] | None:
        return self._process if self._process is not None and self._process.poll() is None else None

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, request: bytes) -> dict[str, Any]:
        self._process = process = self._running() or _start()
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # its end is reported below
            process.stdin.write(request)
            process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], WAITING_SECONDS)
        if not ready:
            raise TemplateLimitError(f"it takes longer than {WAITING_SECONDS} seconds")
        if line := process.stdout.readline():
            reply: dict[str, Any] = json.loads(line)
            return reply
        status = process.wait()
        self.close()
        if status == TOO_LARGE:
            raise TemplateLimitError(f"it takes more than {MEMORY // 1_000_000} MB of memory")
        if status < 0:  # ended by a signal, that of the timer as a rule
            raise TemplateLimitError(f"it takes more than {SECONDS} seconds")
        return {}  # the process cannot work here, for example without jinja2, which transformers will report


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(PROCESS), str(MEMORY), str(SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process
    )


GUARD = TemplateGuard()
atexit.register(GUARD.close)


def check_rendering(
    template: str, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any], *, add_generation_prompt: bool
) -> None:
    """Raise TemplateLimitError if a template exceeds the bounds on these messages."""
    rest = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
    GUARD.check(template, {**variables, **rest})
