"""Results of the benchmark: ratios between arms by task, and the tables on the screen."""

from statistics import geometric_mean, quantiles
from typing import Any

from utils.screen.renderer import Renderer

OURS = ("ours target", "ours ngram", "ours speculative")
MIN_TASK_PROMPTS = 5  # tasks with fewer prompts are pooled as "others"
PAIRS = (
    ("plain", "ours target", "generate"),
    ("n-gram", "ours ngram", "generate, prompt lookup"),
    ("drafter", "ours speculative", "generate, assistant"),
    ("n-gram / own plain", "ours ngram", "ours target"),
    ("drafter / own plain", "ours speculative", "ours target"),
    ("plain / llama.cpp", "ours target", "llama.cpp"),
    ("n-gram / llama.cpp", "ours ngram", "llama.cpp, prompt lookup"),
)

Cell = dict[str, Any]


def ratios(texts: list[dict[str, Any]]) -> dict[str, dict[str, Cell]]:
    """Ratios by pair of arms and task. Pairs without common prompts are left out."""
    names = texts[0]["arms"] if texts else ()
    extra = [name for name in names if name.startswith("ours") and name not in OURS]
    pairs = [*PAIRS, *((f"{name.removeprefix('ours ')} / own plain", name, "ours target") for name in extra)]
    tasks = [text["task"] for text in texts]
    pooled = [task if tasks.count(task) >= MIN_TASK_PROMPTS else "others" for task in tasks]
    result: dict[str, dict[str, Cell]] = {}
    for label, ours, peer in pairs:
        for task in [*dict.fromkeys(pooled), "all"]:
            chosen = [text["arms"] for text, name in zip(texts, pooled, strict=True) if task in (name, "all")]
            if cell := _ratio([(arms[ours], arms[peer]) for arms in chosen if ours in arms and peer in arms]):
                result.setdefault(label, {})[task] = cell
    return result


def _ratio(pairs: list[tuple[Cell, Cell]]) -> Cell | None:
    """Geometric means over prompts, of decoding and of whole runs, and the quartiles of decoding over prompts."""
    usable = [(ours, peer) for ours, peer in pairs if ours["decode"] and peer["decode"]]
    if not usable:
        return None
    decode = [ours["decode"] / peer["decode"] for ours, peer in usable]
    return {
        "decode": geometric_mean(decode),
        "whole": geometric_mean([ours["whole"] / peer["whole"] for ours, peer in usable]),
        "quartiles": quantiles(decode, n=4)[::2] if len(decode) > 1 else [decode[0], decode[0]],
        "prompts": len(usable),
    }


def show(screen: Renderer, result: dict[str, Any]) -> None:
    """The table of ratios, and the tables of single figures if they were measured."""
    cells = ((label, task, cell) for label, by_task in result["ratios"].items() for task, cell in by_task.items())
    screen.table(
        ("ours / peer", "task", "prompts", "decode", "quartiles", "whole run"),
        [
            (
                label,
                task,
                str(cell["prompts"]),
                f"{cell['decode']:.2f}",
                "{:.2f}-{:.2f}".format(*cell["quartiles"]),
                f"{cell['whole']:.2f}",
            )
            for label, task, cell in cells
        ],
    )
    if "figures" in result:
        _show_figures(screen, result["figures"])


def _show_figures(screen: Renderer, figures: dict[str, Any]) -> None:
    widths = figures["window_ms"]
    screen.table(
        ("verify width, ms (of width 1)", *map(str, next(iter(widths.values())))),
        [(name, *(f"{ms:.0f} ({ms / by[1]:.2f})" for ms in by.values())) for name, by in widths.items()],
    )
    contexts = figures["context_ms"]
    screen.table(
        ("context, tokens", *map(str, contexts)), [("ms per token", *(f"{ms:.0f}" for ms in contexts.values()))]
    )
    for name, by_task in figures["acceptance"].items():
        rows = [(task, *map(_fraction, counts)) for task, counts in by_task.items()]
        positions = [f"position {position + 1}" for position in range(len(rows[0]) - 1)]
        screen.table((f"acceptance, {name}", *positions), rows)
    storage = figures["storage"]
    screen.rows(
        [
            ("inside forwards", ", ".join(f"{name} {share:.3f}" for name, share in figures["inside_forwards"].items())),
            (
                "n-gram storage",
                f"a million tokens in {storage['seconds']:.1f} s "
                f"(last fifth / first {storage['last_over_first']:.2f}), "
                f"{storage['lookup_us']:.1f} us per lookup, {storage['bytes_per_gram']:.0f} bytes per n-gram",
            ),
            *((f"program, --engine {engine}", _program(cell)) for engine, cell in figures["program"].items()),
        ]
    )


def _fraction(count: list[int]) -> str:
    accepted, drafted = count
    return f"{accepted}/{drafted} = {accepted / drafted:.3f}" if drafted else "-"


def _program(cell: dict[str, float]) -> str:
    memory = f", {cell['resident_mb']:.0f} MB resident, {cell['peak_mb']:.0f} MB peak" if "peak_mb" in cell else ""
    return f"{cell['seconds']:.1f} s from start to first answer{memory}"
