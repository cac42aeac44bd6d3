"""/learn: the loaded drafter learns from the session's prompts in the background, and is used if that made it faster.

The target answers some of the prompts again and again, and `sampling.distill` trains the drafter further on that text.
The others are kept apart: on them the new drafter runs in turns with the old one, and the rule of all races decides.
/learn ngram fills the n-gram storage from files instead.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from utils.bounds import RealRange
from utils.commands.experiments.races import RaceItem, race_row, race_table, then_rows
from utils.commands.shared.registry import (
    ChangeSettings,
    Command,
    CommandContext,
    Outcome,
    RaceDrafters,
    Reply,
    UseTraining,
    path_in,
)
from utils.commands.shared.result_tables import Row
from utils.commands.verdicts.measurement import Measurement, PromptPlan, run_length, run_seconds, started_clock
from utils.commands.verdicts.selection import race_of
from utils.comparison.arms import LocalArm, complete
from utils.comparison.harness import Harness
from utils.comparison.records import Report
from utils.comparison.speed_claims import FASTER, MIN_VALUES, SLOWER, claim_text, no_difference
from utils.comparison.training import Training
from utils.comparison.warm_up import shortened as warm_up_settings
from utils.config.settings import Settings
from utils.decode.model_info import context_length
from utils.drafter_formats.eagle3 import Eagle3
from utils.drafter_formats.eagle3_file import can_be_stored
from utils.errors import UserError
from utils.files import read_text, user_folder
from utils.models.embedded import EMBEDDED_HEAD
from utils.models.memory import free_bytes, needed_bytes, weight_counts
from utils.models.sources import cached_folder, locate, parse_path
from utils.pairs.load_pair import with_drafter
from utils.pairs.pair import Pair
from utils.pairs.request import HEAD, LOADED
from utils.prompts.prompt_files import ALL_TASKS, Prompt, read_prompts, spaced
from utils.text import Count, byte_size, count_of

NGRAM, WAIT, STOP = "ngram", "wait", "stop"
MINUTES = RealRange("number of minutes", 0, 1440, excludes_low=True)
DEFAULT_MINUTES = 5.0
FEWEST = 2 * MIN_VALUES  # prompts: at least so many are kept apart that a verdict is possible, and as many are learned
APART_SHARE, MOST_APART = 3, 12  # one of so many prompts is kept apart
PAGE = 8192  # tokens generated side by side
STEP = 512  # tokens of a training step, so few that a CPU makes some dozens of steps in minutes
LONGEST, MULTIPLE = 2048, 64  # tokens of a conversation, and what their number is a multiple of
RATE = 0.002  # the learning rate, a tenth of that of a new drafter
TOKENS_PER_MINUTE = 27_000  # the most that are generated, which bounds the disk
OLD, NEW = "old drafter", "new drafter"
CANNOT = (
    "only drafters of the kind EAGLE-3 learn, such as the embedded head: not other models, layers of the target, "
    "blocks (DFlash, P-EAGLE), MTP layers or Gemma's assistants."
)
KEPT_APART = "prompts kept apart"
WARM_UP = "Hello"


def _learn(argument: str, context: CommandContext) -> Outcome:
    word, _, rest = argument.partition(" ")
    training = context.harness.state.training
    if word == NGRAM:
        return _learn_ngrams(rest.strip(), context)
    if argument in (WAIT, STOP):
        if training is None:
            raise UserError("nothing is being learned: /learn begins.")
        if argument == STOP:
            return [UseTraining(None), Reply("the training was ended; the drafter is as before")]
        return [drafter_race(context.harness, context.settings)]
    if training is not None and not argument:
        return [Reply(training.state)]
    if training is not None:
        raise UserError("a drafter is learning already: /learn wait races it, /learn stop ends it.")
    return _start(argument, context)


def _start(argument: str, context: CommandContext) -> Outcome:
    """Check everything that a training needs, and start it."""
    number, file = re.fullmatch(r"([-+.]?\d\S*)?\s*(.*)", argument, re.DOTALL).groups()  # type: ignore[union-attr]
    minutes = MINUTES.parse(number) if number else DEFAULT_MINUTES
    harness, settings = context.harness, context.settings
    folder = _folder_of(harness.pair)
    if settings.chat_template and not settings.uses_chat:
        raise UserError("the target answers in its chat template, and /chat is off: turn it on first.")
    texts = (prompt.text for prompt in read_prompts(parse_path(file))) if file else harness.state.prompts
    prompts = [Prompt(text) for text in dict.fromkeys(texts)]
    if (missing := FEWEST - len(prompts)) > 0:
        raise UserError(
            f"{count_of(missing, 'more different prompt')} {'is' if missing == 1 else 'are'} needed: there are "
            f"{len(prompts)}, and {FEWEST} are the fewest to learn from and to race on. /learn FILE reads more."
        )
    apart = spaced(prompts, min(MOST_APART, max(MIN_VALUES, len(prompts) // APART_SHARE)))
    learned = [prompt for prompt in prompts if prompt not in apart]
    tokens = int(minutes * TOKENS_PER_MINUTE)
    _check_budget(harness.pair, tokens)
    longest = max(len(harness.prompt_ids(prompt.text, settings)) for prompt in learned) + settings.length
    length = min(LONGEST, -(-longest // MULTIPLE) * MULTIPLE, context_length(harness.pair.target) or LONGEST)
    flags = {
        "target": harness.pair.request.target,
        "device": harness.pair.request.device,
        "start": folder,
        "hours": minutes / 60,
        "tokens": tokens,
        "length": length,
        "page": PAGE,
        "batch": max(STEP, length),
        "rate": RATE,
    }
    start = partial(Training, _home(), learned, apart, flags)
    about = f"learning from {len(learned)} prompts for about {minutes:g} min, at low priority and not while a line runs"
    kept = f"{len(apart)} prompts are kept apart for the race, at the first prompt after that or with /learn wait"
    return [UseTraining(start), Reply(f"{about}; {kept}")]


def _home() -> Path:
    """Where learned drafters are kept."""
    return user_folder("state") / "drafters"


def _folder_of(pair: Pair) -> Path:
    """The folder of the loaded drafter. Raises UserError if it cannot be trained."""
    name = pair.request.drafter or ""
    if isinstance(pair.drafter, Eagle3) and can_be_stored(pair.drafter):
        path = EMBEDDED_HEAD if name == HEAD else parse_path(name)
        repository, _, revision = name.partition("@")
        if folder := path if path.is_dir() else cached_folder(repository, revision or None):
            return folder.resolve()
    raise UserError(CANNOT)


def _check_budget(pair: Pair, tokens: int) -> None:
    """Raise UserError if memory or disk do not suffice for a training on this many tokens."""
    target = needed_bytes(weight_counts(locate(pair.request.target, pair.engine.report)), torch.float32, "none")
    drafter = pair.drafter_memory or 0
    hidden = int(pair.target.config.get_text_config(decoder=True).hidden_size)
    states = 2 * hidden * (len(pair.feature_layers) + 1) * tokens
    home = _home()
    disk = shutil.disk_usage(next(folder for folder in home.parents if folder.exists())).free
    for what, needed, free in (
        ("memory", target + 8 * drafter + 1_000_000_000, free_bytes(pair.device)),
        (f"space in {home}", states + 4 * drafter, disk),
    ):
        if needed > free:
            raise UserError(f"the training needs {byte_size(needed)} of {what}, and {byte_size(free)} are free.")


@dataclass(slots=True)
class _Race:
    """The old and the new drafter on the prompts kept apart.

    `folder` and `new` have the new one once it is loaded. `row` has the figures of a race that was finished.
    """

    harness: Harness
    settings: Settings
    training: Training
    folder: Path = Path()
    new: Pair | None = None
    measurement: Measurement | None = None
    row: Row | None = None

    def report(self) -> Report:
        prompts = self.training.apart
        table = race_table([RaceItem(number, one, ALL_TASKS, self.settings, ()) for number, one in enumerate(prompts)])
        return table.report(
            *("learn", KEPT_APART, self.settings, then_rows(self._run, self._rows)),
            conclude=lambda rows: [self._conclusion()],
            title=f"/learn: {count_of(len(prompts), 'prompt')} kept apart",
        )

    def _run(self) -> None:
        progress = self.harness.progress
        if self.training.is_running:
            progress("waiting for the training ...")
        for state in self.training.wait():
            progress(Count(f"{state} ..."))
        self.folder = self.training.drafter()
        old = self.harness.pair
        self.new = with_drafter(old, self.folder)
        try:
            strategy = next(one for one in self.harness.variants(self.settings) if one.chooses_kind)
            arms = [
                LocalArm(replace(strategy, name=name, baseline=OLD), pair)
                for name, pair in ((OLD, old), (NEW, self.new))
            ]
            race = race_of(self.harness, dict(enumerate(self.training.apart, start=1)), self.settings, arms)
            progress("warming up both drafters ...")
            for arm in arms:
                complete(arm.run(WARM_UP, warm_up_settings(self.settings)))
            self.measurement = Measurement(race, NEW, divided=True, clock=started_clock())
            self.measurement.run()
            *_, self.row = self._rows()
        finally:
            if self.row is None or self.row["verdict"] != FASTER:
                old.engine.drop_helper(cast(Any, self.new.drafter))

    def _rows(self) -> Iterator[dict[str, Any]]:
        if (measured := self.measurement) is not None and measured.speedups:
            yield race_row(ALL_TASKS, measured.baseline_results)
            yield measured.candidate_row(PromptPlan(KEPT_APART, self.training.apart, ()), self.settings)

    def _conclusion(self) -> str:
        if self.row is None:
            return "The race was not finished, so the old drafter stays. /learn wait races them again."
        row = self.row
        claim = claim_text({**row, "baseline": "the old one"}, f" over {count_of(row['prompts'], 'prompt')}")
        if row["verdict"] in (FASTER, SLOWER):
            about = f"The new drafter is {row['verdict']}: {claim}"
        else:
            about = f"The new drafter is {claim}, {no_difference(row)}"
        use = "It drafts from now on, and /undo goes back" if self.winner() else "The old drafter stays"
        return f"{about}. {use}. The new one is kept in {self.folder}, for --drafter and /load."

    def winner(self) -> Pair | None:
        """The pair with the new drafter if it is faster."""
        return self.new if self.row is not None and self.row["verdict"] == FASTER else None


def drafter_race(harness: Harness, settings: Settings) -> RaceDrafters:
    """The race of a training of this session, which it waits for."""
    training = harness.state.training
    assert training is not None
    length = run_length(harness.pair.engine.step_seconds, settings.length, run_seconds(len(training.apart)))
    race = _Race(harness, replace(settings, drafter_kind=(LOADED,), turns=False, length=length), training)
    return RaceDrafters(race.report(), race.winner)


def _learn_ngrams(argument: str, context: CommandContext) -> Outcome:
    """Fill an n-gram storage from a file, or from all texts of a folder, until it is full."""
    path, harness, settings = path_in(argument, "/learn ngram notes.txt"), context.harness, context.settings
    storage, tokenizer, read = harness.new_storage(settings), harness.pair.tokenizer, 0
    files = _files_in(path) if path.is_dir() else [path]
    for file in files:
        try:
            text = read_text(file)
        except UserError:  # not text
            if not path.is_dir():
                raise
            continue
        storage.initialize(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        read += 1
        if len(storage) >= storage.limit:
            break
    if not storage:
        raise UserError(f"{path} holds no text.")
    full = "; the storage is full, /ngram limit allows more" if len(storage) >= storage.limit else ""
    learned = f"{count_of(len(storage), 'n-gram')} from {read} of {count_of(len(files), 'file')}{full}"
    kept = "; /ngram keep was turned on, so that they are used" if settings.reset_in_between else ""
    return [ChangeSettings(replace(settings, reset_in_between=False)), storage, Reply(f"{learned}{kept}")]


def _files_in(folder: Path) -> list[Path]:
    """All files in a folder and its folders, without those that are hidden."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


LEARN = Command(
    "learn",
    "[MINUTES]",
    "make the drafter learn your prompts",
    _learn,
    group="models",
    about="The target answers your prompts again and again, and the drafter is trained further on these answers, at "
    "low priority and never while a line runs. Then it is raced against the old one on prompts that were kept apart, "
    f"and is used if it is faster. It needs {FEWEST} prompts, of this session or of a FILE, and an EAGLE-3 drafter.",
    example=("> /learn ngram notes.txt", "1242 n-grams from 1 of 1 file"),
    syntax=(
        f"/learn [MINUTES] [FILE]       begin ({DEFAULT_MINUTES:g} minutes), or show how far it is",
        "/learn wait                   wait for it, and race the drafters",
        "/learn stop                   end it",
        "/learn ngram FOLDER|FILE      fill the n-gram storage from texts or code",
    ),
    words={WAIT: "wait for it, and race", STOP: "end it", NGRAM: "fill the n-gram storage from files"},
    files=("",),
)
