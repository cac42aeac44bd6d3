"""How long a distillation will take, how much disk space it needs, and how much text a time limit leaves room for."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sampling.distill.options import Plan
from sampling.distill.progress import duration_text
from sampling.distill.trainer import Trainer
from utils.errors import UserError

GENERATION_SHARE = 0.45  # of --hours
TRIAL_STEPS = 4  # training steps that are timed; the first one also allocates memory
FEATURE_BYTES = 2  # pages hold bfloat16
OTHER_BYTES = 5  # of a token: its id and its source
# Bytes of a checkpoint for each weight: up to three float32 numbers. While one is written, the last one exists too.
CHECKPOINT_BYTES, DRAFTER_BYTES = 2 * 3 * 4, 2


@dataclass(frozen=True, slots=True)
class Workload:
    """What a plan asks for. pages: of training text, besides the held-out one. page_tokens: in each.

    units: numbers of hidden states for each token.
    """

    plan: Plan
    pages: int
    page_tokens: int
    units: int

    @classmethod
    def of(cls, plan: Plan, page_tokens: int, units: int) -> Workload:
        """The whole pages that hold the plan's tokens."""
        return cls(plan, -(-plan.tokens // page_tokens), page_tokens, units)

    @property
    def generation_limit(self) -> float:
        """Seconds that generation may take."""
        return self.plan.hours * 3600 * GENERATION_SHARE or math.inf  # 0 hours means no limit

    def steps(self, pages: int) -> int:
        """The number of training steps over so many pages."""
        return max(1, pages * (self.plan.rows // self.plan.batch) * self.plan.passes)

    def disk_bytes(self, weights: int, frozen: int) -> int:
        """What the pages, checkpoints of so many trained weights, and the drafter take at most. frozen: the number of
        weights that are stored with the drafter and not trained.
        """
        text = (self.pages + 1) * self.page_tokens * (FEATURE_BYTES * self.units + OTHER_BYTES)
        return text + weights * CHECKPOINT_BYTES + (weights + frozen) * DRAFTER_BYTES


@dataclass(frozen=True, slots=True)
class Estimate:
    """Work that is left. pages: to generate. generation, training: seconds. steps: of training."""

    pages: int
    generation: float
    steps: int
    training: float


def estimated(work: Workload, done: int, spent: float, seconds: tuple[float, float]) -> Estimate:
    """The work left after `done` pages and `spent` seconds of generation.

    seconds: for a page and for a training step, as they were measured. A time limit ends both tasks early, but at least
    one page is generated.
    """
    page_seconds, step_seconds = seconds
    room = (work.generation_limit - spent) / page_seconds
    pages = work.pages - done if room == math.inf else min(work.pages - done, max(0, math.ceil(room)))
    pages = max(pages, 0 if done else 1)
    steps = work.steps(done + pages)
    if work.plan.hours:
        left = work.plan.hours * 3600 - spent - pages * page_seconds
        steps = max(1, min(steps, int(left / step_seconds)))
    return Estimate(pages, pages * page_seconds, steps, steps * step_seconds)


def estimate_text(work: Workload, done: int, estimate: Estimate) -> str:
    """One sentence: the time, and how many tokens will be generated."""
    total = (done + estimate.pages) * work.page_tokens
    missing = work.pages - done - estimate.pages
    limit = f" (--hours {work.plan.hours:g} leaves no room for {missing:,} more pages)" if missing else ""
    generation, training = duration_text(estimate.generation), duration_text(estimate.training)
    return (
        f"about {duration_text(estimate.generation + estimate.training)} left: {generation} of generation, until there "
        f"are {total:,} tokens{limit}, then {training} of training ({estimate.steps:,} steps)"
    )


def space_text(folder: Path, needed: int) -> str:
    """How much more disk space is needed, and how much is free. Raises UserError if it is not enough."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder} has {_size(free)} of free disk space and up to {_size(needed)} are needed: choose fewer "
            "--tokens, or an --out on a different disk."
        )
    return f"needs up to {_size(needed)} of disk space in {folder}, where {_size(free)} are free"


def step_seconds(trainer: Trainer) -> float:
    """The duration of a training step, by a few of them. The trainer's student is trained by this."""
    durations = []
    for _ in range(TRIAL_STEPS):
        started = time.monotonic()
        trainer.train_step()
        durations.append(time.monotonic() - started)
    return sum(durations[1:]) / len(durations[1:])


def written_bytes(folder: Path) -> int:
    """The size of the files in a folder and in those in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def weight_count(weights: Any) -> int:
    """The number of trained weights of a module."""
    return sum(part.numel() for part in weights.parameters() if part.requires_grad)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
