"""What a pair is asked for in words, on the command line or in a session."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from utils.bounds import DEVICE_PATTERN, DTYPES, ENGINE_WEIGHTS, QUANTIZATIONS
from utils.errors import UserError, one_of
from utils.pairs.known_pairs import PairSpec

LAYERS = "layers:"
HEAD = "head"  # the embedded target's own
CHOICES = {
    "dtype": ("auto", *DTYPES),
    "quantize": QUANTIZATIONS,
    "drafter_quantize": QUANTIZATIONS,
    "engine_weights": ENGINE_WEIGHTS,
}


@dataclass(frozen=True, slots=True)
class PairRequest:
    """The words of the command line. No drafter means the target's own first layers, where it can be cut.

    quantize, drafter_quantize: None is `cuda_quantize` on a CUDA device and "none" elsewhere. drafter_device: None is the target's.
    """

    target: str
    drafter: str | None
    device: str = "auto"
    dtype: str = "auto"
    quantize: str | None = None
    drafter_quantize: str | None = None
    cuda_quantize: str = "none"
    engine_weights: str = "float32"
    drafter_device: str | None = None


def pair_request(arguments: argparse.Namespace) -> PairRequest:
    """The pair that the flags ask for: --target and --drafter, or a row of the table of pairs."""
    config = arguments.config
    named = config.pairs[arguments.pair or config.pair or "embedded"]
    return PairRequest(
        target=named.target if arguments.target is None else arguments.target,
        drafter=named.drafter if arguments.target is None and arguments.drafter is None else arguments.drafter,
        device=arguments.device,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        drafter_quantize=arguments.drafter_quantize,
        cuda_quantize=named.cuda_quantize if arguments.target is None and arguments.drafter is None else "none",
        engine_weights=arguments.engine_weights,
        drafter_device=arguments.drafter_device,
    )


PARTS = tuple(field.name for field in fields(PairRequest) if field.name != "cuda_quantize")  # that a user names


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
            given |= {"target": pair.target, "drafter": pair.drafter, "cuda_quantize": pair.cuda_quantize}
            continue
        name = one_of(name.replace("-", "_"), PARTS, "part of a pair")
        given[name] = checked(name, value)
    if not given:
        raise UserError(
            "say what to load, for example: /load target=FOLDER drafter=layers:4, or the name of a pair that /pairs lists."
        )
    if "target" in given:
        given = {"drafter": None, "cuda_quantize": "none"} | given
    if given.get("drafter", current.drafter) is None:  # what was said of the old drafter goes with it
        given = dict.fromkeys(("drafter_quantize", "drafter_device")) | given
    return replace(current, **given)  # type: ignore[arg-type]


def checked(name: str, value: str) -> str:
    """A value that part of a request may have. Raises UserError for another."""
    if name in CHOICES:
        return one_of(value, CHOICES[name], name)
    if name in ("device", "drafter_device") and not re.fullmatch(f"auto|{DEVICE_PATTERN}", value):
        raise UserError(f"'{value}' is not a {name}; choose auto, cpu, cuda, cuda:N or mps.")
    if not value:
        raise UserError(f"{name}= needs a value.")
    return value
