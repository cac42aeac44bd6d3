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

# Plays the shell: it starts the program in the foreground of the terminal and reports the echo after its end.
SHELL = """
import os, signal, subprocess, sys, termios
signal.signal(signal.SIGTTOU, signal.SIG_IGN)

def echo():
    return "echo" if termios.tcgetattr(0)[3] & termios.ECHO else "quiet"

def foreground(group):
    os.tcsetpgrp(0, group)

program = subprocess.Popen([sys.executable, "-c", sys.argv[1]], process_group=0)
foreground(program.pid)
os.kill(program.pid, signal.SIGCONT)
program.wait()
foreground(os.getpgrp())
print("then", echo(), "end", flush=True)
"""
PROGRAM = """
import os, signal, sys, termios, time
sys.path.insert(0, {root!r})
from utils.repl.line_input import quiet_keyboard

def say(*words):
    print(*words, "echo" if termios.tcgetattr(0)[3] & termios.ECHO else "quiet", flush=True)

time.sleep(0.3)  # until the shell has put it into the foreground
say("before")
{body}
"""
WITHIN = """
with quiet_keyboard():
    say("within")
"""


def on_a_terminal(body: str, keys: bytes = b"") -> str:
    """What a program writes to a terminal of its own, in which it is the foreground job of a shell."""
    program = PROGRAM.format(root=str(ROOT), body=body)
    leader, follower = pty.openpty()
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
    return shown.decode()


pytestmark = pytest.mark.skipif(not Path("/usr/bin/setsid").exists(), reason="needs setsid")


def test_the_echo_is_off_within_and_what_is_typed_is_read_later() -> None:
    body = WITHIN + "    time.sleep(1)\nsay('after')\nprint('read', sys.stdin.readline().strip())"
    shown = on_a_terminal(body, b"typed ahead\n")
    assert "before echo" in shown and "within quiet" in shown and "after echo" in shown
    assert shown.count("typed ahead") == 1 and "read typed ahead" in shown
    assert "then echo end" in shown


@pytest.mark.parametrize(
    "end",
    [
        "raise ValueError('a bug')",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.kill(os.getpid(), signal.SIGQUIT)",
        "sys.exit(3)",
    ],
)
def test_the_echo_is_on_after_the_program_has_ended(end: str) -> None:
    shown = on_a_terminal(WITHIN + f"    {end}\n    time.sleep(5)")
    assert "within quiet" in shown and "then echo end" in shown


def test_an_unfinished_generator_restores_it_too() -> None:
    body = "def lines():\n    with quiet_keyboard():\n        yield 1\nkept = lines()\nnext(kept)\n"
    shown = on_a_terminal(body + "say('within')\nsys.kept = kept")
    assert "within quiet" in shown and "then echo end" in shown


def test_signal_handlers_stay_without_a_terminal() -> None:
    before = [signal.getsignal(number) for number in ENDING]
    with quiet_keyboard():
        assert [signal.getsignal(number) for number in ENDING] == before
