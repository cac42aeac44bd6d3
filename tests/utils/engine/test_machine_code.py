"""Machine code: jobs on several threads, threads that sleep and wake, and the exponential function."""

import ctypes
import time
from collections.abc import Callable
from functools import cache, partial
from threading import Event, Thread
from typing import Any

import pytest
import torch
from llvmlite import ir
from torch import Tensor

from utils.engine import machine_code
from utils.engine.machine_code import (
    FLOAT,
    INT,
    NATIVE_CALL,
    POINTER,
    WORKERS,
    Workers,
    compiled,
    item_function,
    job_list,
    words,
)

NEXT = {"source": POINTER, "target": POINTER, "size": INT, "rounds": INT}
LANES = 16
ULP = 2.0**-23


@cache
def next_function() -> int:
    """next(arguments, item): target[item] += source[(item + 1) % size] + 1, each 1 added in so many rounds."""
    module = ir.Module("next")
    code, own, item = item_function(module, "next", NEXT)
    other = code.urem(code.add(item, INT(1)), own["size"])
    value = code.load(code.at(own["source"], other, INT), typ=INT)
    before = code.load(code.at(own["target"], item, INT), typ=INT)
    # A loop that LLVM cannot shorten, so that items take a while.
    (waste,) = code.repeat(own["rounds"], [value], lambda index, sums: [code.xor(code.mul(sums[0], INT(3)), index)])
    odd = code.select(code.icmp_unsigned("==", waste, INT(-1)), INT(2), INT(1))
    code.store(code.add(before, code.add(value, odd)), code.at(own["target"], item, INT))
    code.ret_void()
    return compiled(module)("next")


def run_next(sizes: list[int], *, rounds: int = 1, workers: Workers = WORKERS) -> tuple[Tensor, Tensor]:
    """Jobs that each read what the one before has written. Returns both buffers, and what they should be."""
    buffers = torch.arange(2 * max(sizes)).view(2, -1)
    expected, jobs = buffers.clone(), []
    for index, size in enumerate(sizes):
        source, target = buffers[index % 2], buffers[1 - index % 2]
        jobs.append((next_function(), words(NEXT, source=source, target=target, size=size, rounds=rounds), size))
        expected[1 - index % 2, :size] += expected[index % 2, :size].roll(-1) + 1
    workers.run(*job_list(jobs))
    return buffers, expected


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_item_is_computed_once_and_after_the_job_before(threads: int) -> None:
    """Also with more threads than items, and than processors."""
    torch.set_num_threads(threads)
    for sizes in ([1], [2, 1, 3], [1, 1, 1], [37, 2, 37, 1, 37], [5] * 50):
        assert torch.equal(*run_next(sizes)), sizes


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(1e-4)


def test_threads_sleep_and_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "_SPINS", 1000)
    torch.set_num_threads(3)
    workers = Workers()
    for _ in range(3):
        assert torch.equal(*run_next([64] * 9, rounds=1000, workers=workers))
        until(lambda: workers._state[machine_code._SERVING] == 0)


def python_job(function: Callable[[], object]) -> tuple[int, Any, int]:
    """A job that the calling thread computes alone, in Python."""
    call = NATIVE_CALL(lambda *_: function())
    address = ctypes.cast(call, ctypes.c_void_p).value
    assert address is not None
    return address, call, 1


def test_threads_stay_until_the_last_job_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes, because nobody would wake them, and also if they wake before it begins."""
    monkeypatch.setattr(machine_code, "_SPINS", 1)
    torch.set_num_threads(2)
    workers = Workers()
    for _ in range(20):
        may_end = Event()
        job = python_job(partial(may_end.wait, 60))
        caller = Thread(target=workers.run, args=job_list([job]))
        caller.start()
        until(lambda: workers._state[machine_code._SERVING] == 1)
        time.sleep(1e-3)
        until(lambda: workers._state[machine_code._SERVING] == 1)
        may_end.set()
        caller.join()


def test_a_thread_that_stops_while_a_list_begins_takes_part() -> None:
    """Nobody has woken it, because it was still counted as awake."""
    torch.set_num_threads(2)
    workers = Workers()
    run_next([2], workers=workers)
    until(lambda: workers._state[machine_code._SERVING] == 0)
    times: list[int] = []
    may_stop = Event()

    def serve(*_: int) -> None:
        workers._state[machine_code._SERVING] = 1
        times.append(1)
        may_stop.wait(60)
        workers._state[machine_code._SERVING] = 0

    def stop() -> None:
        may_stop.set()
        until(lambda: len(times) > 1)

    workers._serve = serve
    run_next([2], workers=workers)
    until(lambda: len(times) == 1)
    job = python_job(stop)
    workers.run(*job_list([job]))
    assert len(times) > 1


def test_fewer_threads_can_follow_more() -> None:
    for threads in (3, 1, 2, 1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(*run_next([7, 50, 7], rounds=100))


def test_threads_that_are_not_used_any_more_stop_waiting_for_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would compute items of a later list, and fewer threads would be measured as fast as more."""
    monkeypatch.setattr(machine_code, "_SPINS", 2**40)
    workers = Workers()
    for threads in (3, 2, 3, 1):
        torch.set_num_threads(threads)
        assert torch.equal(*run_next([8, 9], workers=workers))
        until(lambda: workers._state[machine_code._SERVING] == threads - 1)  # noqa: B023


def test_two_python_threads_run_jobs_at_the_same_time() -> None:
    """Each waits for the other's list, whatever it asks of the workers."""
    torch.set_num_threads(2)
    wrong: list[Any] = []

    def repeat(sizes: list[int]) -> None:
        for _ in range(50):
            if not torch.equal(*run_next(sizes, rounds=50)):
                wrong.append(sizes)

    threads = [Thread(target=partial(repeat, sizes)) for sizes in ([3, 40, 1], [64, 2, 64, 5])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@cache
def exp_function() -> int:
    """exp(arguments, item): of LANES floats as a vector, and of the same ones alone."""
    module = ir.Module("exp")
    code, own, item = item_function(module, "exp", {"x": POINTER, "out": POINTER, "alone": POINTER})
    place = code.mul(item, INT(LANES))
    x = code.load(code.at(own["x"], place), typ=ir.VectorType(FLOAT, LANES), align=4)
    code.store(code.exp(x), code.at(own["out"], place), align=4)

    def one(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        value = code.load(code.at(own["x"], code.add(place, index)), typ=FLOAT, align=4)
        code.store(code.exp(value), code.at(own["alone"], code.add(place, index)), align=4)
        return []

    code.repeat(INT(LANES), [], one)
    code.ret_void()
    return compiled(module)("exp")


def computed_exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """As vectors, and one by one."""
    out, alone = torch.empty(2, len(x))
    arguments = words({"x": POINTER, "out": POINTER, "alone": POINTER}, x=x, out=out, alone=alone)
    WORKERS.run(*job_list([(exp_function(), arguments, len(x) // LANES)]))
    return out, alone


def test_exp_over_its_whole_range() -> None:
    """Within two units in the last place, and nothing infinite beyond."""
    ends = torch.tensor([-float("inf"), -1e30, -88.0, -87.0, -1e-30, 0.0, 1e-30, 88.0, 89.0, 1e30, float("inf")])
    x = torch.cat([ends, torch.linspace(-87, 88, 20_000), torch.linspace(-1, 1, 4981)])
    out, alone = computed_exp(x)
    exact = x.double().clamp(-87, 88).exp()
    assert float(((out - exact) / exact).abs().max()) <= 2 * ULP and torch.equal(out, alone)
    assert all(part.isnan().all() for part in computed_exp(torch.full((LANES,), float("nan"))))
