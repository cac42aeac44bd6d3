"""The sentences below the table of /sweep: which value is the fastest, if the values can be compared at all."""

from collections.abc import Sequence
from math import log
from statistics import mean

from utils.comparison.speed_claims import (
    BASELINE,
    FASTER,
    MIN_VALUES,
    TOO_FEW,
    Row,
    SpeedClaim,
    claim_text,
    speed_sentence,
)
from utils.config.setting_table import NGRAM_PARTS

COMMANDS = {part.name.removeprefix("ngram "): part.name for part in NGRAM_PARTS}  # /sweep uses their last words
NOTHING_TO_COMPARE = "No enabled strategy preserves the target's distribution, so there is nothing to compare."
ALL_NOISE = "Drafts saved nothing with any value (1.00 tokens per target forward): differences in speed are noise."
OTHER_TEXTS = (
    "The texts differ between the values, so their tokens/s are not compared. What can be compared is the speed-up "
    "over target-only with the same value:"
)
AGAIN = ", then /race 5 measures it again: the best of several values looks slightly better than it is"
COUPLED = "With /verify coupled every value gives the same text."
NO_TARGET = "With /target on, each value is compared with target-only."


def conclusion(rows: Sequence[Row]) -> list[str]:
    """What the repeats show about the values, and what to do next. `rows` are the figures of the findings."""
    rows = [row for row in rows if row["lossless"]]
    if not rows:
        return [NOTHING_TO_COMPARE]
    return _with_one_text(rows) if len({row["text_number"] for row in rows}) == 1 else _with_texts(rows)


def _with_texts(rows: Sequence[Row]) -> list[str]:
    """No claim across values, because a text that is easier to draft is generated faster."""
    by_value: dict[str, list[Row]] = {}
    for row in rows:
        if row["speedup"] is not None and row["verdict"] != BASELINE:
            by_value.setdefault(row["setting"], []).append(row)
    if not by_value:
        return [OTHER_TEXTS, NO_TARGET]
    best = {setting: max(of_value, key=_credible) for setting, of_value in by_value.items()}
    lines = [OTHER_TEXTS, *(f"{setting}: {speed_sentence(row)}" for setting, row in best.items())]
    targets = {row["text_number"] for row in rows if row["verdict"] == BASELINE}
    lines += [COUPLED] if len(targets) == 1 else []
    return [*lines, *([_more_repeats()] if any(row["verdict"] == TOO_FEW for row in best.values()) else [])]


def _credible(row: Row) -> tuple[bool, float]:
    """The sort key of speed-ups: those that drafts cannot have caused come last."""
    return not row["without_gain"] or row["speedup"] <= 1, row["speedup"]


def _with_one_text(rows: Sequence[Row]) -> list[str]:
    drafting = [row for row in rows if row["verdict"] != BASELINE]
    gaining = [row for row in drafting if not row["without_gain"]]
    if not gaining:
        return [ALL_NOISE if drafting else NOTHING_TO_COMPARE]
    best = max(gaining, key=lambda row: mean(log(max(speed, 1e-9)) for speed in row["tokens_per_second"]))
    others = [row for row in gaining if row is not best]
    if len(best["tokens_per_second"]) < MIN_VALUES:
        about = "" if best["speedup"] is None else f", about {best['speedup']:.1f}x target-only"
        return [f"Too few repeats to tell. The highest speed is that of {_name(best)}{about}.", _more_repeats()]
    near = [_name(row) for row in others if _claim(best, row) != FASTER]
    if best["speedup"] is None:
        return [_fastest(best, others, near, of="")]
    if best["verdict"] != FASTER:
        return [f"No value is measurably faster than target-only. The highest is {_name(best)}: {claim_text(best)}."]
    following = f"Next: {_command(best)} keeps this value{AGAIN if others else ''}."
    return [_fastest(best, others, near, of=f": {claim_text(best)}"), following]


def _fastest(best: Row, others: Sequence[Row], near: Sequence[str], *, of: str) -> str:
    if near:
        return f"The highest speed is that of {_name(best)}{of}. Not distinguishable from it: {', '.join(near)}."
    return f"{_name(best)} is {'the fastest' if others else 'faster'}{of}."


def _claim(best: Row, other: Row) -> str:
    """The claim for the ratios of two rows in the same repeat."""
    pairs = zip(best["tokens_per_second"], other["tokens_per_second"], strict=False)  # Ctrl-C may leave one shorter
    return SpeedClaim.of([[ours / theirs for ours, theirs in pairs if theirs]]).verdict


def _more_repeats() -> str:
    return f"Next: x{MIN_VALUES} at the end of the line runs enough repeats."


def _command(row: Row) -> str:
    name, _, value = row["setting"].partition(" ")
    return f"/{COMMANDS.get(name, name)} {value}"


def _name(row: Row) -> str:
    return f"{row['strategy']} with {row['setting']}"
