"""The command-line flags of a distillation, and the plan that is stored with the work so that it can be resumed."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from sampling.distill.progress import write_json
from utils.bounds import MAX_SEED, RealRange, WholeRange
from utils.config.arguments import device_flag, flag_type, seed_flag
from utils.errors import UserError

KINDS = ("eagle3",)
PLAN_FILE = "plan.json"
TRAINING_FILE = "training.json"  # next to the weights: the settings without paths, so that it can be published
STEPS = WholeRange(1, 8)
MEASURED = ("target", "prompts", "seed", "rows", "length", "batch", "steps")  # what a measurement depends on
COUNT_FLAGS = {
    "tokens": "tokens to generate for training",
    "rows": "conversations generated in parallel; together they form one page",
    "length": "tokens per conversation",
    "batch": "conversations per training step",
    "passes": "training passes over the generated text",
    "vocabulary": "number of token ids that the drafter can draft",
}

count_flag, steps_flag = flag_type(WholeRange(1).parse), flag_type(STEPS.parse)
rate_flag = flag_type(RealRange("learning rate", 0, 1, excludes_low=True).parse)
hours_flag = flag_type(RealRange("number of hours", 0, 9999, excludes_low=True).parse)


def _layers(text: str) -> str:
    """Numbers that ascend, separated by commas."""
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) for word in words if word.isascii() and word.isdigit()]
    if len(numbers) < len(words) or numbers != sorted(set(numbers)):
        raise UserError(f"'{text}' does not name hidden states: write ascending numbers, for example 2,15,27")
    return ",".join(map(str, numbers))


layers_flag = flag_type(_layers)


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The settings of a distillation. The field names are the keys of plan.json.

    tokens: how many to generate. hours: time limit for generation and training together, 0 for none. rows, length: the
    shape of a page. batch: rows per training step. steps: drafts that training is unrolled over. rate: Muon's learning
    rate, for matrices; rate_rest: AdamW's, for all other weights. start: folder of a drafter to train further.
    """

    target: str
    kind: str = "eagle3"
    tokens: int = 1_000_000
    hours: float = 0.0
    device: str = "auto"
    prompts: str | None = None
    start: str | None = None
    layers: str | None = None
    seed: int = 0
    rows: int = 96
    length: int = 320
    batch: int = 4
    passes: int = 4
    steps: int = 3
    vocabulary: int = 8192
    rate: float = 0.02
    rate_rest: float = 0.001


@dataclass(frozen=True, slots=True)
class Options:
    """A plan, the folder of the drafter, and whether to resume, to keep the work folder, or only to measure."""

    plan: TrainingPlan
    out: Path
    resume: bool
    keep: bool
    measure: bool

    @property
    def work(self) -> Path:
        """The folder of pages and checkpoints."""
        return self.out / "work"


def parse_options(argv: list[str] | None = None) -> Options:
    """The options from the command line.

    Invalid flags make argparse exit with status 2. Raises UserError if the flags do not fit the contents of the folder.
    """
    parser, argv = _parser(), sys.argv[1:] if argv is None else argv
    flags = parser.parse_args(argv)
    if flags.measure:
        if flags.start or flags.resume:
            parser.error(f"--{'start' if flags.start else 'resume'} has no effect with --measure: leave it out")
        flags = parser.parse_args([*_stored_flags(flags.out.expanduser()), *argv])  # the last flag of a name wins
    if flags.rows < flags.batch:
        parser.error(f"--batch {flags.batch} is larger than --rows {flags.rows}, the conversations of a page")
    if flags.layers and (flags.start or flags.measure or flags.kind != "eagle3"):
        parser.error("--layers is for a new drafter of --kind eagle3: leave it out")
    plan = TrainingPlan(**{field.name: getattr(flags, field.name) for field in fields(TrainingPlan)})
    options = Options(plan, flags.out.expanduser(), flags.resume, flags.keep, flags.measure)
    return _resumed(options) if options.resume else _checked(options)


def save_plan(options: Options) -> None:
    """Write the plan to the work folder."""
    options.work.mkdir(parents=True, exist_ok=True)
    write_json(options.work / PLAN_FILE, asdict(options.plan))


def public_settings(plan: TrainingPlan) -> dict[str, Any]:
    """The plan without paths of this machine, which mean nothing elsewhere. In their place stand names of flags."""
    settings = asdict(plan) | ({"target": "TARGET"} if Path(plan.target).expanduser().exists() else {})
    return settings | {name: name.upper() for name in ("prompts", "start") if settings[name]}


def _stored_flags(folder: Path) -> list[str]:
    """The flags that decide on the held-out page of the drafter in a folder, so that its measurement can be repeated.

    Raises UserError if the file with them is damaged.
    """
    file = folder / TRAINING_FILE
    if not file.is_file():
        return []
    try:
        stored = json.loads(file.read_text(encoding="utf-8")).items()
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file} is damaged: delete it, and repeat the flags of the training.") from error
    # The name of a flag stands for a path that was left out.
    known = {name: value for name, value in stored if name in MEASURED and value not in (None, name.upper())}
    return [f"--{name}={value}" for name, value in known.items()]


def _resumed(options: Options) -> Options:
    """The options with the stored plan; only --hours and --device override it."""
    file = options.work / PLAN_FILE
    if not file.is_file():
        raise UserError(f"There is nothing to resume in {options.out}: leave out --resume to begin.")
    plan = TrainingPlan(**json.loads(file.read_text(encoding="utf-8")))
    if options.plan.target and options.plan.target != plan.target:
        raise UserError(f"The work in {options.out} is for {plan.target}, not for {options.plan.target}.")
    device = plan.device if options.plan.device == "auto" else options.plan.device
    # Anything else would not fit the pages and checkpoints that exist.
    return replace(options, plan=replace(plan, hours=options.plan.hours or plan.hours, device=device))


def _checked(options: Options) -> Options:
    if options.measure and not (options.out / "config.json").is_file():
        raise UserError(f"{options.out} contains no drafter: give a folder that this command has written as --out.")
    if not options.plan.target:
        raise UserError("--target is missing: name the model to train a drafter for, for example --target embedded.")
    if file := next((path for path in (options.out, *options.out.parents) if path.is_file()), None):
        raise UserError(f"{file} is a file and not a folder: choose a different folder for --out.")
    if (options.work / PLAN_FILE).is_file() and not options.measure:
        raise UserError(f"{options.out} has unfinished work: add --resume to continue, or choose a different folder.")
    written = [*options.out.glob("*.safetensors"), *options.out.glob("*.json"), *options.out.glob("README.md")]
    if written and not options.measure:
        raise UserError(f"{written[0]} exists and is not overwritten: choose a new folder for --out.")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sampling.distill",
        description="Train a drafter for a target model on text that the target generates itself.",
    )
    add = parser.add_argument
    # With --resume the target may be omitted, and comes from the stored plan.
    add("--target", default="", metavar="ID|FOLDER|FILE.gguf|embedded", help="the target model")
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder to write the drafter to")
    add(
        "--kind",
        choices=KINDS,
        help="eagle3: one decoder layer on the target's hidden states, in the EAGLE-3 format (default: eagle3)",
    )
    add("--hours", type=hours_flag, metavar="H", help="time limit, of which less than half is for generation")
    add("--device", type=device_flag, metavar="auto|cpu|cuda|cuda:N|mps", help="default: auto")
    add("--prompts", metavar="FILE", help="questions to answer, one per line (default: the target writes them too)")
    add("--start", metavar="FOLDER", help="continue training the drafter in this folder instead of a new one")
    add(
        "--layers",
        type=layers_flag,
        metavar="N,N,N",
        help="eagle3: hidden states to read, 0 (embeddings) to n, of n layers (default: 2,n/2,n-3)",
    )
    add("--resume", action="store_true", help="continue interrupted work in the --out folder")
    add("--keep", action="store_true", help="keep generated text and checkpoints in FOLDER/work when finished")
    add("--measure", action="store_true", help="only measure the drafter in the --out folder, on its held-out page")
    add("--seed", type=seed_flag, metavar="N", help=f"0 to {MAX_SEED} (default: 0)")
    for name, meaning in COUNT_FLAGS.items():
        add(f"--{name}", type=count_flag, metavar="N", help=f"{meaning} (default: %(default)s)")
    add(
        "--steps", type=steps_flag, metavar="N", help=f"consecutive drafts to train for, {STEPS} (default: %(default)s)"
    )
    add("--rate", type=rate_flag, metavar="R", help="learning rate (default: %(default)s)")
    parser.set_defaults(**asdict(TrainingPlan(target="")))
    return parser
