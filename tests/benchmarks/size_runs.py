"""One row of `make bench-sizes`: the program, `generate` or llama.cpp in a process of its own, whose memory is watched.

The program is started as a user starts it. Its figures come from its JSON records, never from its screen.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memory_watch import Bounds, MemoryWatch, end_tree, resident
from peers import WORKER, Peer, PeerFailed
from probes import PASSAGE, ROOT

from utils.config.value_types import COST_TABLE, Limits

POLL_SECONDS = 0.02
SHORT = "Tell me about the sea."
MEDIUM, LONG = 500, 4000  # tokens of the prompts whose prefill is measured
NEW_TOKENS, NEW_TOKENS_LONG = 16, 2
TRIAL_TOKENS = 8  # of the prompt and of the text with which numbers of threads are compared
GROWTH = 1.3 * LONG / MEDIUM  # expected time of a long prefill over that of a medium one: attention grows faster
WIDTHS = (5, 9)


@dataclass(slots=True)
class Figures:
    """What a row shows. Times are in seconds, sizes in bytes, prefill in tokens per second by prompt length.

    starts: seconds to the prompt at the first and the second start. note: the engine in use, or what ended the row.
    """

    starts: list[float] = field(default_factory=list)
    peak: int = 0
    resident: int | None = None
    disk: int | None = None
    step: float | None = None
    verify: dict[int, float] = field(default_factory=dict)
    prefill: dict[int, float] = field(default_factory=dict)
    note: str = ""

    def record(self) -> dict[str, Any]:
        """Return the fields for the JSON file."""
        return asdict(self)


class RowStopped(Exception):
    """A process ended before its figures were complete, or was stopped."""


class Program:
    """`infer.py` in a child process that reads lines from a pipe. folder: of its cache, settings, records and output.

    seconds: from its start to the reply to its first line; see `wait_for_prompt`.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, bounds: Bounds) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._records = folder / "records.json"
        self._records.unlink(missing_ok=True)
        self._output, self._errors = folder / "output.txt", folder / "errors.txt"
        places = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("CACHE", "CONFIG", "STATE")}
        command = [sys.executable, str(ROOT / "infer.py"), *arguments, "--json", str(self._records)]
        self.seconds, self._started = 0.0, time.perf_counter()
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=errors, text=True, env=os.environ | places
            )
        self.watch = MemoryWatch(self._child.pid, bounds)

    def wait_for_prompt(self) -> None:
        """Wait until it answers lines. Raises RowStopped if it ends before."""
        self._send("/show")  # replies to most other commands are messages on standard error
        self._wait(lambda: self._output.stat().st_size > 0)
        self.seconds = time.perf_counter() - self._started

    def resident(self) -> int:
        """Bytes of memory that it holds now."""
        return resident(self._child.pid)

    def ask(self, prompt: str, *settings: str) -> dict[str, Any]:
        """The last record of a prompt. settings: commands to run before. Raises RowStopped if there is no record."""
        before = len(self._lines())
        for line in (*settings, prompt):
            self._send(line)
        self._wait(lambda: len(self._lines()) > before)
        return dict(json.loads(self._lines()[-1]))

    def close(self) -> None:
        """End it, as /quit or killed, and stop watching."""
        with suppress(RowStopped):
            self._send("/quit")
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=30)
        end_tree(self._child.pid)
        self._child.communicate()
        self.watch.close()

    def _send(self, line: str) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(line + "\n")
            self._child.stdin.flush()
        except BrokenPipeError as error:
            raise RowStopped(self._reason()) from error

    def _wait(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            if self._child.poll() is not None:
                raise RowStopped(self._reason())
            time.sleep(POLL_SECONDS)

    def _lines(self) -> list[str]:
        text = self._records.read_text(encoding="utf-8") if self._records.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    def _reason(self) -> str:
        status = self._child.wait()
        self.watch.close()
        last = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return self.watch.stopped or f"ended with status {status}: {' '.join(last)}"


def prompt_of(tokenizer: Any, count: int) -> tuple[str, list[int]]:
    """A text of about so many tokens, and exactly so many ids."""
    ids = list(tokenizer(PASSAGE.replace("\n", " ") + " ")["input_ids"])
    ids = (ids * (count // len(ids) + 1))[:count]
    return tokenizer.decode(ids, skip_special_tokens=True), ids


def run_program(arguments: Sequence[str], tokenizer: Any, folder: Path, bounds: Bounds) -> Figures:
    """Start the program twice with the same new cache folder, and run prompts after the second start."""
    figures = Figures()
    with _noted(figures), _started(arguments, folder, bounds, figures):
        pass
    if figures.note:
        return figures
    with _noted(figures), _started(arguments, folder, bounds, figures) as program:
        figures.resident = program.resident()
        program.ask(SHORT, "/chat off", "/length 8")  # with every strategy, so that the peak counts them
        text, _ = prompt_of(tokenizer, MEDIUM)
        record = program.ask(text, "/speculative off", "/ngram off", f"/length {NEW_TOKENS}")
        _add_run(figures, MEDIUM, record)
        _add_costs(figures, record)
        if _fits(figures, bounds):
            text, _ = prompt_of(tokenizer, LONG)
            _add_run(figures, LONG, program.ask(text, f"/length {NEW_TOKENS_LONG}"))
    return figures


@contextmanager
def _started(arguments: Sequence[str], folder: Path, bounds: Bounds, figures: Figures) -> Iterator[Program]:
    program = Program(arguments, folder, bounds)
    try:
        program.wait_for_prompt()
        figures.starts.append(program.seconds)
        yield program
    finally:
        program.close()
        figures.peak = max(figures.peak, program.watch.peak)
        figures.disk = sum(file.stat().st_size for file in (folder / "cache").rglob("*") if file.is_file())


@contextmanager
def _noted(figures: Figures) -> Iterator[None]:
    """Note why a row ended early."""
    try:
        yield
    except (RowStopped, PeerFailed) as error:
        figures.note = str(error)


def _add_run(figures: Figures, length: int, record: dict[str, Any]) -> None:
    """Add the times of a prompt, whose first tokens come from its prefill."""
    figures.prefill[length] = record["prompt_tokens"] / record["first_token_seconds"]
    if length == MEDIUM and record["new_tokens"] > 1:
        figures.step = (record["seconds"] - record["first_token_seconds"]) / (record["new_tokens"] - 1)


def _add_costs(figures: Figures, record: dict[str, Any]) -> None:
    """Add the costs of verify passes, in decode steps, and the engine."""
    costs = COST_TABLE.parse(record["settings"]["costs"], None, Limits())
    figures.verify = {width: 1 + costs.verify_cost(width - 1) for width in WIDTHS} if costs and costs.verify else {}
    engine = record["engine"]
    bits = "equal bits" if engine["verified"] else "bits not guaranteed"
    figures.note = f"{engine['kind']}, {_threads(engine['threads'])}, {bits}"


def run_peer(worker: Sequence[str], counts: Sequence[int], tokenizer: Any, bounds: Bounds) -> Figures:
    """Run prompts in `generate` or llama.cpp. worker: the arguments of worker.py. counts: numbers of threads to try.

    Its start includes one token.
    """
    figures, started = Figures(), time.perf_counter()
    peer = Peer([sys.executable, str(WORKER), *worker], "", dict(os.environ))
    watch = MemoryWatch(peer.pid, bounds)
    try:
        with _noted(figures):
            peer.threads = counts[-1]
            peer.run("plain", prompt_of(tokenizer, TRIAL_TOKENS)[1], 1)
            figures.starts, figures.resident = [time.perf_counter() - started], resident(peer.pid)
            peer.threads = _best_count(peer, counts, prompt_of(tokenizer, TRIAL_TOKENS)[1])
            _add_peer_run(figures, peer, prompt_of(tokenizer, MEDIUM)[1])
            if _fits(figures, bounds):
                _add_peer_run(figures, peer, prompt_of(tokenizer, LONG)[1])
            figures.note = _threads(peer.threads)
    finally:
        peer.close()
        watch.close()
    figures.note, figures.peak = watch.stopped or figures.note, watch.peak
    return figures


def _best_count(peer: Peer, counts: Sequence[int], ids: list[int]) -> int:
    """The number of threads with which a short text is decoded fastest."""
    rates = {}
    for count in reversed(counts):  # the largest number is in use already
        peer.threads = count
        rates[count] = peer.run("plain", ids, TRIAL_TOKENS).decode_rate or 0.0
    return max(rates, key=lambda count: rates[count])


def _fits(figures: Figures, bounds: Bounds) -> bool:
    """Whether the long prefill is expected to end in time."""
    return GROWTH * MEDIUM / figures.prefill[MEDIUM] < bounds.long_prefill


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _add_peer_run(figures: Figures, peer: Peer, ids: list[int]) -> None:
    run = peer.run("plain", ids, NEW_TOKENS if len(ids) == MEDIUM else NEW_TOKENS_LONG)
    record = {"prompt_tokens": len(ids), "new_tokens": run.count, "seconds": run.seconds}
    _add_run(figures, len(ids), record | {"first_token_seconds": run.first_seconds})
