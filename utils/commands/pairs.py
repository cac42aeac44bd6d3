"""/load, /pair and /pairs: load other models within the session, and check whether two models fit together."""

from utils.commands.outcomes import Outcome, ShowRows, UsePair
from utils.commands.registry import Command, CommandContext
from utils.pairs.known_pairs import PAIRS, PairSpec
from utils.pairs.request import parse_request


def _load(argument: str, context: CommandContext) -> Outcome:
    return [UsePair(parse_request(argument, context.harness.pair.request, context.pairs))]


def _pair(argument: str, context: CommandContext) -> Outcome:
    found = context.harness.pair.compatibility
    findings = [(finding.what, finding.value, finding.remark) for finding in found.findings]
    return [ShowRows([("verdict", found.verdict, found.reason), *findings])]


def _pairs(argument: str, context: CommandContext) -> Outcome:
    loaded = context.harness.pair.request
    rows = [
        (name, "loaded" if (pair.target, pair.drafter) == (loaded.target, loaded.drafter) else "", _description(pair))
        for name, pair in context.pairs.items()
    ]
    return [ShowRows(rows)]


def _description(pair: PairSpec) -> str:
    return f"{pair.target} + {pair.drafter or 'the first layers of the target'}: {pair.summary}"


PAIR_COMMANDS = (
    Command(
        "load",
        "PAIR | target=... drafter=... quantize=...",
        "load other models; what is not named stays the same, and the old pair stays if loading fails",
        _load,
        words=tuple(PAIRS),
    ),
    Command("pair", "", "whether the two loaded models fit together, and why", _pair),
    Command("pairs", "", "the pairs that can be loaded by name", _pairs),
)
