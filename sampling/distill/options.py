"""What a distillation is asked for: the flags, and the plan that they come to, which is kept with the work so that it can be resumed."""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from utils.bounds import DEVICE_PATTERN, MAX_SEED
from utils.errors import UserError

KINDS = ("head", "lm")
PLAN = "plan.json"
MOST_STEPS = 8
COUNTS = {
    "tokens": "tokens that the target writes",
    "rows": "conversations that it writes at once",
    "length": "tokens of each",
    "batch": "conversations per training step",
    "passes": "over what was written",
    "steps": "drafts in a row that training looks at",
    "vocabulary": "ids that a head can draft",
    "width": "of an lm",
    "depth": "layers of an lm",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """tokens: how many the target writes. hours: a limit for writing and training together, 0 for none. passes: over what was written.

    rows, length: of a page. batch: rows a training step sees. steps: drafts that training unrolls. vocabulary: ids a head can draft.
    rate: of Muon, for matrices; rate_rest: of AdamW, for everything else. width, depth: of an lm. start: the folder of a drafter to go on
    from, of this kind and for this target.
    """

    target: str
    kind: str = "head"
    tokens: int = 1_000_000
    hours: float = 0.0
    device: str = "auto"
    prompts: str | None = None
    start: str | None = None
    seed: int = 0
    rows: int = 96
    length: int = 320
    batch: int = 4
    passes: int = 4
    steps: int = 3
    vocabulary: int = 8192
    rate: float = 0.02
    rate_rest: float = 0.001
    width: int = 256
    depth: int = 4


@dataclass(frozen=True, slots=True)
class Order:
    """A plan, where its work goes, and what is to be done: begin, resume, or only measure what lies there."""

    plan: Plan
    out: Path
    resume: bool
    keep: bool
    measure: bool

    @property
    def work(self) -> Path:
        """Pages and checkpoints."""
        return self.out / "work"


def read_order(argv: list[str] | None = None) -> Order:
    """From the flags; argparse leaves with status 2 where they are wrong.

    Raises UserError where they do not fit what lies in the folder.
    """
    usual = {field.name: field.default for field in fields(Plan)}
    parser = argparse.ArgumentParser(
        prog="python -m sampling.distill",
        description="Make a drafter for a target model out of text that the target writes itself.",
    )
    parser.add_argument("--target", metavar="ID|FOLDER|FILE.gguf|embedded", help="the target model")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the drafter goes")
    parser.add_argument(
        "--kind", choices=KINDS, default="head", help="head: one layer on the target's hidden states; lm: a small model"
    )
    parser.add_argument(
        "--hours", type=_hours, default=0.0, metavar="H", help="take at most so long, under half of it for writing"
    )
    parser.add_argument(
        "--device", type=_device, default="auto", metavar="auto|cpu|cuda|cuda:N|mps", help="default: auto"
    )
    parser.add_argument(
        "--prompts", metavar="FILE", help="questions to answer, a line each; without it the target asks them too"
    )
    parser.add_argument(
        "--start", metavar="FOLDER", help="teach the drafter in that folder further, instead of a new one"
    )
    parser.add_argument("--resume", action="store_true", help="go on where the work in the folder stopped")
    parser.add_argument("--keep", action="store_true", help="keep pages and checkpoints in FOLDER/work when it is done")
    parser.add_argument(
        "--measure", action="store_true", help="only measure the drafter in the folder, on text written anew"
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="default: 0")
    for name, meaning in COUNTS.items():
        parser.add_argument(
            f"--{name}", type=_count, default=usual[name], metavar="N", help=f"{meaning} (default: {usual[name]})"
        )
    parser.add_argument(
        "--rate", type=_rate, default=usual["rate"], metavar="R", help=f"learning rate (default: {usual['rate']})"
    )
    given = parser.parse_args(argv)
    if given.rows < given.batch:
        parser.error(f"--batch {given.batch} is more than the --rows {given.rows} of a page")
    if given.width % 64:
        parser.error(f"--width {given.width} is no multiple of 64")
    if given.steps > MOST_STEPS:
        parser.error(f"--steps {given.steps} is out of range: 1 to {MOST_STEPS}")
    chosen = {name: value for name, value in vars(given).items() if name in usual}
    plan = Plan(**chosen | {"target": given.target or ""})
    return _checked(Order(plan, given.out.expanduser(), given.resume, given.keep, given.measure))


def _checked(order: Order) -> Order:
    file = order.work / PLAN
    if order.resume:
        if not file.is_file():
            raise UserError(f"There is nothing to resume in {order.out}: leave --resume out to begin.")
        kept = Plan(**json.loads(file.read_text(encoding="utf-8")))
        kept = replace(kept, hours=order.plan.hours or kept.hours)
        if order.plan.device != "auto":
            kept = replace(kept, device=order.plan.device)
        if order.plan.target and order.plan.target != kept.target:
            raise UserError(f"The work in {order.out} is for {kept.target}, not for {order.plan.target}.")
        return replace(order, plan=kept)
    if not order.plan.target:
        raise UserError("--target is missing: say which model the drafter is for, for example --target embedded.")
    if file.is_file() and not order.measure:
        raise UserError(f"{order.out} holds unfinished work: add --resume to go on with it, or choose another folder.")
    return order


def keep_plan(order: Order) -> None:
    """Write the plan next to the work."""
    order.work.mkdir(parents=True, exist_ok=True)
    write_json(order.work / PLAN, asdict(order.plan))


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    half = path.with_suffix(".part")
    half.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(half, path)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range: a whole number of at least 1")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value <= MAX_SEED:
        raise argparse.ArgumentTypeError(f"{text} is out of range: 0 to {MAX_SEED}")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range: above 0, at most 1")
    return value


def _hours(text: str) -> float:
    value = float(text)
    if not 0 < value < 10_000:
        raise argparse.ArgumentTypeError(f"{text} is out of range: more than 0 hours")
    return value


def _device(text: str) -> str:
    if not re.fullmatch(f"auto|{DEVICE_PATTERN}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a device; choose auto, cpu, cuda, cuda:N or mps")
    return text
