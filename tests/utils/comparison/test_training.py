"""The process of a training: it is paused, it ends with its session, and it leaves only a finished drafter behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_training import fake_program, ticks
from paths import ROOT
from servers.launches import family, gone

from utils.comparison import training
from utils.comparison.training import PROGRAM, Training
from utils.errors import UserError
from utils.prompts.prompt_files import Prompt
from utils.servers.processes import local_servers
from utils.servers.processes.guard import GRACE

SESSION = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}]
from utils.comparison import training
from utils.servers.processes import local_servers
training.PROGRAM = {program!r}
local_servers.GUARD = Path({guard!r})
begun = training.Training(Path({home!r}), [], [], {{}})
pause = begun.paused()  # a name, because Python would end an unreferenced pause
if {paused}:
    pause.__enter__()
print("ready", flush=True)
sys.stdin.readline()
"""


# Half a second passes between the copy of the guard and the program that takes its place.
SLOW_GUARD = """
import sys, time
sys.path[:0] = [{root!r}]
from utils.servers.processes import guard
prctl = guard._prctl
guard._prctl = lambda *arguments: (time.sleep(0.5), prctl(*arguments))
sys.exit(guard.main())
"""


def living() -> set[psutil.Process]:
    """The processes that this one has started and that have not ended."""
    return {process for process in family() if process.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    for process in living():
        process.kill()


def begun(home: Path, behaviour: str) -> Training:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "PROGRAM", (*PROGRAM[:5], *fake_program(home.parent, behaviour)))
        return Training(home, [Prompt("Hello\nthere")], [Prompt("kept")], {"hours": 0.1})


def grows(home: Path, seconds: float = 20.0) -> bool:
    """Whether the program works within so many seconds."""
    before, end = ticks(home), time.monotonic() + seconds
    while ticks(home) == before and time.monotonic() < end:
        time.sleep(0.01)
    return ticks(home) > before


def test_a_training_is_paused_in_a_block_and_then_goes_on(tmp_path: Path) -> None:
    home = tmp_path / "home"
    one = begun(home, "forever")
    assert grows(home) and "generating: 10 of 20 tokens, 5 tokens/s" in one.state and "left" not in one.state
    assert [process.nice() for process in living() if not process.children()] == [19]
    with one.paused():
        assert not grows(home, 0.3) and one.is_running
    assert grows(home)
    with one.paused():
        assert next(one.wait()) and grows(home), "waiting lets it go on"
    one.close()


def test_it_is_paused_as_soon_as_it_has_begun(tmp_path: Path) -> None:
    """A line that follows at once must not run beside it."""
    one = begun(tmp_path / "home", "forever")
    with one.paused():
        (program,) = (process for process in living() if not process.children())
        end = time.monotonic() + 5
        while program.status() != psutil.STATUS_STOPPED and time.monotonic() < end:  # when it is scheduled next
            time.sleep(0.01)
        assert program.status() == psutil.STATUS_STOPPED and not list(tmp_path.glob("home/.training-*/ticks"))
        assert re.fullmatch(r"learning for \d+ s", one.state), "its log is empty"
    one.close()


@pytest.mark.parametrize("paused", [False, True])
def test_a_training_that_is_ended_leaves_nothing_behind(tmp_path: Path, paused: bool) -> None:
    home = tmp_path / "home"
    one = begun(home, "forever")
    assert grows(home)
    processes, started = living(), time.monotonic()
    assert len(processes) == 2  # the guard and the program
    pause = one.paused()
    if paused:
        pause.__enter__()
    one.close()
    assert gone(processes) and not list(home.iterdir()) and time.monotonic() - started < GRACE
    one.close()


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("guard", ["usual", "slow"])  # slow: the pause comes while the program takes its place
@pytest.mark.parametrize("ending", ["exit", "SIGTERM", "SIGKILL"])
def test_a_session_that_ends_leaves_nothing_behind(tmp_path: Path, ending: str, guard: str, paused: bool) -> None:
    home, script = tmp_path / "home", local_servers.GUARD
    if guard == "slow":
        script = tmp_path / "slow_guard.py"
        script.write_text(SLOW_GUARD.format(root=str(ROOT)))
    program = fake_program(tmp_path, "forever")
    code = SESSION.format(root=str(ROOT), program=program, home=str(home), guard=str(script), paused=paused)
    session = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert session.stdin is not None and session.stdout is not None and session.stdout.readline() == "ready\n"
    processes = set(psutil.Process(session.pid).children(recursive=True))
    assert len(processes) == 2 and list(home.glob(".training-*"))
    if ending == "exit":
        session.stdin.close()
    else:
        os.kill(session.pid, getattr(signal, ending))
    started = time.monotonic()
    session.wait(30)
    assert gone(processes) and not list(home.iterdir()) and time.monotonic() - started < GRACE


def test_a_finished_drafter_is_kept_under_a_free_name(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for number in (1, 2):
        one = begun(home, "finish")
        assert all("learning for" in state for state in one.wait())
        assert one.drafter() == one.drafter() == home / f"learned-{number}"
        assert (home / f"learned-{number}" / "README.md").is_file() and len(list(home.iterdir())) == number


def test_a_training_that_fails_is_explained_by_its_log(tmp_path: Path) -> None:
    one = begun(tmp_path / "home", "fail")
    list(one.wait())
    with pytest.raises(
        UserError, match=r"the training ended with status 1\. Its log ends with:\n.*\nno memory is left"
    ):
        one.drafter()
    one.close()
    assert not list((tmp_path / "home").iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(UserError, match=r"home cannot be written: "):
        begun(tmp_path / "home", "finish")
