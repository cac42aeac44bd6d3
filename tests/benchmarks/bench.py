"""`make bench`: our decoders beside transformers' own, on one machine, in one process, the arms in turns.

Ends with a table; writes every run and figure as JSON, and a picture. What it compares is in arms.py, the single figures in probes.py.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import argparse
import json
import platform
import sys
from pathlib import Path
from statistics import geometric_mean, mean, median, quantiles
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

import llama
import probes
from arms import DRAFT, STORAGE, Arm, Run, our_arms, peer_arms
from picture import draw

from utils.comparison.records import versions
from utils.pairs.load_pair import load_pair
from utils.pairs.pair import Pair
from utils.pairs.request import PairRequest
from utils.prompts.chat_template import prompt_ids
from utils.screen.renderer import Renderer, make_renderer

OURS = ("ours target", "ours ngram", "ours speculative")
FEW = 5  # prompts; tasks with fewer are pooled
PAIRS = (
    ("plain", "ours target", "generate"),
    ("n-gram", "ours ngram", "generate, prompt lookup"),
    ("drafter", "ours speculative", "generate, assistant"),
    ("n-gram / own plain", "ours ngram", "ours target"),
    ("drafter / own plain", "ours speculative", "ours target"),
    ("plain / llama.cpp", "ours target", "llama.cpp"),
    ("n-gram / llama.cpp", "ours ngram", "llama.cpp, prompt lookup"),
)


Rows = list[tuple[str, list[int]]]  # (task, prompt ids)


def main() -> None:
    """Run everything that was asked for."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--prompts", type=Path, default=HERE / "prompts.jsonl", help="JSON lines with 'prompt' and 'task'"
    )
    parser.add_argument("--tokens", type=int, default=40, help="most new tokens (default: 40)")
    parser.add_argument("--repeats", type=int, default=2, help="of every arm on every prompt (default: 2)")
    parser.add_argument("--drafter", default="head", help="of both sides where it is a model (default: head)")
    parser.add_argument(
        "--gammas", type=int, nargs="*", default=[], metavar="N", help="fixed numbers of drafts to run too"
    )
    parser.add_argument("--kinds", nargs="*", default=[], metavar="KIND", help="other kinds of drafters to run too")
    parser.add_argument(
        "--engine-weights", choices=("float32", "int8"), default="float32", help="ours (default: float32)"
    )
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp, where llama-cpp-python is installed")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="ARM", help="leave an arm out, for example 'generate, assistant'"
    )
    parser.add_argument("--only-texts", action="store_true", help="leave the single figures out")
    parser.add_argument(
        "--out", type=Path, default=Path(".bench"), help="folder of bench.json and bench.png (default: .bench)"
    )
    given = parser.parse_args()
    screen = make_renderer(interactive=False)
    ours = load_pair(
        PairRequest("embedded", given.drafter, device="cpu", engine_weights=given.engine_weights), screen.note
    )
    theirs = load_pair(PairRequest("embedded", given.drafter, device="cpu"), screen.note)
    ours.engine.use("auto", 0)
    every = [*our_arms(ours, given.gammas, given.kinds), *peer_arms(theirs), *llama.arms(given.gguf, ours)]
    arms = [arm for arm in every if arm.name not in given.skip or arm.name == "ours target"]
    prompts = [json.loads(line) for line in given.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    setting = _setting(ours, arms, given)
    screen.result(f"{setting['engine']}; {setting['machine']}")
    screen.result("threads: " + ", ".join(f"{name} {count}" for name, count in setting["threads"].items()))
    texts = [_measured(screen, ours, arms, prompt, given) for prompt in prompts]
    found: dict[str, Any] = {"setting": setting, "texts": texts, "ratios": ratios(texts)}
    if not given.only_texts:
        found["figures"] = _figures(
            screen, ours, theirs, arms, [(row["task"], prompt_of(ours, row)) for row in prompts], given.tokens
        )
    _show(screen, found)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "bench.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found, given.out / "bench.png")
    screen.result(f"written to {given.out / 'bench.json'} and {given.out / 'bench.png'}")


def _setting(ours: Pair, arms: list[Arm], given: argparse.Namespace) -> dict[str, Any]:
    return {
        "engine": ours.engine.state.sentence(),
        "threads": {arm.name: arm.threads for arm in arms},
        "wait_policy": os.environ["OMP_WAIT_POLICY"],
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "versions": versions(),
        "new_tokens": given.tokens,
        "repeats": given.repeats,
        "drafter": given.drafter,
        "ngram_drafts": DRAFT,
        "ngram_storage": str(STORAGE),
        "gamma": "auto",
    }


def prompt_of(pair: Pair, row: dict[str, Any]) -> list[int]:
    """The prompt ids of a row, in the chat template."""
    return prompt_ids(pair.tokenizer, row["prompt"], chat=True, system=None)


def _measured(
    screen: Renderer, pair: Pair, arms: list[Arm], row: dict[str, Any], given: argparse.Namespace
) -> dict[str, Any]:
    """Every arm on a prompt, in turns, after a warm-up; medians over the repeats, with the lowest and the highest."""
    ids = prompt_of(pair, row)
    runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
    for arm in arms:
        arm.run(ids[-8:], 4)
    for repeat in range(given.repeats):
        for place in range(len(arms)):  # another one begins each time
            arm = arms[(place + repeat) % len(arms)]
            runs[arm.name].append(arm.run(ids, given.tokens))
    cells = {name: _cell(made) for name, made in runs.items()}
    base = runs["ours target"][0].tokens
    for name, made in runs.items():
        cells[name]["same_text"] = all(run.tokens == base for run in made)
    rates = ", ".join(f"{name} {cell['decode']:.1f}" if cell["decode"] else f"{name} -" for name, cell in cells.items())
    screen.result(f"{row.get('task', '')} ({len(ids)} + {len(base)} tokens): {rates} tokens/s")
    return {
        "id": row.get("id"),
        "task": row.get("task", ""),
        "prompt_tokens": len(ids),
        "new_tokens": len(base),
        "arms": cells,
    }


def _cell(runs: list[Run]) -> dict[str, Any]:
    decode = [rate for run in runs if (rate := run.decode_rate)]
    low, high = (min(decode), max(decode)) if decode else (None, None)
    drafts = [count for run in runs for count in run.drafts]
    return {
        "decode": median(decode) if decode else None,
        "lowest": low,
        "highest": high,
        "whole": median(run.rate for run in runs),
        "drafts_per_round": mean(drafts) if drafts else None,
    }


def ratios(texts: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By pair of arms and task: geometric means over the prompts, decoding only and whole runs, and the spread between prompts."""
    extra = [name for name in (texts[0]["arms"] if texts else ()) if name.startswith("ours") and name not in OURS]
    tasks = [text["task"] for text in texts]
    named = [task if tasks.count(task) >= FEW else "others" for task in tasks]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for label, mine, peer in (
        *PAIRS,
        *((f"{name.removeprefix('ours ')} / own plain", name, "ours target") for name in extra),
    ):
        for task in [*dict.fromkeys(named), "all"]:
            chosen = [text["arms"] for text, name in zip(texts, named, strict=True) if task in (name, "all")]
            both = [(cells[mine], cells[peer]) for cells in chosen if mine in cells and peer in cells]
            usable = [(ours, theirs) for ours, theirs in both if ours["decode"] and theirs["decode"]]
            if usable:
                decode = [ours["decode"] / theirs["decode"] for ours, theirs in usable]
                whole = [ours["whole"] / theirs["whole"] for ours, theirs in usable]
                spread = quantiles(decode, n=4)[::2] if len(decode) > 1 else [decode[0], decode[0]]
                figures = {
                    "decode": geometric_mean(decode),
                    "whole": geometric_mean(whole),
                    "quartiles": spread,
                    "prompts": len(usable),
                }
                found.setdefault(label, {})[task] = figures
    return found


def _figures(screen: Renderer, ours: Pair, theirs: Pair, arms: list[Arm], rows: Rows, length: int) -> dict[str, Any]:
    prompts = [ids for _, ids in rows[:3]]
    counts = {arm.name: arm.threads for arm in arms}
    models = {
        "ours": (ours.target, counts["ours target"]),
        "plain": (theirs.target, counts.get("generate", counts["ours target"])),
    }
    screen.note("acceptance, windows, contexts, storage, start-up ...")
    return {
        "acceptance": probes.acceptance(ours, rows, length),
        "window_ms": probes.windows(models),
        "inside_forwards": probes.inside_forwards(
            [arm for arm in arms if arm.name in OURS],
            [ours.target, getattr(ours.drafter, "head", ours.drafter)],
            prompts,
            48,
        ),
        "context_ms": probes.by_context(ours.target, counts["ours target"]),
        "storage": probes.storage(),
        "program": {engine: probes.program("--engine", engine) for engine in ("auto", "plain")},
    }


def _show(screen: Renderer, found: dict[str, Any]) -> None:
    rows = []
    for label, by_task in found["ratios"].items():
        for task, cell in by_task.items():
            low, high = cell["quartiles"]
            rows.append(
                (
                    label,
                    task,
                    str(cell["prompts"]),
                    f"{cell['decode']:.2f}",
                    f"{low:.2f}-{high:.2f}",
                    f"{cell['whole']:.2f}",
                )
            )
    screen.table(("ours / peer", "task", "prompts", "decode", "quartiles", "whole run"), rows)
    if "figures" not in found:
        return
    figures = found["figures"]
    widths = figures["window_ms"]
    cells = [(name, *(f"{by[width]:.0f} ({by[width] / by[1]:.2f})" for width in by)) for name, by in widths.items()]
    screen.table(("window, ms (of one)", *(str(width) for width in next(iter(widths.values())))), cells)
    screen.table(
        ("context, tokens", *map(str, figures["context_ms"])),
        [("ms per token", *(f"{ms:.0f}" for ms in figures["context_ms"].values()))],
    )
    places = [f"place {place + 1}" for place in range(probes.PLACES)]
    for name, by_task in figures["acceptance"].items():
        cells = [(task, *map(_share, counts)) for task, counts in by_task.items()]
        screen.table((f"acceptance, {name}", *places), cells)
    held, inside = figures["storage"], figures["inside_forwards"]
    filled = f"a million tokens in {held['seconds']:.1f} s (last fifth / first {held['last_over_first']:.2f})"
    screen.rows(
        [
            ("inside forwards", ", ".join(f"{name} {share:.3f}" for name, share in inside.items())),
            (
                "n-gram storage",
                f"{filled}, {held['lookup_us']:.1f} us a lookup, {held['bytes_per_gram']:.0f} bytes an n-gram",
            ),
            *((f"program, --engine {engine}", _program(cell)) for engine, cell in figures["program"].items()),
        ]
    )


def _share(count: list[int]) -> str:
    good, tried = count
    return f"{good}/{tried} = {good / tried:.3f}" if tried else "-"


def _program(cell: dict[str, float]) -> str:
    memory = f", {cell['resident_mb']:.0f} MB resident, {cell['peak_mb']:.0f} MB at most" if "peak_mb" in cell else ""
    return f"{cell['seconds']:.1f} s from its start to its first answer{memory}"


if __name__ == "__main__":
    main()
