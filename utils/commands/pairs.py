"""/load and /pair: load other models within the session, and check whether two models fit together."""

from utils.commands.experiments.doctor import doctor
from utils.commands.outcomes import Outcome, Reply, ShowRows, UsePair
from utils.commands.registry import Command, CommandContext, Page
from utils.errors import UserError
from utils.pairs.known_pairs import PAIRS, PairSpec
from utils.pairs.request import PairRequest, parse_request

LIST, DOCTOR = "list", "doctor"
NOT_TRIED = (
    "not tried: no hub connection where this was built. The ids are those of published drafters; their formats were "
    "checked on random weights."
)


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
        return doctor(context)
    if argument:
        raise UserError(
            f"'{argument}' is unknown; /pair checks the loaded pair, /pair {DOCTOR} how its drafter is read, and "
            f"/pair {LIST} lists others for /load."
        )
    found = context.harness.pair.compatibility
    findings = [(finding.what, finding.value, finding.remark) for finding in found.findings]
    return [ShowRows([("verdict", found.verdict, found.reason), *findings])]


def _known(context: CommandContext) -> Outcome:
    loaded = context.harness.pair.request if context.harness.has_pair else PairRequest("", None)
    rows = [(name, _state(pair, loaded), _description(pair)) for name, pair in context.pairs.items()]
    untried = any(not pair.is_tried for pair in context.pairs.values())
    return [ShowRows(rows), *([Reply(NOT_TRIED)] if untried else [])]


def _state(pair: PairSpec, loaded: PairRequest) -> str:
    if (pair.target, pair.drafter) == (loaded.target, loaded.drafter):
        return "loaded"
    return "" if pair.is_tried else "not tried"


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
        words=tuple(PAIRS),
        meanings={name: pair.summary for name, pair in PAIRS.items()},
    ),
    Command(
        "pair",
        f"[{LIST}|{DOCTOR}]",
        "whether the two models fit together",
        _pair,
        group="models",
        page=Page(
            "Whether the two loaded models fit together, why, and what to change: vocabularies, special tokens, chat "
            "template, sizes, context lengths and caches.",
            ("> /pair", "verdict   fine"),
            (
                "/pair",
                f"/pair {LIST}    the pairs that can be loaded by name",
                f"/pair {DOCTOR}    whether a drafter that reads hidden states reads the right ones",
            ),
            ("load",),
        ),
        words=(LIST, DOCTOR),
        meanings={
            LIST: "the pairs that can be loaded by name",
            DOCTOR: "whether a drafter that reads hidden states reads the right ones",
        },
    ),
)
