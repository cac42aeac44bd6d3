"""The command-line flags of a distillation, and the plan that is stored with the work so that it can be resumed."""

import argparse
import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from utils.bounds import MAX_SEED, RealRange, WholeRange
from utils.config.arguments import device_flag, flag_type, seed_flag
from utils.errors import UserError
from utils.files import replacing

PLAN_FILE = "plan.json"
STEPS = WholeRange(1, 8)
USUAL_STEPS = {"eagle3": 3, "block": 5}  # by kind
COUNT_FLAGS = {
    "tokens": "tokens to generate for training",
    "length": "tokens of the longest conversations; others have a half or an eighth of it",
    "page": "tokens generated in parallel, or fewer if --hours are short",
    "batch": "tokens per training step",
    "passes": "training passes over the generated text",
    "vocabulary": "number of token ids that the drafter can draft",
}

count_flag, steps_flag = flag_type(WholeRange(1).parse), flag_type(STEPS.parse)
rate_flag = flag_type(RealRange("learning rate", 0, 1, excludes_low=True).parse)
hours_flag = flag_type(RealRange("number of hours", 0, 9999, excludes_low=True).parse)


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The settings of a distillation. The field names are the keys of plan.json.

    tokens: how many to generate. hours: time limit for generation and training together, 0 for none. length: of the
    longest conversations. page, batch: tokens that are generated in parallel, and that a training step reads. kind: of
    the drafter. steps: drafts that training is unrolled over, or the drafts of a block. rate: Muon's learning rate, for
    matrices; rate_rest: AdamW's, for all other weights. start: folder of a drafter to train further. engine: what
    computes the target; empty until it is chosen.
    """

    target: str
    tokens: int = 1_000_000
    hours: float = 0.0
    device: str = "auto"
    prompts: str | None = None
    start: str | None = None
    seed: int = 0
    length: int = 2048
    page: int = 32768
    batch: int = 2048
    passes: int = 4
    kind: str = "eagle3"
    steps: int = 3
    vocabulary: int = 8192
    rate: float = 0.02
    rate_rest: float = 0.001
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """A plan, the folder of the drafter, and whether to resume and to keep the work folder."""

    plan: TrainingPlan
    out: Path
    resume: bool
    keep: bool

    @property
    def work(self) -> Path:
        """The folder of pages and checkpoints."""
        return self.out / "work"


def parse_options(argv: list[str] | None = None) -> Options:
    """The options from the command line.

    Invalid flags make argparse exit with status 2. Raises UserError if the flags do not fit the contents of the folder.
    """
    parser = _parser()
    flags = parser.parse_args(argv)
    if not flags.length <= flags.batch <= flags.page:
        parser.error(f"--length {flags.length}, --batch {flags.batch} and --page {flags.page} must not descend")
    flags.steps = flags.steps or USUAL_STEPS[flags.kind]
    plan = TrainingPlan(**{field.name: getattr(flags, field.name) for field in fields(TrainingPlan)})
    options = Options(plan, flags.out.expanduser(), flags.resume, flags.keep)
    return _resumed(options) if options.resume else _checked(options)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON; an interruption leaves the old file in place."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1).encode())


def public_settings(plan: TrainingPlan) -> dict[str, Any]:
    """The plan without paths of this machine, which mean nothing elsewhere. In their place stand names of flags."""
    settings = asdict(plan) | ({"target": "TARGET"} if Path(plan.target).expanduser().exists() else {})
    return settings | {name: name.upper() for name in ("prompts", "start") if settings[name]}


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
    if not options.plan.target:
        raise UserError("--target is missing: name the model to train a drafter for, for example --target embedded.")
    if file := next((path for path in (options.out, *options.out.parents) if path.is_file()), None):
        raise UserError(f"{file} is a file and not a folder: choose a different folder for --out.")
    if (options.work / PLAN_FILE).is_file():
        raise UserError(f"{options.out} has unfinished work: add --resume to continue, or choose a different folder.")
    written = [*options.out.glob("*.safetensors"), *options.out.glob("*.json"), *options.out.glob("README.md")]
    if written:
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
    add("--hours", type=hours_flag, metavar="H", help="time limit, of which less than half is for generation")
    add("--device", type=device_flag, metavar="auto|cpu|cuda|cuda:N|mps", help="default: auto")
    add("--prompts", metavar="FILE", help="questions to answer, one per line (default: the target writes them too)")
    add("--start", metavar="FOLDER", help="continue training the drafter in this folder instead of a new one")
    add("--resume", action="store_true", help="continue interrupted work in the --out folder")
    add("--keep", action="store_true", help="keep generated text and checkpoints in FOLDER/work when finished")
    add("--seed", type=seed_flag, metavar="N", help=f"0 to {MAX_SEED} (default: 0)")
    for name, meaning in COUNT_FLAGS.items():
        add(f"--{name}", type=count_flag, metavar="N", help=f"{meaning} (default: %(default)s)")
    add("--kind", choices=USUAL_STEPS, help="a pass for each draft, or one for a block of drafts (default: eagle3)")
    usual = ", ".join(f"{steps} for {kind}" for kind, steps in USUAL_STEPS.items())
    add("--steps", type=steps_flag, metavar="N", help=f"consecutive drafts to train for, {STEPS} (default: {usual})")
    add("--rate", type=rate_flag, metavar="R", help="learning rate (default: %(default)s)")
    parser.set_defaults(**asdict(TrainingPlan(target="")) | {"steps": None})
    return parser
