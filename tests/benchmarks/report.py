"""What the benchmark shows: ratios between arms, single figures and bars, and the row for the table of machines."""

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from arms import NGRAM, PLAIN, SPECULATIVE, TARGET
from bars import Bar, Texts, ratio
from peers import ASSISTANT, GENERATE, LLAMA, LLAMA_LOOKUP, LOOKUP

from utils.metrics.intervals import Interval
from utils.screen.renderer import Renderer

# Rows of the table of ratios: label, our arm, peer.
PAIRS = (
    ("plain", TARGET, GENERATE),
    ("n-gram / prompt lookup", NGRAM, LOOKUP),
    ("drafter / assistant", SPECULATIVE, ASSISTANT),
    ("n-gram / own plain", NGRAM, TARGET),
    ("drafter / own plain", SPECULATIVE, TARGET),
    ("plain / plain engine", TARGET, TARGET + PLAIN),
    ("n-gram / plain engine", NGRAM, NGRAM + PLAIN),
    ("drafter / plain engine", SPECULATIVE, SPECULATIVE + PLAIN),
    ("plain / llama.cpp", TARGET, LLAMA),
    ("n-gram / llama.cpp", NGRAM, LLAMA_LOOKUP),
    ("drafter / llama.cpp", SPECULATIVE, LLAMA),
)
MACHINES = Path(__file__).parent / "README.md"  # its last lines are the table of machines


def ratios(texts: Texts) -> dict[str, dict[str, Any]]:
    """Ratios by pair of arms: over all prompts, and by task. Pairs without common prompts are left out."""
    tasks = list(dict.fromkeys(text["task"] for text in texts))
    result: dict[str, dict[str, Any]] = {}
    for label, ours, peer in PAIRS:
        if decode := ratio(texts, ours, peer):
            by_task = {task: ratio(texts, ours, peer, task=task) for task in tasks}
            result[label] = {
                "prompts": sum({ours, peer} <= set(text["arms"]) for text in texts),
                "decode": decode,
                "whole": ratio(texts, ours, peer, "whole"),
                "tasks": {task: each.estimate for task, each in by_task.items() if each},
            }
    return result


def interval(value: Interval | None) -> str:
    """An estimate and its interval, if it has one."""
    if value is None:
        return "-"
    return f"{value.estimate:.2f}" + (f" ({value.low:.2f} to {value.high:.2f})" if value.is_bounded else "")


def show(screen: Renderer, result: dict[str, Any], rows: list[Bar]) -> None:
    """Everything that was measured, and the bars last."""
    if found := result.get("ratios"):
        _show_ratios(screen, found)
    if verify := result.get("verify_seconds"):
        _show_verify(screen, verify)
    if long_prompts := result.get("long_prompts"):
        _show_long(screen, long_prompts)
    screen.rows(list(_single_figures(result)))
    screen.table(
        ("bar", "bound", "measured (95 % interval)", "verdict"),
        [(bar.name, bar.figures()["bound"], interval(bar.ratio), bar.verdict) for bar in rows],
    )


def _show_ratios(screen: Renderer, found: dict[str, dict[str, Any]]) -> None:
    screen.table(
        ("ours / peer", "prompts", "decode (95 % interval)", "whole run"),
        [(name, str(row["prompts"]), interval(row["decode"]), interval(row["whole"])) for name, row in found.items()],
    )
    tasks = list(dict.fromkeys(task for row in found.values() for task in row["tasks"]))
    screen.table(
        ("decode by task", *tasks),
        [(name, *(_number(row["tasks"].get(task)) for task in tasks)) for name, row in found.items()],
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _show_verify(screen: Renderer, verify: dict[str, dict[int, list[float]]]) -> None:
    steps = {name: median(by_width[1]) for name, by_width in verify.items()}
    screen.table(
        ("verify width, ms (of width 1)", *map(str, next(iter(verify.values())))),
        [
            (name, *(f"{1000 * median(times):.1f} ({median(times) / steps[name]:.2f})" for times in by_width.values()))
            for name, by_width in verify.items()
        ],
    )


def _show_long(screen: Renderer, found: dict[int, dict[str, list[dict[str, float]]]]) -> None:
    cells = (
        (length, name, [turn["first_seconds"] for turn in turns], [turn["step_seconds"] for turn in turns])
        for length, arms in found.items()
        for name, turns in arms.items()
    )
    screen.table(
        ("prompt tokens", "arm", "first token, s", "decode step, ms"),
        [
            (str(length), name, f"{median(first):.2f}", f"{1000 * median(steps):.1f}" if all(steps) else "-")
            for length, name, first, steps in cells
        ],
    )


def _single_figures(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if other := result["setting"]["engines"]["faster_baseline"]:
        factor = other["factor"]
        yield "baseline", f"the target alone is {factor:.2f} times as fast in the engine {other['name']}"
    if peak := result.get("roofline"):
        rate = peak["bytes"] / peak["read_seconds"] / 1e9
        yield (
            "roofline",
            f"a step reads {peak['bytes'] / 1e6:.0f} MB; memory needs {1000 * peak['read_seconds']:.1f} ms for that "
            f"({rate:.1f} GB/s), a step {1000 * peak['step_seconds']:.1f} ms: {peak['share']:.0%} of peak",
        )
    if found := result.get("perplexity"):
        yield "perplexity", ", ".join(f"{name} {value:.2f}" for name, value in found.items())
    for name in ("first_start", "program"):
        if program := result.get(name):
            memory = f", {program['resident'] / 1e6:.0f} MB resident" if "resident" in program else ""
            yield name.replace("_", " "), f"{program['seconds']:.1f} s to its first answer{memory}"
    yield "weights", f"{result['setting']['weight_bytes'] / 1e6:.0f} MB as held"


def append(result: dict[str, Any], rows: list[Bar]) -> None:
    """Append this run to the table of machines, which ends the file."""
    setting = result["setting"]
    versions = ", ".join(f"{name} {setting['versions'][name]}" for name in setting["versions"] if name != "python")
    found = {name: cell["decode"] for name, cell in result.get("ratios", {}).items()}
    ratios = [found.get(name) for name in ("plain", "n-gram / prompt lookup", "drafter / own plain")]
    peak = result.get("roofline", {}).get("share")
    bars = ", ".join(f"{interval(bar.ratio)}" for bar in rows if bar.name.startswith("time to first"))
    by_name = {bar.name.partition(" (")[0]: bar.ratio for bar in rows}
    cells = [
        date.today().isoformat(),
        f"{setting['cpu']}, {setting['cores']} cores",
        f"{setting['engine']}; {setting['repeats']} repeats",
        *map(interval, ratios),
        interval(by_name["our best / best of llama.cpp"]),
        interval(by_name["verify cost v(5)"]),
        interval(by_name["verify cost v(9)"]),
        bars,
        interval(by_name["decode step at 6000 tokens"]),
        interval(by_name["resident memory over 1.2 weights + 500 MB"]),
        "-" if peak is None else f"{peak:.0%}",
        versions,
    ]
    with MACHINES.open("a", encoding="utf-8") as file:
        file.write("| " + " | ".join(cells) + " |\n")
