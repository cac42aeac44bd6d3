"""The peers: transformers' `generate` and llama.cpp, each in a process with the environment that is fastest for it.

Their threads may wait as GNU OpenMP does by default, or as in our program. Both are tried with several numbers of
threads, so that we are never compared with a peer that our own settings have slowed down.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

from arms import Arm, Run

from utils.engine.machine import candidate_threads
from utils.errors import UserError
from utils.models import Reporter
from utils.models.embedded import embedded_gguf

WORKER = Path(__file__).parent / "worker.py"
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # the variables that say how threads wait
TRIAL_TOKENS, TRIAL_ROUNDS = 16, 3
HOPELESS = 0.6  # choices with less than this share of the best speed are not tried again
OCCASIONALLY = 4  # the assistant runs on the first of so many prompts
GENERATE, LOOKUP, ASSISTANT = "generate", "generate, prompt lookup", "generate, assistant"
LLAMA, LLAMA_LOOKUP = "llama.cpp", "llama.cpp, prompt lookup"


class PeerFailed(Exception):
    """A peer could not answer, or its process has ended."""


class Peer:
    """A worker process and how its threads are used. environment: its name. threads: their number."""

    def __init__(self, command: Sequence[str], environment: str, variables: dict[str, str]) -> None:
        self.environment, self.threads = environment, 1
        # Not a pipe, which would fill up. It lives as long as the process.
        self._errors = TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=variables
        )

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    def ask(self, arm: str, **request: Any) -> Any:
        """The reply to a request. Raises PeerFailed if there is none."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"arm": arm, "threads": self.threads} | request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            line = ""
        else:
            line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            raise PeerFailed(
                f"its process ended with status {status}; {' '.join(self._errors.readlines()[-1:]).strip()}"
            )
        reply = json.loads(line)
        if "error" in reply:
            raise PeerFailed(reply["error"])
        return reply

    def run(self, arm: str, ids: list[int], length: int) -> Run:
        """Generate a text."""
        return Run(**self.ask(arm, ids=ids, length=length))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def arm(self, name: str, word: str, *, every: int = 1) -> Arm:
        """One of its arms. word: what the worker calls it."""
        return Arm(name, self.threads, lambda ids, length: self.run(word, ids, length), every)

    def __str__(self) -> str:
        plural = "s" if self.threads > 1 else ""
        return f"{self.threads} thread{plural}, {self.environment}"


def environments(found: dict[str, str]) -> dict[str, dict[str, str]]:
    """The environments to try, by name. found: the variables before the benchmark set its own."""
    ours = dict(os.environ)
    changed = any(found.get(name) != ours.get(name) for name in WAITING)
    return {"waiting as in this program": ours} | ({"waiting as by default": found} if changed else {})


def fastest(peers: Sequence[Peer], counts: Sequence[int], ids: list[int]) -> Peer:
    """The peer that decodes fastest, with its best number of threads. The others are closed.

    Choices that are hopeless, such as spinning threads on a busy machine, are dropped early.
    """
    rates: dict[tuple[Peer, int], list[float]] = {(peer, count): [] for count in counts for peer in peers}
    for peer in peers:
        peer.run("plain", ids, TRIAL_TOKENS)  # returns when it is loaded; otherwise it would load while others run
    for _ in range(TRIAL_ROUNDS):
        for (peer, count), measured in rates.items():
            peer.threads = count
            run = peer.run("plain", ids, TRIAL_TOKENS)
            measured.append(run.decode_rate or run.rate)
        bound = HOPELESS * max(max(measured) for measured in rates.values())
        rates = {choice: measured for choice, measured in rates.items() if max(measured) > bound}
    best, best.threads = max(rates, key=lambda choice: median(rates[choice]))
    for peer in peers:
        if peer is not best:
            peer.close()
    return best


def start_generate(request: Sequence[str], found: dict[str, str], ids: list[int]) -> Peer:
    """transformers' `generate`. request: target, assistant and number format, as load_pair knows them."""
    return _start(["generate", *request], found, ids)


def generate_arms(peer: Peer) -> list[Arm]:
    """Plain decoding, prompt lookup and assisted decoding."""
    occasional = peer.arm(ASSISTANT, "assistant", every=OCCASIONALLY)
    return [peer.arm(GENERATE, "plain"), peer.arm(LOOKUP, "lookup"), occasional]


def start_llama(found: dict[str, str], ids: list[int], report: Reporter) -> Peer | None:
    """llama.cpp with the embedded model's GGUF file, or None, which is reported, if it cannot run here."""
    if find_spec("xllamacpp") is None:
        report("xllamacpp is not installed: the llama.cpp arms are left out")
        return None
    try:
        return _start(["llama.cpp", str(embedded_gguf(report))], found, ids)
    except (PeerFailed, UserError) as error:
        report(f"the llama.cpp arms are left out: {error}")
        return None


def llama_arms(peer: Peer) -> list[Arm]:
    """Plain decoding and prompt lookup."""
    return [peer.arm(LLAMA, "plain"), peer.arm(LLAMA_LOOKUP, "lookup")]


def _start(arguments: Sequence[str], found: dict[str, str], ids: list[int]) -> Peer:
    command = [sys.executable, str(WORKER), *arguments]
    peers = [Peer(command, name, variables) for name, variables in environments(found).items()]
    try:
        return fastest(peers, candidate_threads(), ids)
    except BaseException:
        for peer in peers:
            peer.close()
        raise
