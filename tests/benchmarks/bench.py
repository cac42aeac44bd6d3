"""`make bench`: our decoders against transformers' own, on one machine, in one process, with interleaved runs.

The result is a table, a JSON file with all figures, and a picture. arms.py has the arms, probes.py single figures.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import argparse
import json
import platform
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

import llama
import probes
import report
from arms import NGRAM_DRAFTS, STORAGE, Arm, Run, our_arms, peer_arms
from picture import draw

from utils.comparison.records import versions
from utils.pairs.load_pair import load_pair
from utils.pairs.pair import Pair
from utils.pairs.request import PairRequest
from utils.prompts.chat_template import prompt_ids
from utils.screen.renderer import Renderer, make_renderer

PROBED_PROMPTS, PROBED_TOKENS = 3, 48  # for the share of time inside forward passes


def main() -> None:
    """Run the benchmark that the flags describe."""
    flags = _flags()
    screen = make_renderer(interactive=False)
    request = PairRequest("embedded", flags.drafter, device="cpu", engine_weights=flags.engine_weights)
    ours = load_pair(request, screen.note)
    theirs = load_pair(PairRequest("embedded", flags.drafter, device="cpu"), screen.note)
    ours.engine.use("auto", 0)
    every = [*our_arms(ours, flags.gammas, flags.kinds), *peer_arms(theirs), *llama.arms(flags.gguf, ours)]
    arms = [arm for arm in every if arm.name not in flags.skip or arm.name == "ours target"]
    lines = flags.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines if line.strip()]
    setting = _setting(ours, arms, flags)
    screen.result(f"{setting['engine']}; {setting['machine']}")
    screen.result("threads: " + ", ".join(f"{name} {count}" for name, count in setting["threads"].items()))
    texts = [_measure(screen, ours, arms, prompt, flags) for prompt in prompts]
    result: dict[str, Any] = {"setting": setting, "texts": texts, "ratios": report.ratios(texts)}
    if not flags.only_texts:
        rows = [(prompt["task"], _ids(ours, prompt)) for prompt in prompts]
        screen.note("measuring acceptance, verify widths, contexts, storage and start-up ...")
        result["figures"] = _figures(ours, theirs, arms, rows, flags.tokens)
    report.show(screen, result)
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / "bench.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(result, flags.out / "bench.png")
    screen.result(f"written to {flags.out / 'bench.json'} and {flags.out / 'bench.png'}")


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--prompts", type=Path, default=HERE / "prompts.jsonl", help="JSON lines with 'prompt' and 'task'")
    add("--tokens", type=int, default=40, help="maximum number of new tokens (default: 40)")
    add("--repeats", type=int, default=2, help="runs of every arm on every prompt (default: 2)")
    add("--drafter", default="head", help="drafter of both sides; theirs uses it if it is a model (default: head)")
    add("--gammas", type=int, nargs="*", default=[], metavar="N", help="also run these fixed numbers of drafts")
    add("--kinds", nargs="*", default=[], metavar="KIND", help="also run these drafter kinds")
    add("--engine-weights", choices=("float32", "int8"), default="float32", help="of our arms (default: float32)")
    add("--gguf", type=Path, help="the same model for llama.cpp, if llama-cpp-python is installed")
    add("--skip", action="append", default=[], metavar="ARM", help="leave out an arm, e.g. 'generate, assistant'")
    add("--only-texts", action="store_true", help="leave out the single figures")
    add("--out", type=Path, default=Path(".bench"), help="folder of bench.json and bench.png (default: .bench)")
    return parser.parse_args()


def _setting(ours: Pair, arms: list[Arm], flags: argparse.Namespace) -> dict[str, Any]:
    return {
        "engine": ours.engine.state.sentence(),
        "threads": {arm.name: arm.threads for arm in arms},
        "wait_policy": os.environ["OMP_WAIT_POLICY"],
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "versions": versions(),
        "new_tokens": flags.tokens,
        "repeats": flags.repeats,
        "drafter": flags.drafter,
        "ngram_drafts": NGRAM_DRAFTS,
        "ngram_storage": str(STORAGE),
        "gamma": "auto",
    }


def _ids(pair: Pair, prompt: dict[str, Any]) -> list[int]:
    """The token ids of a prompt in the chat template."""
    return prompt_ids(pair.tokenizer, prompt["prompt"], chat=True, system=None)


def _measure(
    screen: Renderer, pair: Pair, arms: list[Arm], prompt: dict[str, Any], flags: argparse.Namespace
) -> dict[str, Any]:
    """Every arm on one prompt, in turns, after a warm-up."""
    ids = _ids(pair, prompt)
    runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
    for arm in arms:
        arm.run(ids[-8:], 4)
    for repeat in range(flags.repeats):
        for index in range(len(arms)):  # a different arm begins each time
            arm = arms[(index + repeat) % len(arms)]
            runs[arm.name].append(arm.run(ids, flags.tokens))
    reference = runs["ours target"][0].tokens
    cells = {name: _cell(repeats, reference) for name, repeats in runs.items()}
    rates = ", ".join(f"{name} {cell['decode']:.1f}" if cell["decode"] else f"{name} -" for name, cell in cells.items())
    task = prompt.get("task", "")
    screen.result(f"{task} ({len(ids)} + {len(reference)} tokens): {rates} tokens/s")
    return {
        "id": prompt.get("id"),
        "task": task,
        "prompt_tokens": len(ids),
        "new_tokens": len(reference),
        "arms": cells,
    }


def _cell(runs: list[Run], reference: list[int]) -> dict[str, Any]:
    """Medians over the repeats of an arm, with the lowest and the highest decoding speed."""
    decode = [rate for run in runs if (rate := run.decode_rate)]
    drafts = [count for run in runs for count in run.drafts]
    return {
        "decode": median(decode) if decode else None,
        "lowest": min(decode, default=None),
        "highest": max(decode, default=None),
        "whole": median(run.rate for run in runs),
        "drafts_per_round": mean(drafts) if drafts else None,
        "same_text": all(run.tokens == reference for run in runs),
    }


def _figures(ours: Pair, theirs: Pair, arms: list[Arm], rows: probes.Rows, length: int) -> dict[str, Any]:
    threads = {arm.name: arm.threads for arm in arms}
    our_threads = threads["ours target"]
    models = {"ours": (ours.target, our_threads), "plain": (theirs.target, threads.get("generate", our_threads))}
    our = [arm for arm in arms if arm.name in report.OURS]
    timed = [ours.target, getattr(ours.drafter, "head", ours.drafter)]
    prompts = [ids for _, ids in rows[:PROBED_PROMPTS]]
    return {
        "acceptance": probes.acceptance(ours, rows, length),
        "window_ms": probes.verify_ms(models),
        "inside_forwards": probes.inside_forwards(our, timed, prompts, PROBED_TOKENS),
        "context_ms": probes.by_context(ours.target, our_threads),
        "storage": probes.storage(),
        "program": {engine: probes.program("--engine", engine) for engine in ("auto", "plain")},
    }


if __name__ == "__main__":
    main()
