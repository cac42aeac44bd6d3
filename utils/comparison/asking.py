"""From a prompt to what each strategy is asked: which of them can run, behind which conversation, and whether there is room."""

from collections.abc import Callable, Sequence

from utils.comparison.harness import Asked, Bench
from utils.comparison.strategies import Strategy
from utils.config.settings import Settings
from utils.decode.model_session import ModelSession, context_length
from utils.errors import NoRoom
from utils.prompts.conversation import advised

NO_DRAFTER = "No drafter is loaded: strategies that need one are left out (--drafter loads one)."


def asked(bench: Bench, text: str, settings: Settings, note: Callable[[str], None]) -> list[Asked]:
    """Raises UserError for a prompt that the target cannot take. note: hears each reason to draft nothing."""
    told = bench.asked(text, settings, _chosen(bench, settings, note))
    _check(bench, told, note)
    return told


def _chosen(bench: Bench, settings: Settings, note: Callable[[str], None]) -> list[Strategy]:
    """The strategies that are on and can run."""
    lacking = [row for row in bench.variants(settings) if row.needs_drafter and row.is_on(settings)]
    if bench.pair.drafter is None and lacking:
        note(NO_DRAFTER)
    return bench.enabled(settings)


def _check(bench: Bench, told: Sequence[Asked], note: Callable[[str], None]) -> None:
    """An unusable prompt is refused once, not by every strategy; one that is too long for the drafter gets a note."""
    session = ModelSession(bench.pair.target, use_cache=False)
    for _, job in told:
        try:
            session.begin(job.prompt)
        except NoRoom as error:
            raise advised(error, job.history) from error
    longest = max((len(job.prompt) for strategy, job in told if strategy.needs_drafter), default=0)
    bound = context_length(bench.pair.drafter) if longest else None
    if bound is not None and longest >= bound:
        note(f"The prompt has {longest} tokens and the drafter a context of {bound}: it will draft nothing.")
