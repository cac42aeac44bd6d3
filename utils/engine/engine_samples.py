"""From measured times of forward passes to the figures of an engine. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from utils.engine.engine_choice import Workload, expected_speed
from utils.engine.engine_figures import EngineFigures

Samples = Mapping[int, Sequence[float]]  # seconds of forward passes by width


def typical(seconds: Sequence[float]) -> float:
    """Return the lower quartile: other load on the machine makes passes longer, and one lucky pass says little."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def with_samples(figures: EngineFigures, samples: Samples) -> EngineFigures:
    """Return the figures with the decode step and the verify costs of these samples, which include width 1."""
    seconds = {width: typical(times) for width, times in samples.items()}
    step = seconds[1]
    # Noise can make a wider pass look faster than a decode step, but a verify pass cannot save time.
    costs = tuple((width, max(1.0, seconds[width] / step)) for width in sorted(seconds) if width > 1 and step)
    return replace(figures, step_seconds=step, costs=costs)


def speed_ratio(figures: Mapping[str, EngineFigures], samples: Mapping[str, Samples], workload: Workload) -> float:
    """Return the expected speed of the fastest engine in units of that of the slowest one, with these samples."""
    speeds = [expected_speed(with_samples(figures[name], samples[name]), workload) for name in samples]
    return max(speeds) / min(speeds) if min(speeds) else inf
