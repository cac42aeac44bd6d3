"""Turns off the terminal's echo while a line is processed, so that typed keys do not mix with the answers.

Keys typed meanwhile stay in the terminal's input for the next prompt. The echo comes back when the line is done, when a
signal ends the program, and when it crashes. While it is suspended, the shell is responsible.
"""

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

try:
    import termios
except ImportError:  # not on Windows
    termios = None  # type: ignore[assignment]

# Signals that end the program without running `finally` blocks. Windows lacks some of them.
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]


@contextmanager
def quiet_keyboard() -> Iterator[None]:
    """Turn off the echo while the block runs, if standard input is a terminal that echoes."""
    try:
        keyboard = sys.stdin.fileno()
        echoes = termios.tcgetattr(keyboard)[3] & termios.ECHO
    except (AttributeError, OSError, ValueError, getattr(termios, "error", OSError)):
        echoes = 0
    if not echoes:
        yield
        return
    restore = partial(_set_echo, keyboard, on=True)

    def end(number: int, frame: FrameType | None) -> None:
        restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before = {number: signal.signal(number, end) for number in ENDING}
    atexit.register(restore)  # a generator that is not finished may never run its `finally`
    try:
        _set_echo(keyboard, on=False)
        yield
    finally:
        restore()
        atexit.unregister(restore)
        for number, handler in before.items():
            signal.signal(number, handler)


def _set_echo(keyboard: int, *, on: bool) -> None:
    # Changing the terminal would stop a process in the background.
    if os.tcgetpgrp(keyboard) == os.getpgrp():
        state = termios.tcgetattr(keyboard)
        state[3] = state[3] | termios.ECHO if on else state[3] & ~termios.ECHO
        # Not TCSAFLUSH, which would discard typed keys.
        termios.tcsetattr(keyboard, termios.TCSANOW, state)
