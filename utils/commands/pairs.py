"""/load and /pair: load other models within the session, and check whether two models fit together."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from utils.commands.shared.columns import NOTHING, ResultColumn, ResultTable, Row
from utils.commands.shared.outcomes import Outcome, Reply, RunReport, ShowRows, UsePair
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.harness import Harness
from utils.comparison.reports import Finding, Note, Progress, Report, ReportEvent
from utils.config.settings import Settings
from utils.errors import UserError
from utils.models.feature_drafter import FeatureDrafter
from utils.pairs.doctor import (
    DEPTH,
    OWN_PROMPT,
    TEXT_TOKENS,
    Examination,
    Reading,
    examine,
    other_readings,
    own_text,
    use,
)
from utils.pairs.request import PAIRS, PUBLISHED, PairRequest, PairSpec, parse_request

LIST, DOCTOR = "list", "doctor"
LIST_MEANING = "the pairs that can be loaded by name"
DOCTOR_MEANING = "whether a drafter that reads hidden states reads the right ones"
NOT_TRIED = (
    "not tried: no hub connection where this was built. The ids are those of published drafters; their formats were "
    "checked on random weights."
)
CORRECTED = "The correction holds from now on, and at later starts; results so far were those of the old reading."


def _load(argument: str, context: CommandContext) -> Outcome:
    harness = context.harness
    current = harness.pair.request if harness.has_pair else PairRequest("", None)
    request = parse_request(argument, current, context.pairs)
    if not request.target:
        raise UserError("name a target too, because no model is loaded: /load target=FOLDER, or a pair by name.")
    return [UsePair(request)]


def _pair(argument: str, context: CommandContext) -> Outcome:
    if argument.lower() == LIST:
        return _known(context)
    if argument.lower() == DOCTOR:
        return _doctor(context)
    if argument:
        raise UserError(
            f"'{argument}' is unknown; /pair checks the loaded pair, /pair {DOCTOR} how its drafter is read, and "
            f"/pair {LIST} lists others for /load."
        )
    found = context.harness.pair.compatibility
    findings = [(finding.what, finding.value, finding.remark) for finding in found.findings]
    return [ShowRows([("verdict", found.verdict, found.reason), *findings])]


def _doctor(context: CommandContext) -> Outcome:
    """Compare the readings of the loaded drafter, and switch to the best one if it is significantly better."""
    harness, settings, name = context.harness, context.settings, context.harness.pair.drafter_name
    drafter = harness.pair.drafter
    if not isinstance(drafter, FeatureDrafter):
        raise UserError(
            "/pair doctor examines drafters that read hidden states of the target, such as EAGLE-3 heads: "
            f"{name or 'this pair'} is not one."
        )
    done: list[Examination] = []
    events = _examined(harness, settings, drafter, done)

    def conclusion(_: Sequence[Finding]) -> list[str]:
        # Empty if it was interrupted.
        return [line for found in done for line in (found.conclusion(), *([CORRECTED] if found.better else []))]

    return [
        RunReport(
            Report("doctor", OWN_PROMPT, settings, TABLE.headings, events, conclusion, title=f"/pair doctor: {name}")
        )
    ]


def _examined(
    harness: Harness, settings: Settings, drafter: FeatureDrafter, done: list[Examination]
) -> Iterator[ReportEvent]:
    pair, prompt = harness.pair, harness.prompt_ids(OWN_PROMPT, settings)
    yield Progress(f"generating {TEXT_TOKENS} tokens of the target ...")
    text = own_text(pair.target, prompt, TEXT_TOKENS, pair.engine.report)
    found = examine(drafter, pair.target, text, len(prompt), report=pair.engine.report)
    if not other_readings(drafter):
        yield Note("This format leaves nothing to convention.")
    # Nothing below takes time, so that Ctrl-C cannot come between the correction and its findings.
    if found.better is not None:
        use(pair, found.used.conventions)
    done.append(found)
    for reading in found.readings:
        yield TABLE.finding(_figures(reading, found))


def _agreement(place: int) -> ResultColumn:
    """The agreement of one draft, with a dash for drafts beyond those of the drafter."""

    def shown(row: Row) -> str:
        return f"{row['agreement'][place]:.2f}" if place < len(row["agreement"]) else NOTHING

    return ResultColumn(f"draft {place + 1}", shown)


TABLE = ResultTable(
    ResultColumn("reading", lambda row: row["reading"] or "as it is read now"),
    *(_agreement(place) for place in range(DEPTH)),
)


def _figures(reading: Reading, found: Examination) -> dict[str, object]:
    return {
        "reading": reading.name,
        **asdict(reading.conventions),
        "agreement": list(reading.agreement),
        "positions": found.positions,
        "is_used": reading is found.used,
        "reads_target": found.reads_target,
        "displaced_agreement": found.displaced,
    }


def _known(context: CommandContext) -> Outcome:
    loaded = context.harness.pair.request if context.harness.has_pair else PairRequest("", None)
    rows = [(name, _state(name, pair, loaded), _description(pair)) for name, pair in context.pairs.items()]
    return [ShowRows(rows), Reply(NOT_TRIED)]


def _state(name: str, pair: PairSpec, loaded: PairRequest) -> str:
    if (pair.target, pair.drafter) == (loaded.target, loaded.drafter):
        return "loaded"
    return "not tried" if name in PUBLISHED else ""


def _description(pair: PairSpec) -> str:
    return f"{pair.target} + {pair.drafter or 'the first layers of the target'}: {pair.summary}"


PAIR_COMMANDS = (
    Command(
        "load",
        "PAIR",
        "load other models",
        _load,
        group="models",
        rank=1,
        page=Page(
            "Load other models: a pair by name, or a target and a drafter. What is not named stays the same, but a new "
            "target drops the old drafter. If loading fails, the old pair stays.",
            ("> /load target=Qwen/Qwen3-4B drafter=Qwen/Qwen3-0.6B", "target Qwen3-4B, drafter Qwen3-0.6B"),
            ("/load PAIR    one of /pair list", "/load target=... drafter=... quantize=... device=... dtype=..."),
            ("pair", "drafter_kind"),
        ),
        words={name: pair.summary for name, pair in PAIRS.items()},
    ),
    Command(
        "pair",
        f"[{LIST}|{DOCTOR}]",
        "whether the two models fit together",
        _pair,
        group="models",
        page=Page(
            "Whether the two loaded models fit together, why, and what to change: vocabularies, sizes, context lengths "
            "and caches.",
            ("> /pair", "verdict   fine"),
            ("/pair", f"/pair {LIST}    {LIST_MEANING}", f"/pair {DOCTOR}    {DOCTOR_MEANING}"),
            ("load",),
        ),
        words={LIST: LIST_MEANING, DOCTOR: DOCTOR_MEANING},
    ),
)
