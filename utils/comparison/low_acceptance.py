"""A hint that a drafter may be read in the wrong way: hardly any first draft of a round is accepted.

The rule: at least 20 first drafts of one strategy on the loaded pair, and fewer than 4 % of them accepted. A drafter
whose first drafts are accepted with probability 0.3 meets it with probability 0.001, one with 0.2 with 0.02 (checked
after each of 20 prompts). Not more drafts, because adaptive gamma soon drafts little of what is rejected.
"""

from utils.comparison.last_prompt import LastPrompt
from utils.comparison.session_state import SessionState
from utils.models.feature_drafter import FeatureDrafter

LEAST_DRAFTS, LOW = 20, 0.04
HINT = "Only {} of {} first drafts were accepted so far: /pair doctor checks how the drafter should be read."


def low_acceptance_hint(last: LastPrompt, state: SessionState) -> str:
    """Count the loaded drafter's first drafts of the last prompt. Returns a hint once per pair if acceptance is low."""
    if not last.is_local:
        return ""
    pair = last.job.pair
    if not isinstance(pair.drafter, FeatureDrafter):
        return ""
    hint = ""
    for strategy, run, _ in last.local:
        if not strategy.drafts or strategy.drafter_label(pair) != pair.drafter_kind:
            continue
        drafted, accepted = state.first_drafts.get(strategy.name, (0, 0))
        rounds = [step.accepted > 0 for step in run.steps if step.drafted]
        drafted, accepted = drafted + len(rounds), accepted + sum(rounds)
        state.first_drafts[strategy.name] = drafted, accepted
        if not hint and is_low(drafted, accepted):
            hint = HINT.format(accepted, drafted)
    if state.said_low_acceptance or not hint:
        return ""
    state.said_low_acceptance = True
    return hint


def is_low(drafted: int, accepted: int) -> bool:
    """Whether so few first drafts were accepted that something is probably wrong."""
    return drafted >= LEAST_DRAFTS and accepted < LOW * drafted
