"""The time of a run by activity, measured from outside: every second is counted where it was spent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_clock import FakeClock
from fakes import open_session, screen, table_pair
from tiny import tiny_llama

from sampling import speculative_steps
from utils.decode.decoding import Decoding
from utils.decode.drafts import Draft, Verified
from utils.decode.model_session import ModelSession
from utils.logits_processor import GreedyProcessor
from utils.metrics.results import RoundTiming, Stopwatch, TimedDrafter, TimedSession, collect
from utils.repl.repl_session import Verdict

CLOCK = FakeClock()


class SlowDrafter:
    """Takes 1 s to begin, 2 s per draft and 0.25 s after a round."""

    def begin(self, prompt: list[int], context: list[int]) -> None:
        CLOCK.now += 1

    def propose(self, context: list[int], count: int) -> Draft:
        CLOCK.now += 2 * count
        return Draft([1] * count)

    def commit(self, context: list[int], verified: Verified) -> None:
        CLOCK.now += 0.25


class SlowSession(ModelSession):
    """Takes 10 s per forward pass."""

    def feed(self, context: list[int], keep: int) -> torch.Tensor:
        CLOCK.now += 10
        return super().feed(context, keep)


class SlowProcessor(GreedyProcessor):
    """Takes half a second."""

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        CLOCK.now += 0.5
        return super().__call__(logits)


def test_each_second_is_counted_where_it_was_spent() -> None:
    watch = Stopwatch(CLOCK)
    decoding = Decoding.of(SlowProcessor(), 3, end_ids=None, seed=1)
    drafter, target = TimedDrafter(SlowDrafter(), watch), TimedSession(SlowSession(tiny_llama()), watch)
    run = collect(speculative_steps([5, 6, 7], drafter, target, decoding, gamma=2), clock=CLOCK, stopwatch=watch)
    assert (
        run.timings[0] == RoundTiming(1 + 2 * 2 + 0.25, 10, 1 + 2 * 2 + 0.25 + 10 + 0.5, drafts=2)
        and run.timings[0].other == 0.5
    )
    assert sum(timing.total for timing in run.timings) == run.seconds and len(run.timings) == len(run.steps)
    assert all(
        timing.drafting == 2 * len(step.drafted) + 0.25
        for step, timing in list(zip(run.steps, run.timings, strict=True))[1:]
    )


def test_a_failed_forward_pass_is_counted() -> None:
    watch = Stopwatch(CLOCK)
    target = TimedSession(SlowSession(tiny_llama()), watch)
    with pytest.raises(RuntimeError):
        target.feed([], 1)
    assert watch.read(10) == RoundTiming(0, 10, 10) and watch.read(0) == RoundTiming(0, 0, 0)


def test_runs_and_the_debug_screen_have_the_time_of_every_activity() -> None:
    view, pair = screen(), table_pair()
    session = open_session(view, pair)
    for line in ("/length 8", "/debug on", "Hello"):
        assert session.handle(line) is Verdict.DONE
    last: Any = session.harness.state.last
    for strategy, run, _ in last.local:
        assert len(run.timings) == len(run.steps)
        timed = [timing.verifying for timing in run.timings]
        assert all(timed) if strategy.drafts else not any(timed)
    lines = view.take()[0].splitlines()
    # Rounds without drafts may share a line.
    rounds = [int(line.rsplit("+", 1)[1]) for line in lines if " | verify " in line]
    assert sum(rounds) == sum(len(run.tokens) for row, run, _ in last.local if row.drafts)
