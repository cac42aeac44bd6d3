"""Which pair to load, in the words of the command line or of /load, and the pairs with names.

Nothing is loaded and torch is not imported here.
"""

import argparse
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from utils.bounds import DTYPES, ENGINE_WEIGHTS, QUANTIZATIONS, check_device
from utils.errors import UserError, check_choice
from utils.text import split_words

# Names of drafter kinds, see drafter_kinds.
LOADED = "loaded"  # the drafter that the pair was loaded with
CHAIN = "chain"  # matches in the text where they are expected to gain more, and the loaded drafter otherwise
MODEL = "model"  # the kind of a loaded drafter model
LAYERS = "layers:"
EMBEDDED = "embedded"  # the target that needs no download from a hub
PARD = "PARD"  # a model that drafts blocks
HEAD = "head"  # the draft head of the embedded target
DRAFTERS = (LOADED, f"{LAYERS}K", "lookup", "suffix", CHAIN)  # a name that ends in ":K" takes a number
MTP = "mtp"  # the layers for multi-token prediction in the target's own files
CHOICES = {
    "dtype": ("auto", *DTYPES),
    "quantize": QUANTIZATIONS,
    "drafter_quantize": QUANTIZATIONS,
    "engine_weights": ENGINE_WEIGHTS,
}


@dataclass(frozen=True, slots=True)
class PairRequest:
    """A target and a drafter by name. Without a drafter the first layers of the target draft, if it can be cut."""

    target: str
    drafter: str | None
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "none"
    drafter_quantize: str = "none"
    engine_weights: str = "float32"


REQUEST_FIELDS = tuple(field.name for field in fields(PairRequest))
OPTIONS = REQUEST_FIELDS[2:]  # without the models


@dataclass(frozen=True, slots=True)
class PairSpec:
    """A known target and drafter, as written on the command line."""

    target: str
    drafter: str | None
    summary: str

    @property
    def request(self) -> PairRequest:
        return PairRequest(self.target, self.drafter)


def request_from_flags(arguments: argparse.Namespace) -> PairRequest:
    """The pair of --target and --drafter, or else a known pair."""
    known: PairSpec = arguments.config.pairs[arguments.pair or arguments.config.pair or EMBEDDED]
    request = known.request
    # --target alone must not get the drafter of the default pair; --drafter alone drafts for that pair's target.
    if arguments.target is not None or arguments.drafter is not None:
        request = PairRequest(request.target if arguments.target is None else arguments.target, arguments.drafter)
    return replace(request, **{name: getattr(arguments, name) for name in OPTIONS})


def parse_request(text: str, current: PairRequest, pairs: Mapping[str, PairSpec]) -> PairRequest:
    """The current request, changed by `NAME=VALUE ...`, or a known pair with such changes.

    A new target drops the old drafter, and the other options stay. A known pair has its own options. Raises UserError
    for unknown names and invalid values.
    """
    if not (words := split_words(text)):
        raise UserError(
            "say what to load, for example: /load target=FOLDER drafter=layers:4, or a pair that /pair list names."
        )
    known: dict[str, str | None] = {}
    changes: dict[str, str | None] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            name = check_choice(name.replace("-", "_"), REQUEST_FIELDS, "part of a pair")
            changes[name] = check_field(name, value)
        else:
            # Every option, so that a known pair is the same pair whatever was loaded before.
            known = asdict(pairs[check_choice(word, tuple(pairs), "pair")].request)
    if "target" in changes:
        changes.setdefault("drafter", None)
    if (known | changes).get("drafter", current.drafter) is None:
        changes.setdefault("drafter_quantize", "none")  # options of the old drafter are dropped with it
    return replace(current, **(known | changes))  # type: ignore[arg-type]


def check_drafter(word: str) -> str:
    """The name of the drafter kind for a word of /drafter_kind. Raises UserError for an unknown word."""
    return f"{LAYERS}K" if layer_count(word) else check_choice(word, DRAFTERS, "drafter")


def layer_count(drafter: str | None) -> int | None:
    """The K of a `layers:K` drafter, None for other drafters. Raises UserError if K is not a whole number."""
    if drafter is None or not drafter.startswith(LAYERS):
        return None
    # int() would also accept signs, blanks, underscores and digits of other scripts.
    if not (number := re.fullmatch(rf"{LAYERS}([1-9]\d{{0,3}})", drafter, re.ASCII)):
        raise UserError(
            f"'{drafter}' is not a drafter: write {LAYERS}K with a whole number from 1, for example {LAYERS}4."
        )
    return int(number[1])


def check_field(name: str, value: str) -> str:
    """The value itself if the field of a request allows it. Raises UserError otherwise."""
    if name in CHOICES:
        return check_choice(value, CHOICES[name], name)
    if name == "device":
        return check_device(value)
    if not value:
        raise UserError(f"{name}= needs a value.")
    return value


def check_request(request: PairRequest) -> None:
    """Raise UserError for options that exclude each other. The device must be one that exists."""
    if request.target.startswith(LAYERS):
        raise UserError(f"'{request.target}' is not a target: layers:K can only be a --drafter.")
    if request.drafter is None or layer_count(request.drafter):
        check_shared(request, "A layers:K drafter shares the weights of the target")
    if request.engine_weights != "float32":
        _check_engine_weights(request)


def check_shared(request: PairRequest, reason: str) -> None:
    """Raise UserError, with this reason, for options that need a separate drafter model."""
    if request.drafter_quantize != "none":
        raise UserError(f"{reason}: leave --drafter-quantize out.")


def _check_engine_weights(request: PairRequest) -> None:
    """Raise UserError for a format of --engine-weights in which no engine computes the requested target."""
    kind = f"--engine-weights {request.engine_weights}"
    if request.device != "cpu":
        raise UserError(f"{kind} is computed on CPUs only: use --device cpu, or --quantize on {request.device}.")
    if request.dtype not in ("auto", "float32"):
        raise UserError(f"{kind} needs a model that is loaded in float32: leave --dtype out.")
    if request.quantize != "none":
        raise UserError(f"{kind} needs a target that is not quantized: leave --quantize out.")
    if request.engine_weights == "gguf" and not (
        request.target == EMBEDDED or request.target.lower().endswith(".gguf")
    ):
        raise UserError(
            f"{kind} needs a target from a GGUF file, and '{request.target}' is not one: use --engine-weights int4 "
            "or int8, or name a .gguf file."
        )


PAIRS: dict[str, PairSpec] = {
    "embedded": PairSpec("embedded", "head", "SmolLM2-135M-Instruct with a head trained for it, no hub, no GPU"),
    "llama-3.2": PairSpec(
        "meta-llama/Llama-3.2-3B-Instruct",
        "meta-llama/Llama-3.2-1B-Instruct",
        "a common pair in the literature, gated, about 9 GB",
    ),
    "smollm2": PairSpec(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "open, about 4 GB"
    ),
    "qwen3": PairSpec("Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B", "open, many languages, about 10 GB"),
}
# Drafters that were published for a target. These were added without a connection to the hub.
PUBLISHED = {
    "qwen3-1.7b-eagle3": ("Qwen/Qwen3-1.7B", "AngelSlim/Qwen3-1.7B_eagle3", "EAGLE-3"),
    "qwen3-4b-eagle3": ("Qwen/Qwen3-4B", "AngelSlim/Qwen3-4B_eagle3", "EAGLE-3"),
    "qwen3-8b-eagle3": ("Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3", "EAGLE-3"),
    "qwen3-14b-eagle3": ("Qwen/Qwen3-14B", "AngelSlim/Qwen3-14B_eagle3", "EAGLE-3"),
    "qwen3-4b-ttt7": ("Qwen/Qwen3-4B", "deepseek-ai/eagle3_qwen3_4b_ttt7", "EAGLE-3"),
    "qwen3-8b-ttt7": ("Qwen/Qwen3-8B", "deepseek-ai/eagle3_qwen3_8b_ttt7", "EAGLE-3"),
    "qwen3-14b-ttt7": ("Qwen/Qwen3-14B", "deepseek-ai/eagle3_qwen3_14b_ttt7", "EAGLE-3"),
    "qwen3-8b-peagle": ("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.peagle", "P-EAGLE"),
    "qwen3-4b-dspark": ("Qwen/Qwen3-4B", "deepseek-ai/dspark_qwen3_4b_block7", "DSpark"),
    "qwen3-8b-dspark": ("Qwen/Qwen3-8B", "deepseek-ai/dspark_qwen3_8b_block7", "DSpark"),
    "qwen3-14b-dspark": ("Qwen/Qwen3-14B", "deepseek-ai/dspark_qwen3_14b_block7", "DSpark"),
    "qwen3-4b-pard": ("Qwen/Qwen3-4B", "amd/PARD-Qwen3-0.6B", "PARD"),
    "llama-3.1-pard": ("meta-llama/Llama-3.1-8B-Instruct", "amd/PARD-Llama-3.2-1B", "PARD, gated target"),
    "gemma-4-e2b": ("google/gemma-4-E2B-it", "google/gemma-4-E2B-it-assistant", "assistant of Gemma 4"),
    "gpt-oss-20b-peagle": ("openai/gpt-oss-20b", "amazon/gpt-oss-20b-p-eagle", "P-EAGLE"),
    "gpt-oss-20b-eagle3": ("openai/gpt-oss-20b", "Dogacel/specdrift-gpt-oss-20b-eagle3", "EAGLE-3.1"),
}
PAIRS |= {name: PairSpec(*row) for name, row in PUBLISHED.items()}
