"""A program that takes the place of a training: its drafter is the one that it was to begin from."""

import sys
from pathlib import Path

# `forever` writes a byte every hundredth of a second. `wait` ends once another has written the drafter.
FAKE = """
import shutil, sys, time
from pathlib import Path
behaviour, options = sys.argv[1], dict(zip(sys.argv[2::2], sys.argv[3::2]))
out = Path(options["--out"])
print("generating: 10 of 20 tokens, 5 tokens/s, 2 min 03 s left", flush=True)
if behaviour == "fail":
    sys.exit("no memory is left")
while behaviour == "wait":
    if (out / "README.md").exists():
        sys.exit()
    time.sleep(0.01)
if "--start" in options:
    shutil.copytree(options["--start"], out)
else:
    out.mkdir()
while behaviour == "forever":
    with (out.parent / "ticks").open("ab") as file:
        file.write(b".")
    time.sleep(0.01)
(out / "README.md").write_text("card")
"""


def fake_program(folder: Path, behaviour: str) -> tuple[str, ...]:
    """The beginning of its command, at the usual priority."""
    script = folder / "fake_training.py"
    script.write_text(FAKE)
    return sys.executable, str(script), behaviour


def ticks(home: Path) -> int:
    """The bytes written so far."""
    return sum(path.stat().st_size for path in home.glob(".training-*/ticks"))
