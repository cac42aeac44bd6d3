"""One recorded run, run again with its settings and the present models, as /replay and /gate do."""

from utils.commands.shared.registry import CommandContext
from utils.comparison.arms import complete
from utils.comparison.records import SERVER, RecordedRun, RunMatch, circumstances
from utils.comparison.warm_up import shortened
from utils.config.settings import from_json
from utils.errors import UserError, check_choice
from utils.prompts.conversation import turns_from_messages

DIFFERENT = "What differs between A and B:"
KEPT_STORAGE = "recorded with /ngram keep on: drafts may come from earlier prompts, so the acceptance may differ"


def rerun(past: RecordedRun, context: CommandContext, warm: set[tuple[str, ...]]) -> RunMatch:
    """The record with its run of now. Raises UserError if it cannot run. `warm` has what has been warmed up.

    `repeats_target` in the row of now is True if the text is guaranteed to be that of the target.
    """
    harness, row = context.harness, past.row
    if row.get(SERVER):
        raise UserError("it is the answer of a server: only runs of strategies are replayed.")
    # An unsupported value becomes a note and keeps its default, so the record can still run.
    settings, notes = from_json(row["settings"], context.limits)
    strategies = {strategy.name: strategy for strategy in harness.variants(settings)}
    strategy = strategies[check_choice(row["strategy"], tuple(strategies), "strategy")]
    if strategy.needs_drafter and harness.pair.drafter is None:
        raise UserError("No drafter is loaded: start with --drafter, or /load one.")
    arm, prompt, history = harness.arm(strategy), row["prompt"], turns_from_messages(row.get("history") or ())
    if (key := (strategy.name, *settings.drafter_kind)) not in warm:
        complete(arm.run(prompt, shortened(settings), history))
        warm.add(key)
    run = complete(arm.run(prompt, settings, history))
    if not run.tokens_per_second:
        raise UserError("the run has no speed.")
    now = {
        **row,
        **circumstances(harness.pair, settings),
        "settings": row["settings"],  # what is not supported here is in the notes
        "token_ids": run.tokens,
        "drafter_kind": strategy.drafter_label(harness.pair),
        "repeats_target": harness.pair.engine.state.verified and strategy.repeats_target(settings),
        **{name: getattr(run, name) for name in ("tokens_per_second", "text", "prompt_tokens", "accepted", "drafted")},
    }
    if strategy.kind.keeps_texts and not settings.reset_in_between:
        notes.append(KEPT_STORAGE)
    return RunMatch([past], [RecordedRun(past.line, now)], notes)
