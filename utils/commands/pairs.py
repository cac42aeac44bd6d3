"""/load, /pair and /pairs: other models, without leaving the session, and whether they fit."""

from utils.commands.registry import Command, Outcome, Situation
from utils.pairs.known_pairs import PAIRS, PairSpec
from utils.pairs.request import requested


def _load(argument: str, situation: Situation) -> Outcome:
    return Outcome(load=requested(argument, situation.bench.pair.request, situation.pairs))


def _pairs(argument: str, situation: Situation) -> Outcome:
    loaded = situation.bench.pair.request
    rows = (
        (name, "loaded" if (pair.target, pair.drafter) == (loaded.target, loaded.drafter) else "", _told(pair))
        for name, pair in situation.pairs.items()
    )
    return Outcome(rows=tuple(rows))


def _pair(argument: str, situation: Situation) -> Outcome:
    fit = situation.bench.pair.fit
    rows = tuple((row.what, row.value, row.remark) for row in fit.rows)
    return Outcome(rows=(("verdict", fit.verdict, fit.reason), *rows))


def _told(pair: PairSpec) -> str:
    return f"{pair.target} + {pair.drafter or 'its own first layers'}: {pair.summary}"


PAIR_COMMANDS = (
    Command(
        "load",
        "PAIR | target=... drafter=... quantize=...",
        "load other models; what is not named stays, and if it fails the old pair does",
        _load,
        words=tuple(PAIRS),
    ),
    Command("pair", "", "whether the two models that are loaded fit together, and why", _pair),
    Command("pairs", "", "the pairs that are known by name", _pairs),
)
