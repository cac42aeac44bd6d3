"""Figures of known steps, rates without a denominator, and a clock that runs only inside the decoder."""

from collections.abc import Iterator

from fake_clock import FakeClock

from utils.decode.steps import FinishReason, Step
from utils.metrics.results import Generation, RoundTiming, collect, first_difference

STEPS = (
    Step((1, 2, 3), 3, 4),
    Step((5, 6, 7), 1, 8),
    Step((), 0, 9),
    Step((10, 11), 0, 12),
    Step((13, 14), 2, None, FinishReason.STOP),
)


def test_figures_of_known_steps() -> None:
    run = Generation(STEPS, 2.0, 0.5, FinishReason.STOP)
    assert run.tokens == [1, 2, 3, 4, 5, 8, 9, 12, 13, 14]
    assert (run.drafted, run.accepted, run.acceptance_rate) == (10, 6, 0.6)
    assert (run.target_forwards, run.decode_tokens_per_second) == (5, 4.0)
    assert run.declined_rounds == 1
    assert run.accepted_by_position == [(3, 4), (2, 3), (1, 1)]
    assert [step.is_bonus for step in STEPS] == [True, False, True, False, False]


def test_rates_without_a_denominator_are_none() -> None:
    run = Generation((), 0.0, None, FinishReason.LENGTH)
    assert run.decode_tokens_per_second is run.acceptance_rate is None
    assert run.accepted_by_position == []


def test_the_clock_runs_only_inside_the_decoder() -> None:
    clock = FakeClock()

    def decoder() -> Iterator[Step]:
        for step in STEPS:
            clock.now += 1.0
            yield step
        clock.now += 0.25

    def watch(step: Step, timing: RoundTiming, traces: object) -> None:
        clock.now += 100.0

    run = collect(decoder(), watch, clock)
    assert run == Generation(STEPS, 5.25, 1.0, FinishReason.STOP, (RoundTiming(0, 0, 1.0),) * 5)


def test_an_interrupted_run_keeps_its_steps_and_time() -> None:
    clock = FakeClock()

    def decoder() -> Iterator[Step]:
        clock.now += 1.0
        yield STEPS[0]
        clock.now += 0.5
        raise KeyboardInterrupt

    run = collect(decoder(), clock=clock)
    assert run == Generation(STEPS[:1], 1.5, 1.0, FinishReason.INTERRUPTED, (RoundTiming(0, 0, 1.0),))

    def watch(step: Step, timing: RoundTiming, traces: object) -> None:
        raise KeyboardInterrupt

    assert collect(iter(STEPS), watch, FakeClock()).steps == STEPS[:1]


def generation(tokens: list[int], seconds: float, finish: FinishReason = FinishReason.LENGTH) -> Generation:
    return Generation(tuple(Step((), 0, token) for token in tokens), seconds, seconds, finish)


def test_first_difference() -> None:
    assert first_difference([], []) is None
    assert first_difference([1], []) == 0
    assert first_difference([1, 2], [1, 2, 3]) == 2
