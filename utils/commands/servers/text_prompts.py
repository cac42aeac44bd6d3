"""Which prompts /server text sends."""

from collections.abc import Sequence

from utils.errors import UserError
from utils.models.sources import parse_path
from utils.prompts.prompt_files import read_prompts
from utils.text import count_of

OWN_PROMPTS = (
    "Repeat this list three times: apples, pears, plums, figs.",
    "Write a short story about a lighthouse keeper and a storm.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in a few sentences why the sky is blue.",
)


def prompts_of(file: str) -> list[str]:
    """The prompts of a file, or the command's own. Raises UserError for a file without any."""
    if not file:
        return list(OWN_PROMPTS)
    if found := [prompt.text for prompt in read_prompts(parse_path(file))]:
        return found
    raise UserError(f"the prompts file {file} has no prompts: write one per line.")


def chosen_text(prompts: Sequence[str], differing: Sequence[str]) -> str:
    """Which prompts are sent. differing: those on which texts differed before, if the prompts are among them."""
    if not differing:
        return count_of(len(prompts), "prompt")
    left = f" of {len(differing)}" * (len(prompts) < len(differing))
    return f"{len(prompts)}{left} prompt{'s' * (len(differing) > 1)} on which the texts differed"
