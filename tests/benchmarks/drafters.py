"""Several drafters of one target on this machine: speed-up over the target alone, and acceptance by position.

    python tests/benchmarks/drafters.py DRAFTER DRAFTER ... [--target ID|FOLDER] [--prompts FILE] [--limit N]

Each drafter has a copy of the target, in the same engine. For every prompt all of them run in turns, each beside the
target alone, greedily and at temperature 1, with /gamma auto. Figures are geometric means over prompts with 95 %
intervals; the last ones compare each drafter with the first.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils.comparison.harness import Harness
from utils.comparison.strategies import STRATEGIES
from utils.comparison.warm_up import warm_up, with_costs
from utils.config.settings import Settings
from utils.config.value_types import ProcessorSpec
from utils.metrics.intervals import Interval, speedup_interval
from utils.metrics.results import Generation, collect, pooled
from utils.pairs.load_pair import load_pair
from utils.pairs.request import PairRequest
from utils.prompts.conversation import prompt_ids
from utils.screen.renderer import Renderer, make_renderer

DECODING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T = 1, rejection": {"processor": ProcessorSpec(1.0), "verify": "rejection"},
}
SHOWN_POSITIONS = 6


@dataclass(slots=True)
class Arm:
    """A drafter with its harness. pairs: of each prompt, its run and the run of the target alone."""

    name: str
    harness: Harness
    settings: Settings
    pairs: list[tuple[Generation, Generation]] = field(default_factory=list)

    @classmethod
    def load(cls, drafter: str, flags: argparse.Namespace, screen: Renderer) -> "Arm":
        pair = load_pair(PairRequest(flags.target, drafter, device="cpu"), screen.note)
        pair.engine.use(flags.engine, 0)
        base = Settings(length=flags.length)
        harness = Harness.of(pair, base)
        settings = with_costs(harness, base)
        warm_up(harness, settings)
        costs = "" if settings.costs is None else settings.costs.text
        screen.result(f"{drafter}: {pair.engine.state.sentence()} {costs}")
        return cls(drafter, harness, settings)

    @property
    def speedups(self) -> list[float]:
        return [len(run.tokens) / run.seconds / (len(alone.tokens) / alone.seconds) for run, alone in self.pairs]


def main() -> None:
    flags, screen = flags_of(), make_renderer(interactive=False)
    arms = [Arm.load(drafter, flags, screen) for drafter in flags.drafters]
    lines = [json.loads(line) for line in flags.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    step = max(1, len(lines) // flags.limit)
    texts = [line["prompt"] for line in lines[::step]][: flags.limit]
    for name, changes in DECODING.items():
        run_all(arms, texts, changes, screen)
        for arm in arms:
            screen.result(f"{name}, {arm.name}: {figures(arm)}")
        for arm in arms[1:]:
            ratios = [[ours / first] for ours, first in zip(arm.speedups, arms[0].speedups, strict=True)]
            screen.result(f"{name}, {arm.name} over {arms[0].name}: {interval_text(speedup_interval(ratios))}")


def run_all(arms: list[Arm], texts: list[str], changes: dict[str, Any], screen: Renderer) -> None:
    """Run every prompt with every drafter and with the target alone. Drafters and strategies take turns."""
    speculative = next(row for row in STRATEGIES if row.name == "speculative")
    for arm in arms:
        arm.pairs.clear()
    for number, text in enumerate(texts):
        screen.note(f"prompt {number + 1} of {len(texts)}")
        start = number % len(arms)
        for arm in (*arms[start:], *arms[:start]):
            ids = prompt_ids(arm.harness.pair.tokenizer, text, chat=True, system=None)
            settings = replace(arm.settings, **changes)
            order = (speculative, arm.harness.baseline)
            order = order if number // len(arms) % 2 else order[::-1]
            runs = {one.name: collect(one.steps(arm.harness.job(ids, settings))) for one in order}
            arm.pairs.append((runs[speculative.name], runs[arm.harness.baseline.name]))


def figures(arm: Arm) -> str:
    every = pooled(run for run, _ in arm.pairs)
    positions = ", ".join(f"{hits}/{tried} = {hits / tried:.3f}" for hits, tried in every.accepted_by_position if tried)
    shown = ", ".join(positions.split(", ")[:SHOWN_POSITIONS])
    gain = speedup_interval([[speedup] for speedup in arm.speedups])
    per_forward = len(every.tokens) / every.target_forwards
    return f"{interval_text(gain)} of plain; {per_forward:.3f} tokens/forward; by position {shown}"


def interval_text(interval: Interval) -> str:
    return f"{interval.estimate:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def flags_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", help="what --drafter accepts")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts.jsonl")
    parser.add_argument("--limit", type=int, default=24, help="number of prompts")
    parser.add_argument("--length", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--engine", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
