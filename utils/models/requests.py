"""What a pair is asked for in words, on the command line or in a session."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from utils.bounds import DEVICE_PATTERN, DTYPES, ENGINE_WEIGHTS, QUANTIZATIONS
from utils.errors import UserError, one_of
from utils.models.pairs import PairSpec

CHOICES = {
    "dtype": ("auto", *DTYPES),
    "quantize": QUANTIZATIONS,
    "drafter_quantize": QUANTIZATIONS,
    "engine_weights": ENGINE_WEIGHTS,
}


@dataclass(frozen=True, slots=True)
class PairRequest:
    """The words of the command line. No drafter means the target's own first layers, where it can be cut."""

    target: str
    drafter: str | None
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "none"
    drafter_quantize: str = "none"
    engine_weights: str = "float32"


def requested(text: str, current: PairRequest, pairs: Mapping[str, PairSpec]) -> PairRequest:
    """What `NAME=VALUE ...`, or the name of a known pair, asks for beside what is loaded; a new target comes without the old drafter.

    Raises UserError for words that mean nothing.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"a quotation mark is not closed in {text}.") from error
    given: dict[str, str | None] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            pair = pairs[one_of(word, tuple(pairs), "pair")]
            given |= {"target": pair.target, "drafter": pair.drafter}
            continue
        name = one_of(name.replace("-", "_"), tuple(field.name for field in fields(PairRequest)), "part of a pair")
        given[name] = checked(name, value)
    if not given:
        raise UserError("say what to load, for example: /load target=FOLDER drafter=layers:4, or the name of a pair that /pairs lists.")
    if "target" in given and "drafter" not in given:
        given["drafter"] = None
    if given.get("drafter", current.drafter) is None and "drafter_quantize" not in given:
        given["drafter_quantize"] = "none"
    return replace(current, **given)  # type: ignore[arg-type]


def checked(name: str, value: str) -> str:
    """A value that part of a request may have. Raises UserError for another."""
    if name in CHOICES:
        return one_of(value, CHOICES[name], name)
    if name == "device" and not re.fullmatch(f"auto|{DEVICE_PATTERN}", value):
        raise UserError(f"'{value}' is not a device; choose auto, cpu, cuda, cuda:N or mps.")
    if not value:
        raise UserError(f"{name}= needs a value.")
    return value
