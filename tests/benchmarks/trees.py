"""What combs bring on this machine: /tree off, comb and auto in turns over many prompts, with /gamma auto.

    python tests/benchmarks/trees.py [--prompts FILE] [--limit N] [--engine NAME] [--drafter ID|FOLDER]

It reports ratios of decode tokens/s over /tree off (geometric means over prompts with 95 % intervals), tokens per
target forward, and how often leaves were accepted, for greedy decoding and for sampling at temperature 1.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils.comparison.harness import Harness
from utils.comparison.strategies import STRATEGIES
from utils.comparison.warm_up import warm_up, with_costs
from utils.config.settings import Settings
from utils.logits_processor import MultinomialProcessor
from utils.metrics.intervals import speedup_interval
from utils.metrics.results import Generation, pooled
from utils.pairs.load_pair import load_pair
from utils.pairs.request import PairRequest
from utils.prompts.chat_template import prompt_ids
from utils.screen.renderer import Renderer, make_renderer

TREES = ("off", "comb", "auto")
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T = 1, rejection": {"processor": MultinomialProcessor(1.0)},
    "T = 1, coupled": {"processor": MultinomialProcessor(1.0), "verify": "coupled"},
}


def main() -> None:
    flags, screen = flags_of(), make_renderer(interactive=False)
    pair = load_pair(PairRequest("embedded", flags.drafter, device="cpu"), screen.note)
    pair.engine.use(flags.engine, 0)
    screen.result(pair.engine.state.sentence())
    base = Settings(length=flags.length)
    harness = Harness.of(pair, base)
    measured = with_costs(harness, replace(base, tree="auto"))
    assert measured.costs is not None
    screen.result(measured.costs.text)
    warm_up(harness, measured)
    lines = [json.loads(line) for line in flags.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    step = max(1, len(lines) // flags.limit)
    prompts = [prompt_ids(pair.tokenizer, line["prompt"], chat=True, system=None) for line in lines[::step]]
    for name, changes in DECODING.items():
        settings = replace(measured, **changes)
        runs = run_all(harness, settings, prompts[: flags.limit], screen)
        for tree in TREES:
            screen.result(f"{name}, tree {tree}: {figures(runs[tree], runs['off'])}")


def run_all(
    harness: Harness, settings: Settings, prompts: list[list[int]], screen: Renderer
) -> dict[str, list[Generation]]:
    """The runs of each tree, one for each prompt. The trees take turns."""
    strategy = next(row for row in STRATEGIES if row.name == "speculative")
    runs: dict[str, list[Generation]] = {tree: [] for tree in TREES}
    for number, prompt in enumerate(prompts):
        screen.note(f"prompt {number + 1} of {len(prompts)}")
        for tree in (*TREES[number % 3 :], *TREES[: number % 3]):
            runs[tree].append(harness.run_alone(prompt, strategy, replace(settings, tree=tree)))
    return runs


def figures(runs: list[Generation], base: list[Generation]) -> str:
    """One line about the runs of a tree."""
    ratios = [[decode_rate(run) / decode_rate(other)] for run, other in zip(runs, base, strict=True)]
    gain = speedup_interval(ratios)
    every = pooled(runs)
    leaves = sum(len(step.leaves) for step in every.steps)
    accepted = sum(step.leaf is not None for step in every.steps)
    return (
        f"{gain.estimate:.3f} ({gain.low:.3f} to {gain.high:.3f}) of tree off; "
        f"{every.tokens_per_target_forward:.3f} tokens/forward; {leaves / len(every.steps):.2f} leaves/round, "
        f"{accepted} of {leaves} accepted; {len(every.steps)} rounds"
    )


def decode_rate(run: Generation) -> float:
    """Tokens per second after the first round."""
    first = len(run.steps[0].tokens)
    return (len(run.tokens) - first) / (run.seconds - (run.first_seconds or 0.0))


def flags_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts.jsonl")
    parser.add_argument("--limit", type=int, default=24, help="number of prompts")
    parser.add_argument("--length", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--drafter", default="head")
    return parser.parse_args()


if __name__ == "__main__":
    main()
