"""A process between this program and a server or a training that it has started. It ends it when this program is gone.

`guard.py PARENT STATUS COMMAND ...` runs as a script. It starts the command and waits until SIGTERM arrives or the
parent is gone, which ends the standard input. Then it ends the command and all processes that the command has started.
So not even SIGKILL of the parent leaves a server behind. The file STATUS.begun appears when the command runs. If the
command ends on its own, its exit status is written to the file STATUS. The folder of these files is removed if the
parent is gone.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

GRACE = 5.0  # seconds for a server to end after SIGTERM
EVERY, ATTEMPTS = 0.25, 20  # seconds between two checks of the processes, and attempts to kill those that remain
SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36  # of Linux's prctl


def main() -> int:
    parent, status, *command = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(SET_SUBREAPER, 1)  # orphaned processes of the server become children of the guard
    die_with_guard = partial(_prctl, SET_DEATH_SIGNAL, signal.SIGKILL)  # runs before the server's program starts
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_guard)
    orphaned = False
    try:
        Path(f"{status}.begun").touch()
        while not orphaned:
            # The end of the input makes it readable. A process that the parent has forked may keep it open.
            orphaned = bool(select.select([sys.stdin], [], [], EVERY)[0]) or os.getppid() != int(parent)
            if server.poll() is not None and not os.path.exists(status):
                end_all(server)
                Path(f"{status}.new").write_text(str(exit_status(server)))
                os.replace(f"{status}.new", status)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all(server)
        if orphaned:  # the parent could not remove its temporary folder
            shutil.rmtree(Path(status).parent, ignore_errors=True)
    return exit_status(server)


def exit_status(server: "subprocess.Popen[bytes]") -> int:
    """The status of a server that has ended. As in a shell, a signal is a status above 128."""
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def end_all(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    server.send_signal(signal.SIGCONT)  # a process that is stopped does not end
    try:
        server.wait(GRACE)
    except subprocess.TimeoutExpired:
        server.kill()
    for _ in range(ATTEMPTS):  # killing a process may pass its children to the guard
        if not (children := psutil.Process().children(recursive=True)):
            break
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=EVERY)
    server.wait()


def _prctl(option: int, value: int) -> None:
    """Linux only. Elsewhere a server may survive SIGKILL of its guard."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
