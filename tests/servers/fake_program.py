"""A program that takes the place of a server program: `fake_program.py BEHAVIOUR ... --port N ...`.

BEHAVIOUR: `serve` answers, the faster the more drafts it makes; `picky` does not start with eight drafts; `children`
also leaves a process in a session of its own and ignores SIGTERM; `fail` writes to its log and exits; `never` runs
without listening. Its arguments are printed to the log.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from servers.loopback import Faults, Loopback

DRAFTS = "--spec-ngram-simple-size-m"
SLOWEST = 0.05  # seconds between two tokens without drafts


def log(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    behaviour, arguments = sys.argv[1], sys.argv[2:]
    log("arguments: " + " ".join(arguments))
    if behaviour == "fail":
        log("\n".join(f"line {number}" for number in range(20)))
        log("\x1b[31mno such model\x1b[0m\n")
        sys.exit(3)
    if behaviour == "never":
        time.sleep(600)
    if behaviour == "children":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        log(f"child {child.pid}")
    drafts = int(arguments[arguments.index(DRAFTS) + 1]) if DRAFTS in arguments else 0
    if behaviour == "picky" and drafts == 8:
        sys.exit("eight drafts are too many")
    server = Loopback(faults=Faults(chunk_delay=SLOWEST / (1 + drafts)))
    server._listen(int(arguments[arguments.index("--port") + 1]))
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
