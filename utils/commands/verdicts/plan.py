"""Which prompts /verdict measures, and on which other prompts it chooses a candidate.

A candidate that is chosen on the measured prompts would look better than it is. Only with too few prompts to divide are
both done on the same prompts, in different repeats; then the answer holds for these prompts only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from utils.commands.experiments.paired_runs import check_prompt
from utils.comparison.harness import Harness
from utils.config.settings import Settings
from utils.errors import UserError
from utils.models.sources import parse_path
from utils.prompts.prompt_files import Prompt, read_prompts, spaced, tasks_in_turn
from utils.text import encodable

BUILT_IN = "builtin"  # the argument that chooses the built-in prompts
FOLDER = Path(__file__).parent
FEW = 5  # this many prompts or fewer are not divided
MOST_TUNING = 3
MOST_MEASURED = 24  # of more prompts, this many are measured, evenly spaced
TUNING_SHARE = 4  # one of this many prompts is for tuning


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompts of one verdict.

    `source` describes the prompts, in plural. A candidate is chosen on the `tuning` prompts. `divided` is True if these
    differ from the measured ones. `left_out` is the number of prompts beyond the maximum.
    """

    source: str
    measured: tuple[Prompt, ...]
    tuning: tuple[Prompt, ...]
    divided: bool = True
    left_out: int = 0

    @property
    def total(self) -> int:
        """The number of available prompts."""
        return len(self.measured) + self.left_out + (len(self.tuning) if self.divided else 0)

    def named(self, count: int) -> str:
        """This many of these prompts, in words."""
        return f"{count} {self.source if count != 1 else self.source.replace('prompts', 'prompt', 1)}"


def plan_prompts(argument: str, typed: Sequence[str]) -> PromptPlan:
    """The prompts of the argument, otherwise the typed ones, otherwise the built-in ones.

    Raises UserError for a file that cannot be read or has no prompts.
    """
    if argument == BUILT_IN or not (argument or typed):
        tuning = tuple(read_prompts(FOLDER / "tuning.jsonl"))
        return PromptPlan("built-in prompts", tasks_in_turn(list(read_prompts(FOLDER / "prompts.jsonl"))), tuning)
    if not argument:
        return divide("prompts of this session", [Prompt(text) for text in dict.fromkeys(typed)])
    path = parse_path(argument)
    prompts = list(dict.fromkeys(read_prompts(path)))
    if not prompts:
        raise UserError(f"the prompts file {path} has no prompts: write one per line.")
    return divide(f"prompts of {path.name}", prompts)


def divide(source: str, prompts: Sequence[Prompt]) -> PromptPlan:
    """Divide prompts into measured ones and a few for tuning, if there are enough.

    Tuning prompts are evenly spaced, so that a file sorted by task does not lose a whole task to them.
    """
    if len(prompts) <= FEW:
        return PromptPlan(source, tuple(prompts), spaced(prompts, MOST_TUNING), divided=False)
    tuning = spaced(prompts, min(MOST_TUNING, len(prompts) // TUNING_SHARE))
    others = [prompt for prompt in prompts if prompt not in tuning]
    measured = tasks_in_turn(spaced(others, MOST_MEASURED))
    return PromptPlan(source, measured, tuning, left_out=len(others) - len(measured))


def usable_prompts(
    harness: Harness, settings: Settings, prompts: Sequence[Prompt]
) -> tuple[dict[int, Prompt], list[str]]:
    """The prompts by their number, from 1, and a sentence for each that the target cannot take."""
    usable, skipped = dict[int, Prompt](), list[str]()
    for number, prompt in enumerate(prompts, start=1):
        prompt = replace(prompt, text=encodable(prompt.text))
        try:
            check_prompt(harness, prompt, settings)
        except UserError as error:
            skipped.append(f"Prompt {number} was skipped: {error}")
        else:
            usable[number] = prompt
    return usable, skipped
