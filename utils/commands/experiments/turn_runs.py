"""Runs all turns of a prompt of a file, as the conversations of Spec-Bench and SPEED-Bench are run.

Every strategy continues with its own answers, and every turn has a prefill of the whole conversation so far.
"""

from collections.abc import Callable, Sequence

from utils.comparison.harness import Harness
from utils.comparison.strategies import Strategy
from utils.config.settings import Settings
from utils.errors import UserError
from utils.metrics.results import Generation
from utils.metrics.stopwatch import Stopwatch
from utils.prompts.conversation import Turn, Turns
from utils.prompts.prompt_files import Prompt
from utils.text import decode

ONLY_FIRST_TURNS = "Only the first turn of each prompt is run, because a conversation needs a chat template (/chat on)."


def has_skipped_turns(prompts: Sequence[Prompt], settings: Settings) -> bool:
    """Whether prompts have later turns that cannot be run."""
    return not settings.uses_chat and any(prompt.later for prompt in prompts)


def turn_runs(
    harness: Harness,
    prompt: Prompt,
    strategy: Strategy,
    settings: Settings,
    *,
    ids: list[int],
    stopwatch: Callable[[], Stopwatch | None] = lambda: None,
) -> list[Generation]:
    """The run of each turn. `ids` are those of the first turn, and `stopwatch` makes a stopwatch for each turn.

    Raises UserError if a turn does not fit the models, and KeyboardInterrupt on Ctrl-C.
    """
    runs = [harness.run_alone(ids, strategy, settings, stopwatch=stopwatch())]
    history: Turns = ()
    texts = (prompt.text, *prompt.later) if settings.uses_chat else (prompt.text,)
    for number, text in enumerate(texts[1:], start=2):
        history = (*history, Turn(texts[number - 2], decode(harness.pair.tokenizer, runs[-1].tokens)))
        try:
            ids = harness.prompt_ids(text, settings, history)
            runs.append(harness.run_alone(ids, strategy, settings, history=history, stopwatch=stopwatch()))
        except UserError as error:
            raise UserError(f"Turn {number}: {error}") from error
    return runs
