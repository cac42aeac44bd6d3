"""Single figures: acceptance, verify widths, forward passes, long contexts, n-gram storage, start-up and memory."""

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
from utils.comparison.harness import Harness
from utils.comparison.strategies import STRATEGIES
from utils.config.processor_value_type import ProcessorType
from utils.config.settings import Settings
from utils.decode.model_session import ModelSession
from utils.engine.forward_timing import sample_ids
from utils.logits_processor import GreedyProcessor, MultinomialProcessor
from utils.metrics.results import collect
from utils.pairs.pair import Pair
from utils.pairs.request import LOADED

ROOT = Path(__file__).parent.parent.parent
WIDTHS = (1, 2, 3, 5, 9, 17)
CONTEXTS = (100, 500, 1000, 2000, 4000)
CACHED = 200  # tokens before a verify pass
POSITIONS = 4  # drafts per round
VOCABULARY = 49152
STORED, CHUNK = 1_000_000, 200_000  # tokens

Rows = list[tuple[str, list[int]]]  # (task, prompt ids)


def verify_ms(models: dict[str, tuple[Any, int]], repeats: int = 7) -> dict[str, dict[int, float]]:
    """Milliseconds of a forward pass by width after CACHED tokens, for each (model, threads), measured in turns."""
    ids = sample_ids(CACHED + WIDTHS[-1], next(iter(models.values()))[0].config.vocab_size)
    sessions = {name: ModelSession(model) for name, (model, _) in models.items()}
    seconds: dict[str, dict[int, list[float]]] = {name: {width: [] for width in WIDTHS} for name in models}
    for repeat in range(repeats + 1):
        for name, session in sessions.items():
            torch.set_num_threads(models[name][1])
            if not repeat:
                session.feed(ids[:CACHED], keep=1)
            for width in (1, *WIDTHS):  # the first pass after a change of models wakes the threads
                started = time.perf_counter()
                session.feed(ids[: CACHED + width], keep=width)
                if repeat:
                    seconds[name][width].append(time.perf_counter() - started)
                session.rewind(CACHED)
    return {
        name: {width: 1000 * median(times[-repeats:]) for width, times in by.items()} for name, by in seconds.items()
    }


def acceptance(pair: Pair, rows: Rows, length: int) -> dict[str, dict[str, list[list[int]]]]:
    """(accepted, counted) drafts of the loaded drafter by processor, task and position, POSITIONS drafts per round."""
    result: dict[str, dict[str, list[list[int]]]] = {}
    strategy = next(strategy for strategy in STRATEGIES if strategy.chooses_kind)
    speculative = strategy.variants((LOADED,), pair)[0]
    for processor in (GreedyProcessor(), MultinomialProcessor(1.0)):
        settings = Settings(gamma=POSITIONS, length=length, processor=processor)
        harness = Harness.of(pair, settings)
        by_task = result.setdefault(ProcessorType().show(processor), {})
        for task, ids in rows:
            run = collect(speculative.steps(harness.job(ids, settings)))
            for name in (task, "all"):
                counts = by_task.setdefault(name, [[0, 0] for _ in range(POSITIONS)])
                for count, (accepted, counted) in zip(counts, run.accepted_by_position, strict=False):
                    count[0] += accepted
                    count[1] += counted
        by_task["all"] = by_task.pop("all")  # last
    return result


@contextmanager
def _timed(models: list[Any]) -> Iterator[list[float]]:
    """Yields a list whose only item is the seconds spent inside the forward passes of these models."""
    spent, starts = [0.0], [0.0]

    def before(module: Any, inputs: Any) -> None:
        starts.append(time.perf_counter())

    def after(module: Any, inputs: Any, output: Any) -> None:
        spent[0] += time.perf_counter() - starts.pop()

    hooks = [model.register_forward_pre_hook(before) for model in models]
    hooks += [model.register_forward_hook(after) for model in models]
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


def inside_forwards(arms: list[Arm], models: list[Any], prompts: list[list[int]], length: int) -> dict[str, float]:
    """The share of each arm's time that is spent inside the models' forward passes."""
    shares = {}
    for arm in arms:
        with _timed(models) as spent:
            total = sum(arm.run(ids, length).seconds for ids in prompts)
        shares[arm.name] = spent[0] / total
    return shares


def by_context(model: Any, threads: int) -> dict[int, float]:
    """Milliseconds of a decode step by the number of tokens before it."""
    torch.set_num_threads(threads)
    session, result = ModelSession(model, rewinds=False), {}
    ids = sample_ids(CONTEXTS[-1] + 16, model.config.vocab_size)
    for length in CONTEXTS:
        session.feed(ids[:length], keep=1)
        times = []
        for step in range(1, 10):
            started = time.perf_counter()
            session.feed(ids[: length + step], keep=1)
            times.append(time.perf_counter() - started)
        result[length] = 1000 * median(times)
    return result


def storage() -> dict[str, float]:
    """A million tokens in an n-gram storage: seconds, last fifth over first, time of a lookup, bytes per n-gram."""
    rng = random.Random(0)
    # Log-uniform ids: few tokens are frequent and most are rare, as in text.
    ids = [min(VOCABULARY - 1, int(VOCABULARY ** rng.random())) for _ in range(STORED)]
    large, times = NGramStorage(3, VOCABULARY, limit=10_000_000), []
    for begin in range(0, STORED, CHUNK):
        started = time.perf_counter()
        large.initialize(ids[begin : begin + CHUNK])
        times.append(time.perf_counter() - started)
    contexts = [ids[index : index + 2] for index in range(0, STORED, 11)]
    started = time.perf_counter()
    for context in contexts:
        large.next_token(context)
    lookup = (time.perf_counter() - started) / len(contexts)
    tracemalloc.start()
    small = NGramStorage(3, VOCABULARY)
    small.initialize(ids[:CHUNK])
    bytes_per_gram = tracemalloc.get_traced_memory()[0] / len(small)
    tracemalloc.stop()
    return {
        "bytes_per_gram": bytes_per_gram,
        "seconds": sum(times),
        "last_over_first": times[-1] / times[0],
        "lookup_us": 1e6 * lookup,
        "grams": float(len(large)),
    }


def program(*arguments: str) -> dict[str, float]:
    """Seconds from the program's start to its first answer and, on Linux, its memory in MB then and at its peak."""
    command = [sys.executable, str(ROOT / "infer.py"), *arguments, "-c", "/show"]
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    child.stdout.readline()
    result = {"seconds": time.perf_counter() - started}
    with suppress(OSError):
        lines = (line.split() for line in Path(f"/proc/{child.pid}/status").read_text().splitlines())
        memory = {words[0]: float(words[1]) / 1e3 for words in lines if words[0] in ("VmHWM:", "VmRSS:")}
        result |= {"peak_mb": memory["VmHWM:"], "resident_mb": memory["VmRSS:"]}
    child.communicate()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} exited with status {child.returncode}")
    return result
