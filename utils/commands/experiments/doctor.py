"""/pair doctor: whether a drafter that reads hidden states is read as it was trained."""

from collections.abc import Iterator, Sequence

from utils.commands.outcomes import Outcome, RunReport
from utils.commands.registry import CommandContext
from utils.comparison.harness import Harness
from utils.comparison.reports import Finding, Note, Progress, Report, ReportEvent
from utils.config.settings import Settings
from utils.errors import UserError
from utils.models.feature_drafter import FeatureDrafter
from utils.pairs.doctor import DEPTH, TEXT_TOKENS, Diagnosis, Reading, examine, own_text

OWN_PROMPT = "Explain in a few paragraphs how bread is made, from the field to the table."
PRESENT = "as it is read now"
HEADINGS = ("reading", *(f"draft {place}" for place in range(1, DEPTH + 1)))
LITTLE = 0.15  # agreement of the first draft below which a drafter is of little use


def doctor(context: CommandContext) -> Outcome:
    """Compare the readings of the loaded drafter, and use the best one from now on if it is significantly better."""
    harness, settings = context.harness, context.settings
    drafter = harness.pair.drafter
    if not isinstance(drafter, FeatureDrafter):
        raise UserError(
            "/pair doctor examines drafters that read hidden states of the target, such as EAGLE-3 heads: "
            f"{harness.pair.drafter_name or 'this pair'} is not one."
        )
    events = _events(harness, settings, drafter)
    title = f"/pair doctor: {harness.pair.drafter_name}"
    return [RunReport(Report("doctor", OWN_PROMPT, settings, HEADINGS, events, _conclusion, title=title))]


def _events(harness: Harness, settings: Settings, drafter: FeatureDrafter) -> Iterator[ReportEvent]:
    target, prompt = harness.pair.target, harness.prompt_ids(OWN_PROMPT, settings)
    yield Progress(f"generating {TEXT_TOKENS} tokens of the target ...")
    text = own_text(target, prompt)
    yield Progress(f"comparing {1 + len(drafter.readings())} readings of the drafter ...")
    found = examine(drafter, target, text, len(prompt))
    if found.better is not None:
        drafter.conventions = found.better.conventions
    for reading in found.readings:
        yield Finding(_cells(reading), _figures(reading, found))
    if not drafter.readings():
        yield Note("This format leaves nothing to convention.")


def _cells(reading: Reading) -> tuple[str, ...]:
    shares = [f"{share:.2f}" for share in reading.agreement]
    return (reading.name or PRESENT, *shares, *["-"] * (DEPTH - len(shares)))


def _figures(reading: Reading, found: Diagnosis) -> dict[str, object]:
    return {
        "reading": reading.name,
        "feature_layers": list(reading.conventions.feature_layers),
        "agreement": list(reading.agreement),
        "positions": found.positions,
        "is_used": reading is (found.better or found.readings[0]),
        "reads_target": found.reads_target,
    }


def _conclusion(findings: Sequence[Finding]) -> list[str]:
    """Which reading is used, and whether the drafter fits the target at all."""
    if not findings:
        return []
    rows = [finding.figures for finding in findings]
    used, present = next(row for row in rows if row["is_used"]), rows[0]
    agreement, positions = used["agreement"][0], used["positions"]
    if not used["reads_target"]:
        return [
            f"The drafter predicts the target's text no better from its hidden states than from those of other "
            f"positions ({agreement:.2f} at {positions} positions): it was probably made for a different target. Use a "
            "different --drafter."
        ]
    if used is not present:
        place = 1 + max(range(DEPTH), key=lambda index: used["agreement"][index] - present["agreement"][index])
        before, after = present["agreement"][place - 1], used["agreement"][place - 1]
        return [
            f"The drafter is now read with {used['reading']}: draft {place} agrees with the target's text at "
            f"{after:.2f} of {positions} positions, before at {before:.2f}."
        ]
    lines = [f"The present reading is right: no other one is significantly better at {positions} positions."]
    if agreement < LITTLE:
        lines.append(f"Only {agreement:.2f} of the first drafts agree with the target's text: a weak drafter.")
    return lines
