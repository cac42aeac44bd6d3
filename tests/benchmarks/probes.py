"""Single figures: cost of a window, share of time inside forwards, cost per token as the context grows, storage, start-up, memory."""

import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from arms import Arm

from ngram_assisted import NGramStorage
from utils.bounds import LOADED
from utils.comparison.job import Job
from utils.comparison.strategies import STRATEGIES
from utils.config.settings import Settings
from utils.config.value_types import ProcessorType
from utils.decode.model_session import ModelSession
from utils.engine.forward_timing import sample_ids
from utils.logits_processor import GreedyProcessor, MultinomialProcessor
from utils.metrics.results import collect

ROOT = Path(__file__).parent.parent.parent
WIDTHS = (1, 2, 3, 5, 9, 17)
CONTEXTS = (100, 500, 1000, 2000, 4000)
CACHED = 200  # tokens before a window
PLACES = 4  # of a round
STORED, CHUNK = 1_000_000, 200_000  # tokens


def windows(models: dict[str, tuple[Any, int]], repeats: int = 7) -> dict[str, dict[int, float]]:
    """Milliseconds of a forward by width behind CACHED tokens, for each (model, threads); the models in turns."""
    ids = sample_ids(CACHED + WIDTHS[-1], next(iter(models.values()))[0].config.vocab_size)
    sessions = {name: ModelSession(model) for name, (model, _) in models.items()}
    seconds: dict[str, dict[int, list[float]]] = {name: {width: [] for width in WIDTHS} for name in models}
    for repeat in range(repeats + 1):
        for name, session in sessions.items():
            torch.set_num_threads(models[name][1])
            if not repeat:
                session.feed(ids[:CACHED], keep=1)
            for width in (1, *WIDTHS):  # the first after a change wakes the threads
                began = time.perf_counter()
                session.feed(ids[: CACHED + width], keep=width)
                if repeat:
                    seconds[name][width].append(time.perf_counter() - began)
                session.rewind(CACHED)
    return {
        name: {width: 1000 * median(found[-repeats:]) for width, found in by.items()} for name, by in seconds.items()
    }


def acceptance(pair: Any, rows: list[tuple[str, list[int]]], length: int) -> dict[str, dict[str, list[list[int]]]]:
    """By processor and task: (accepted, tried) of the loaded drafter by a draft's place in its round, PLACES drafts in each."""
    found: dict[str, dict[str, list[list[int]]]] = {}
    speculative = next(row for row in STRATEGIES if row.kinds).variants((LOADED,), pair)[0]
    for processor in (GreedyProcessor(), MultinomialProcessor(1.0)):
        settings = Settings(gamma=PLACES, length=length, processor=processor)
        by_task = found.setdefault(ProcessorType().show(processor), {})
        for task, ids in rows:
            made = collect(speculative.steps(Job(ids, pair, settings, None)))
            for name in (task, "all"):
                counts = by_task.setdefault(name, [[0, 0] for _ in range(PLACES)])
                for count, (good, tried) in zip(counts, made.accepted_by_position, strict=False):
                    count[0] += good
                    count[1] += tried
        by_task["all"] = by_task.pop("all")
    return found


@contextmanager
def _timed(models: list[Any]) -> Iterator[list[float]]:
    """Seconds spent inside the forwards of these models."""
    spent, began = [0.0], [0.0]

    def before(module: Any, inputs: Any) -> None:
        began.append(time.perf_counter())

    def after(module: Any, inputs: Any, output: Any) -> None:
        spent[0] += time.perf_counter() - began.pop()

    hooks = [model.register_forward_pre_hook(before) for model in models] + [
        model.register_forward_hook(after) for model in models
    ]
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


def inside_forwards(arms: list[Arm], models: list[Any], prompts: list[list[int]], length: int) -> dict[str, float]:
    """The share of each arm's seconds that the models' forwards take."""
    shares = {}
    for arm in arms:
        with _timed(models) as spent:
            whole = sum(arm.run(ids, length).seconds for ids in prompts)
        shares[arm.name] = spent[0] / whole
    return shares


def by_context(model: Any, threads: int) -> dict[int, float]:
    """Milliseconds per token, one by one, behind so many tokens."""
    torch.set_num_threads(threads)
    session, found = ModelSession(model, rewinds=False), {}
    ids = sample_ids(CONTEXTS[-1] + 16, model.config.vocab_size)
    for length in CONTEXTS:
        session.feed(ids[:length], keep=1)
        times = []
        for step in range(1, 10):
            began = time.perf_counter()
            session.feed(ids[: length + step], keep=1)
            times.append(time.perf_counter() - began)
        found[length] = 1000 * median(times)
    return found


def storage() -> dict[str, float]:
    """A million tokens into an n-gram storage: seconds, the last fifth against the first, microseconds per lookup, bytes."""
    source = random.Random(0)
    ids = [
        min(49151, int(49152 ** source.random())) for _ in range(STORED)
    ]  # few tokens often, most seldom, as in text
    held, times = NGramStorage(3, 49152, limit=10_000_000), []
    for begin in range(0, STORED, CHUNK):
        began = time.perf_counter()
        held.initialize(ids[begin : begin + CHUNK])
        times.append(time.perf_counter() - began)
    asked = [ids[index : index + 2] for index in range(0, STORED, 11)]
    began = time.perf_counter()
    for context in asked:
        held.next_token(context)
    lookup = (time.perf_counter() - began) / len(asked)
    tracemalloc.start()
    small = NGramStorage(3, 49152)
    small.initialize(ids[:CHUNK])
    held_bytes = tracemalloc.get_traced_memory()[0] / len(small)
    tracemalloc.stop()
    return {
        "bytes_per_gram": held_bytes,
        "seconds": sum(times),
        "last_over_first": times[-1] / times[0],
        "lookup_us": 1e6 * lookup,
        "grams": float(len(held)),
    }


def program(*arguments: str) -> dict[str, float]:
    """Seconds from the program's start to its first answer; on Linux also the memory in MB that it then holds, and held at most."""
    command = [sys.executable, str(ROOT / "infer.py"), *arguments, "-c", "/show"]
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    child.stdout.readline()
    found = {"seconds": time.perf_counter() - began}
    with suppress(OSError):
        lines = (line.split() for line in Path(f"/proc/{child.pid}/status").read_text().splitlines())
        held = {words[0]: float(words[1]) / 1e3 for words in lines if words[0] in ("VmHWM:", "VmRSS:")}
        found |= {"peak_mb": held["VmHWM:"], "resident_mb": held["VmRSS:"]}
    child.communicate()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return found
