"""Single figures: verify passes, memory bandwidth, long prompts, perplexity, and the memory of the program."""

import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from arms import Arm

from utils.decode.engine_forward import engine_forward
from utils.decode.model_info import sample_ids
from utils.decode.model_session import ModelSession
from utils.engine.lean_decoder import LeanDecoder
from utils.engine.module_swap import EngineLinear
from utils.pairs.pair import Pair

ROOT = Path(__file__).parent.parent.parent
WIDTHS = (1, 2, 5, 9, 17)
CACHED = 200  # tokens before a verify pass
VERIFY_ROUNDS = 9
PRODUCT_ROUNDS = 25
READS = 7
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
LONG_PROMPTS = {500: 3, 2000: 2, 6000: 1}  # number of tokens: rounds
LONG_TOKENS = 16  # new tokens after a long prompt
PASSAGE = """The lighthouse at Skerry Point was built in 1868, after two ships were lost on the reef in a single winter.
Its tower is thirty metres high and was cut from grey granite, which was carried across the bay in small boats whenever
the weather allowed it. The first keeper, a retired sailor named Thomas Reid, lived there with his wife and four
children. Every evening he climbed the hundred and forty steps, trimmed the wick, and wound up the clockwork that
turned the lens. In fog he also rang the bell, once every thirty seconds, sometimes for two days and nights without a
break. His daughter kept a diary, from which we know how the family lived: supplies came once a month, the well ran dry
in most summers, and lessons were held at the kitchen table. When electricity reached the coast in 1931, the lamp was
replaced, and a motor took over the work of the clockwork. Forty years later the station became automatic, and the last
keeper locked the door and rowed home. Today a small society looks after the building. Visitors may climb the tower on
Sundays between May and September, and from the gallery they can see seals on the rocks, the ruins of the old pier, and
on clear days the mountains on the other side of the water."""


def verify_seconds(
    models: dict[str, tuple[Any, int]], rounds: int = VERIFY_ROUNDS
) -> dict[str, dict[int, list[float]]]:
    """Seconds of each forward pass by width after CACHED tokens, for each (model, threads), measured in turns."""
    ids = sample_ids(CACHED + WIDTHS[-1], next(iter(models.values()))[0].config.vocab_size)
    sessions = {name: ModelSession(model) for name, (model, _) in models.items()}
    seconds: dict[str, dict[int, list[float]]] = {name: {width: [] for width in WIDTHS} for name in models}
    for repeat in range(rounds + 1):
        for name, session in sessions.items():
            torch.set_num_threads(models[name][1])
            if not repeat:
                session.feed(ids[:CACHED], keep=1)
            for width in (0, *WIDTHS):  # 0: the first pass after a change of models wakes the threads
                started = time.perf_counter()
                session.feed(ids[: CACHED + max(width, 1)], keep=max(width, 1))
                if repeat and width:
                    seconds[name][width].append(time.perf_counter() - started)
                session.rewind(CACHED)
    return seconds


@torch.no_grad()
def run_products(model: Any) -> None:
    """Compute the products of one decode step alone."""
    for kernel in dict.fromkeys(part.kernel for part in model.modules() if isinstance(part, EngineLinear)):
        kernel(torch.zeros(1, kernel.inputs))


@torch.no_grad()
def step_over_products(model: Any, threads: int, rounds: int = PRODUCT_ROUNDS) -> dict[str, list[float]] | None:
    """Seconds of decode steps after CACHED tokens, and of their matrix products alone by the same kernels, in turns.

    None if the model has no lean forward, whose products can be computed alone.
    """
    forward = engine_forward(model)
    if not isinstance(forward, LeanDecoder):
        return None
    torch.set_num_threads(threads)
    ids, session = sample_ids(CACHED + 1, model.config.vocab_size), ModelSession(model)
    session.feed(ids[:CACHED], keep=1)
    seconds: dict[str, list[float]] = {"step": [], "products": []}
    passes: dict[str, Callable[[], Any]] = {
        "step": lambda: session.feed(ids, keep=1),
        "products": lambda: run_products(model),
    }
    for repeat in range(rounds + 1):
        for name, run in passes.items():
            started = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - started)
        session.rewind(CACHED)
    return seconds


def read_seconds(size: int, threads: int) -> float:
    """Seconds to read `size` bytes of memory with so many threads: the best of several reads, by several kernels."""
    torch.set_num_threads(threads)
    block = torch.ones(max(1, size // 4))
    kernels: tuple[Callable[[], Any], ...] = (block.sum, lambda: torch.dot(block, block))
    best = math.inf
    for _ in range(READS):
        for kernel in kernels:
            started = time.perf_counter()
            kernel()
            best = min(best, time.perf_counter() - started)
    return best


def long_prompts(arms: Sequence[Arm], text: list[int], lengths: dict[int, int]) -> dict[int, dict[str, list[Any]]]:
    """Time to first token and seconds per decoded token of each arm after long prompts, measured in turns.

    text: repeated until it is long enough, so that answers continue it. lengths: number of prompt tokens: rounds.
    """
    result: dict[int, dict[str, list[Any]]] = {}
    for length, rounds in lengths.items():
        ids = (text * (length // len(text) + 1))[:length]
        result[length] = {arm.name: [] for arm in arms}
        for turn in range(rounds):
            for index in range(len(arms)):
                arm = arms[(index + turn) % len(arms)]
                run = arm.run(ids, LONG_TOKENS)
                step = 1 / run.decode_rate if run.decode_rate else None
                result[length][arm.name].append({"first_seconds": run.first_seconds, "step_seconds": step})
    return result


@torch.no_grad()
def perplexity(model: Any, ids: list[int]) -> float:
    """The perplexity of a text, whose first token is given."""
    logits = ModelSession(model, rewinds=False).feed(ids[:-1], keep=len(ids) - 1)
    loss = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(ids[1:]))
    return math.exp(float(loss))


def bytes_per_step(pair: Pair, plain: Any) -> int:
    """Bytes of weights that one forward pass of the target reads. plain: the same target in its plain engine.

    Every linear weight is read once, the output head included. Formats with scales are counted as they are held, with
    those of a draft head.
    """
    linears = (module.weight for module in plain.modules() if isinstance(module, torch.nn.Linear))
    count = sum({weight.data_ptr(): weight.numel() for weight in linears}.values())
    if size := ITEM_BYTES.get(pair.engine.state.weights):
        return count * size
    table = plain.get_input_embeddings().weight  # its rows are looked up
    return min(4 * count, pair.engine.nbytes() - table.nbytes)


def program(*arguments: str) -> dict[str, float]:
    """Seconds from the program's start to its first answer and, on Linux, its memory in bytes then and at its peak."""
    command = [sys.executable, str(ROOT / "infer.py"), *arguments, "-c", "/show"]
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    child.stdout.readline()
    result = {"seconds": time.perf_counter() - started}
    result |= memory_of(child.pid)
    child.communicate()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} exited with status {child.returncode}")
    return result


def memory_of(process: int) -> dict[str, float]:
    """Bytes of memory of a process at its peak and now, on Linux. Empty if they are not known."""
    names = {"VmHWM:": "peak", "VmRSS:": "resident"}
    with suppress(OSError):
        lines = (line.split() for line in Path(f"/proc/{process}/status").read_text().splitlines())
        return {names[words[0]]: 1024 * float(words[1]) for words in lines if words[0] in names}
    return {}
