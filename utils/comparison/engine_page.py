"""What /engine shows: a row of measurements for each engine, and why the one in use was chosen."""

from collections.abc import Iterator
from dataclasses import replace

from utils.engine import Engine
from utils.engine.engine_choice import COMPARED_WIDTHS, EngineFigures, expected_speed
from utils.text import byte_size

HEADINGS = ("engine", "step", *(f"v({width})" for width in COMPARED_WIDTHS), "prefill", "memory", "threads", "bits")
LEGEND = (
    "step: ms of a decode step; v(k): time of a verify pass of k tokens in steps; prefill: tokens/s of a long prompt; "
    "memory: what an engine needs for the weights; bits: whether a verify pass has those of decode steps. *: in use. "
    "~: estimated from a few layers."
)
MUCH_FASTER = 1.5  # if decode steps are this many times faster now, the choice of engine or threads may be outdated
BUSY = (
    "The engines were compared while this machine was busy (a decode step took {:.0f} ms, now {:.0f}): /engine test "
    "compares them again."
)
NOT_COMPARED = "The engines were not compared: /engine auto does that, or /engine test where auto is set already."
KEPT = "{} is used although {} is {:.0%} faster, because its bits are equal."
ELSEWHERE = "Target-only would be {:.2f}x as fast in the {} engine (estimate)."


def engine_rows(engine: Engine) -> list[tuple[str, ...]]:
    """The cells of each engine under HEADINGS."""
    table = engine.table
    rows = {name: table.get(name, EngineFigures()) for name in engine.names}
    used = engine.state.kind
    rows[used] = _present_figures(engine, rows[used])
    return [_cells(f"{name} *" if name == used else name, row) for name, row in rows.items()]


def engine_notes(engine: Engine) -> Iterator[str]:
    """Sentences below the table: what was expected, why engines were not chosen, and when that was measured."""
    table = engine.table
    yield LEGEND
    measured = {name: row for name, row in table.items() if row.is_candidate and row.step_seconds}
    if len(measured) > 1:
        speeds = {name: expected_speed(row, engine.workload) for name, row in measured.items()}
        shown = ", ".join(f"{name} {speeds[name]:.1f}" for name in sorted(speeds, key=lambda name: -speeds[name]))
        day = max(row.measured_on for row in measured.values())
        yield f"Measured on {day}. Expected tokens/s of the enabled strategies: {shown}."
        fastest, used = max(speeds, key=lambda name: speeds[name]), engine.state.kind
        if measured.get(used, EngineFigures()).verified and speeds[fastest] > speeds[used]:
            yield KEPT.format(used, fastest, speeds[fastest] / speeds[used] - 1)
    elif len(engine.candidates()) > 1:
        yield NOT_COMPARED
    yield from (f"{name}: {row.problem}." for name, row in _with_problems(engine).items())
    yield from busy_notes(engine)
    if other := engine.faster_baseline():
        yield ELSEWHERE.format(other.factor, other.name)


def busy_notes(engine: Engine) -> tuple[str, ...]:
    """A sentence if the machine was much slower during the comparison of the engines than it is now."""
    row, now = engine.table.get(engine.state.kind, EngineFigures()), engine.step_seconds
    if not now or row.step_seconds < MUCH_FASTER * now:
        return ()
    return (BUSY.format(1000 * row.step_seconds, 1000 * now),)


def _with_problems(engine: Engine) -> dict[str, EngineFigures]:
    """The engines that cannot be used or that failed."""
    rows = {name: engine.table.get(name) or EngineFigures(engine.problem(name)) for name in engine.names}
    return {name: row for name, row in rows.items() if row.problem}


def _present_figures(engine: Engine, row: EngineFigures) -> EngineFigures:
    """The figures of the engine in use, which were measured with whole models."""
    costs = tuple((width, 1 + engine.costs[width - 2]) for width in COMPARED_WIDTHS if width <= len(engine.costs) + 1)
    verified, threads = engine.state.verified, engine.state.threads
    measured = replace(row, verified=verified, threads=threads, nbytes=engine.nbytes())
    return replace(measured, step_seconds=engine.step_seconds, costs=costs, estimated=False) if costs else measured


def _cells(name: str, row: EngineFigures) -> tuple[str, ...]:
    costs = (row.cost(width) for width in COMPARED_WIDTHS)
    return (
        name,
        f"{'~' * row.estimated}{1000 * row.step_seconds:.1f}" if row.step_seconds else "-",
        *("-" if cost is None else f"{cost:.2f}" for cost in costs),
        f"{row.prefill:.0f}" if row.prefill else "-",
        byte_size(row.nbytes) if row.nbytes else "-",
        str(row.threads) if row.threads else "-",
        _bits(row),
    )


def _bits(row: EngineFigures) -> str:
    """What is known about the bits of verify passes: equal, not verified, or possibly different."""
    if row.verified:
        return "equal"
    if not row.step_seconds:
        return "-"
    return "not verified" if row.promise else "can differ"
