"""The echo of the terminal is off while a line is processed, and comes back whatever ends it."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import ROOT

from utils.repl.line_input import ENDING, quiet_keyboard

# Plays the shell: it starts the program in the foreground of the terminal.
SHELL = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
program = subprocess.Popen([sys.executable, "-c", sys.argv[1]], process_group=0)
os.tcsetpgrp(0, program.pid)
os.kill(program.pid, signal.SIGCONT)
program.wait()
"""
# Runs each body in a process of its own, and then says whether there is an echo. What would import torch is left out.
PROGRAM = """
import os, signal, sys, termios, time, types
sys.path.insert(0, {root!r})
sys.modules["utils.commands"] = types.SimpleNamespace(Command=object, Registry=object)
sys.modules["utils.repl.status"] = types.SimpleNamespace(SEPARATOR="")
from utils.repl.line_input import quiet_keyboard

def say(*words):
    print(*words, "echo" if termios.tcgetattr(0)[3] & termios.ECHO else "quiet", flush=True)

for body in {bodies!r}:
    say("before")
    if os.fork() == 0:
        exec(body)
        sys.exit()
    os.wait()
    say("then")
print("end", flush=True)
"""
WITHIN = """
with quiet_keyboard():
    say("within")
"""
READS = (
    WITHIN
    + """
    time.sleep(0.5)
say("after")
print("read", sys.stdin.readline().strip())
"""
)
ENDS = (
    "raise ValueError",
    "os.kill(os.getpid(), signal.SIGTERM)",
    "os.kill(os.getpid(), signal.SIGQUIT)",
    "sys.exit(3)",
)
GENERATOR = """
def lines():
    with quiet_keyboard():
        yield 1
sys.kept = lines()
next(sys.kept)
say("within")
"""


def on_a_terminal(bodies: list[str], keys: bytes) -> list[str]:
    """What each body writes to a terminal, in whose foreground it runs. The keys are typed within the first one."""
    leader, follower = pty.openpty()
    program = PROGRAM.format(root=str(ROOT), bodies=bodies)
    command = ["setsid", "--ctty", sys.executable, "-c", SHELL, program]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    shown = b""
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and b"end\r\n" not in shown:
            if select.select([leader], [], [], 0.2)[0]:
                shown += os.read(leader, 4096)
                if keys and b"within" in shown:
                    os.write(leader, keys)
                    keys = b""
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    return shown.decode().split("before ")[1:]


@pytest.mark.skipif(not Path("/usr/bin/setsid").exists(), reason="needs setsid")
def test_the_echo_is_off_within_and_comes_back_whatever_ends_it() -> None:
    """By itself, by an exception, by a signal, or by the end of the program with an unfinished generator."""
    bodies = [READS, *(WITHIN + f"    {end}\n    time.sleep(5)" for end in ENDS), GENERATOR]
    reads, *others = on_a_terminal(bodies, b"typed ahead\n")
    assert "after echo" in reads and reads.count("typed ahead") == 1 and "read typed ahead" in reads
    assert len(others) == len(ENDS) + 1
    for shown in (reads, *others):
        assert shown.startswith("echo") and "within quiet" in shown and "then echo" in shown, shown


def test_signal_handlers_stay_without_a_terminal() -> None:
    before = [signal.getsignal(number) for number in ENDING]
    with quiet_keyboard():
        assert [signal.getsignal(number) for number in ENDING] == before
