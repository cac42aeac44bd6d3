"""/pair doctor: whether a drafter that reads hidden states is read as it was trained."""

from collections.abc import Iterator, Sequence

from utils.commands.outcomes import Outcome, RunReport
from utils.commands.registry import CommandContext
from utils.comparison.harness import Harness
from utils.comparison.reports import Finding, Note, Progress, Report, ReportEvent
from utils.comparison.settled_reading import remember
from utils.config.settings import Settings
from utils.errors import UserError
from utils.models.feature_drafter import FeatureDrafter
from utils.pairs.doctor import DEPTH, OWN_PROMPT, TEXT_TOKENS, Diagnosis, Reading, examine, own_text

PRESENT = "as it is read now"
HEADINGS = ("reading", *(f"draft {place}" for place in range(1, DEPTH + 1)))
LITTLE = 0.15  # agreement of the first draft below which a drafter is of little use
CORRECTED = "The correction holds from now on, and at later starts; results so far were those of the old reading."


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
    target, report, prompt = harness.pair.target, harness.pair.engine.report, harness.prompt_ids(OWN_PROMPT, settings)
    yield Progress(f"generating {TEXT_TOKENS} tokens of the target ...")
    text = own_text(target, prompt, TEXT_TOKENS, report)
    found = examine(drafter, target, text, len(prompt), report=report)
    if not drafter.readings():
        yield Note("This format leaves nothing to convention.")
    # Nothing takes time from here on, so that Ctrl-C cannot come between the correction and its findings.
    if found.better is not None:
        drafter.conventions = found.better.conventions
        remember(harness)
    for reading in found.readings:
        yield Finding(_cells(reading), _figures(reading, found))


def _cells(reading: Reading) -> tuple[str, ...]:
    shares = [f"{share:.2f}" for share in reading.agreement]
    return (reading.name or PRESENT, *shares, *["-"] * (DEPTH - len(shares)))


def _figures(reading: Reading, found: Diagnosis) -> dict[str, object]:
    return {
        "reading": reading.name,
        "feature_layers": list(reading.conventions.feature_layers),
        "norm_before_residual": reading.conventions.norm_before_residual,
        "norm_output": reading.conventions.norm_output,
        "norm_before_head": reading.conventions.norm_before_head,
        "from_anchor": reading.conventions.from_anchor,
        "agreement": list(reading.agreement),
        "positions": found.positions,
        "is_used": reading is (found.better or found.readings[0]),
        "reads_target": found.reads_target,
        "displaced_agreement": found.displaced,
    }


def _conclusion(findings: Sequence[Finding]) -> list[str]:
    """Which reading is used, and whether the drafter fits the target at all."""
    rows = [finding.figures for finding in findings]
    used = next((row for row in rows if row["is_used"]), None)
    if used is None:  # stopped before its finding
        return []
    present, agreement, positions = rows[0], used["agreement"][0], used["positions"]
    if not used["reads_target"]:
        displaced = used["displaced_agreement"]
        extent = "hardly" if agreement > displaced else "no"
        return [
            f"The drafter predicts the target's text {extent} better from its hidden states ({agreement:.2f}) than "
            f"from those of other positions ({displaced:.2f}), at {positions} positions: it was probably "
            "made for a different target, or is read in a way that was not compared. Use a different --drafter."
        ]
    if used is not present:
        places = range(min(len(used["agreement"]), len(present["agreement"])))
        place = max(places, key=lambda index: used["agreement"][index] - present["agreement"][index])
        return [
            f"The drafter is now read with {used['reading']}: draft {place + 1} agrees with the target's text at "
            f"{used['agreement'][place]:.2f} of {positions} positions, before at {present['agreement'][place]:.2f}.",
            CORRECTED,
        ]
    lines = []
    if len(rows) > 1:
        lines.append(f"The present reading is right: no other one is significantly better at {positions} positions.")
    if agreement < LITTLE:
        lines.append(f"Only {agreement:.2f} of the first drafts agree with the target's text: a weak drafter.")
    return lines or [f"The drafter reads its target: {agreement:.2f} of the first drafts agree with its text."]
