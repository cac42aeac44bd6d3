"""Turns off the terminal's echo while a line is processed, so that typed keys do not mix with the answers.

What is typed meanwhile stays in the terminal's input and is read by the next prompt. The echo comes back when the line
is done, when the program is suspended or ended by a signal, and when it crashes.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar

try:
    import termios
except ImportError:  # not on Windows
    termios = None  # type: ignore[assignment]

# Signals that end the program without running `finally` blocks. Windows lacks some of them.
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]


@contextmanager
def quiet_keyboard() -> Iterator[None]:
    """No echo while the block runs, if standard input is a terminal that echoes."""
    keyboard = _keyboard()
    if keyboard is None:
        yield
        return
    with Echo(keyboard).turned_off():
        yield


def _keyboard() -> int | None:
    """File descriptor of standard input if it is a terminal that echoes."""
    try:
        keyboard = sys.stdin.fileno()
        return keyboard if termios.tcgetattr(keyboard)[3] & termios.ECHO else None
    except (AttributeError, OSError, ValueError, getattr(termios, "error", OSError)):
        return None


class Echo:
    """The echo of a terminal. suspended: seconds that the program was stopped by Ctrl-Z while a line was processed."""

    suspended: ClassVar[float] = 0.0

    def __init__(self, keyboard: int) -> None:
        self._keyboard = keyboard

    @contextmanager
    def turned_off(self) -> Iterator[None]:
        """Off while the block runs."""
        ours = {signal.SIGTSTP: self._suspend, signal.SIGCONT: self._resume} | dict.fromkeys(ENDING, self._end)
        # Only the main thread may set handlers.
        in_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, handler) for number, handler in ours.items()} if in_main else {}
        atexit.register(self._set, on=True)  # a generator that is not finished may never run its `finally`
        try:
            self._set(on=False)
            yield
        finally:
            self._set(on=True)
            atexit.unregister(self._set)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _set(self, *, on: bool) -> None:
        # A process in the background would be stopped by changing the terminal.
        if os.tcgetpgrp(self._keyboard) != os.getpgrp():
            return
        state = termios.tcgetattr(self._keyboard)
        state[3] = state[3] | termios.ECHO if on else state[3] & ~termios.ECHO
        # Not TCSAFLUSH, which would discard what was typed.
        termios.tcsetattr(self._keyboard, termios.TCSANOW, state)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        since = time.monotonic()
        self._end(number, frame)
        # Here after SIGCONT.
        Echo.suspended += time.monotonic() - since
        signal.signal(number, self._suspend)

    def _resume(self, number: int, frame: FrameType | None) -> None:
        self._set(on=False)

    def _end(self, number: int, frame: FrameType | None) -> None:
        """Let the signal do what it does without this class."""
        self._set(on=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
