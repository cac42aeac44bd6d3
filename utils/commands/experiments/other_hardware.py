"""The time of rounds on hardware that is not here: a model with five constants, and how far it was off.

A forward pass takes a fixed time, and the bytes that it reads over the memory's bandwidth. A round takes a further
fixed time, and that of its drafts. Measured speeds replace what they measure. The errors are those on published
figures that the constants were not fitted to (tests/benchmarks/predictor.py).
"""

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple, Self

from utils.bounds import RealRange, WholeRange, parse_tokens
from utils.commands.shared.result_tables import Row
from utils.comparison.records import SERVER, gathered
from utils.errors import UserError, check_choice
from utils.files import read_text
from utils.models.sources import cached_folder, parse_path
from utils.pairs.request import LOADED
from utils.text import byte_size, count_of, split_words


class Device(NamedTuple):
    """An accelerator: bytes per second and bytes of its memory, and the page that states them."""

    bandwidth: float
    memory: float
    source: str


def _table(name: str) -> list[dict[str, str]]:
    with (Path(__file__).parent / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


DEVICES = {
    row["name"]: Device(float(row["bandwidth"]), float(row["memory"]), row["source"]) for row in _table("devices.csv")
}
USABLE = 0.9  # share of a device's memory that servers use by default
WEIGHTS = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.58}  # bytes per parameter, with the scales of int4
CACHE_BYTES, CONTEXT = 2.0, 1024  # per value of the keys and values; tokens, if nothing is given
SIZE_HINT = "give the size of a dense target, such as target=7B"
# Compressed keys and values, layers with and without experts in turns, and linear attention.
UNSUPPORTED = ("kv_lora_rank", "interleave_moe_layer_step", "full_attention_interval", "linear_num_key_heads")


def woken(experts: int, active: int, rows: float) -> float:
    """The expected number of experts that `rows` independent tokens need, if each needs `active` of them."""
    return float(experts * (1 - (1 - active / experts) ** rows))


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of a target: how many every pass reads, all, and those of one expert in all layers.

    `cached` is the number of values of keys and values per token, or None if it is unknown.
    """

    always: float
    stored: float
    experts: int = 0
    active: int = 0
    expert: float = 0.0
    cached: float | None = None

    @property
    def kind(self) -> str:
        return "experts" if self.experts else "dense"

    @property
    def head(self) -> float:
        """Parameters of a drafter for it, about as in published EAGLE heads."""
        return float(0.1e9 * (self.always / 1e9) ** 0.55)

    def read(self, rows: float) -> float:
        return self.always + (self.expert * woken(self.experts, self.active, rows) if self.experts else 0.0)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self:
        """From a config.json of transformers: attention with shared keys and values, gated feed-forward layers or
        experts, and an output head. Raises UserError if it is different, or does not have what is needed.
        """
        config = config.get("text_config") or config
        if odd := [name for name in UNSUPPORTED if config.get(name)]:
            raise UserError(f"a target with {odd[0]} in its config is not supported: {SIZE_HINT}.")

        def number(*names: str, default: int | None = None) -> int:
            value = next((config[name] for name in names if config.get(name)), default)
            if type(value) is not int or not 0 <= value < 10**8:
                raise UserError(f"the config of the target has no usable {names[0]}: {SIZE_HINT}.")
            return value

        hidden, layers, heads = map(number, ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        inner, shared_heads = number("intermediate_size"), number("num_key_value_heads", default=heads)
        size = number("head_dim", default=hidden // heads)
        experts = number("num_experts", "num_local_experts", "n_routed_experts", default=0)
        dense = min(number("first_k_dense_replace", default=0), layers) if experts else layers
        one = 3 * hidden * number("moe_intermediate_size", default=inner)
        head, sparse = number("vocab_size") * hidden, layers - dense
        always = head + layers * hidden * 2 * size * (heads + shared_heads)  # queries and output, keys and values
        shared = number("num_shared_experts", "n_shared_experts", default=0)
        always += dense * 3 * hidden * inner + sparse * one * shared
        stored = always + sparse * one * experts + (0 if config.get("tie_word_embeddings") else head)
        active = number("num_experts_per_tok") if experts else 0
        return cls(always, stored, experts, min(active, experts), sparse * one, 2 * layers * shared_heads * size)

    @classmethod
    def named(cls, word: str) -> Self:
        """From a size, a config.json or its folder, or a downloaded model. Raises UserError for anything else."""
        if (match := SIZE.fullmatch(word)) and float(match[1]):
            return cls(float(match[1]) * 1e9, float(match[1]) * 1e9)
        path = parse_path(word)
        folder = path if path.exists() else cached_folder(word, None)
        file = folder / "config.json" if folder and folder.is_dir() else folder
        if file is None or not file.is_file():
            raise UserError(f"'{word}' is not a size such as 7B, a config.json, its folder, or a model on this disk.")
        text, config = read_text(file, "The config"), None
        with suppress(ValueError, RecursionError):
            config = json.loads(text)
        if not isinstance(config, dict):
            raise UserError(f"{file} is not the config of a model: {SIZE_HINT}.")
        return cls.of_config(config)


class Constants(NamedTuple):
    """What was fitted to published figures, all times in seconds."""

    fixed: float  # of a pass, besides reading
    share: float  # of the memory's bandwidth that reading reaches
    per_round: float  # of a round, besides its pass and its drafts
    per_draft: float  # of a draft, besides reading the drafter
    alike: float  # experts that a draft wakes, over those of an independent token


class Error(NamedTuple):
    """Errors on published cells of models that the constants were not fitted to; 0.25 is a factor of 1.25."""

    median: float
    high: float  # 90th percentile, widened for few series; every series of cells has the same weight
    cells: int
    series: int

    @property
    def reason(self) -> str:
        return f"the median error on published figures is {self.median:.0%}, above {MOST_ERROR:.0%}"

    def interval(self, value: float) -> list[float]:
        return [value / (1 + self.high), value * (1 + self.high)]


# Both come from tests/benchmarks/predictor.py. A key is the kind of target and the number of measured speeds: of the
# target alone, and with up to two numbers of drafts. ALONE stands for predicting the first of them.
ALONE = -1
FITTED = Constants(fixed=1.45e-3, share=0.712, per_round=0.258e-3, per_draft=0.300e-3, alike=0.30)
ERRORS = {
    (row["kind"], int(row["speeds"])): Error(
        float(row["median"]), float(row["high"]), int(row["cells"]), int(row["series"])
    )
    for row in _table("prediction_errors.csv")
}
MOST_ERROR = 0.25  # median error above which nothing is predicted
# What the published cells cover: requests at once, drafts per round, and keys and values as a part of what is read.
BATCH, MOST_DRAFTS, MOST_CACHE = WholeRange(1, 10), 7, 0.12


def calibrated(prior: Callable[[float], float], points: Mapping[float, float]) -> Callable[[float], float]:
    """r(k), a round with k drafts over a decode step, through up to two measured points: one scales the extra time of
    the model, two make r(k) = a + c k. A round is never shorter than a decode step.
    """
    match sorted(points.items()):
        case [(k, measured)]:
            return lambda drafts: 1 + (measured - 1) / (prior(k) - 1) * (prior(drafts) - 1)
        case [(k, low), (other, high)]:
            return lambda drafts: max(1.0, low + (high - low) / (other - k) * (drafts - k))
    return prior


@dataclass(frozen=True, slots=True)
class Deployment:
    """What runs there: a target with a head that drafts, and requests of this context length in a batch.

    `plain` is the measured speed of the target alone for all requests together, and `points` has those by the mean
    number of drafts, each with its tokens per round if they are not those of this text.
    """

    shape: Shape
    device: str = ""
    batch: int = 1
    context: int = CONTEXT
    weights: str = "bf16"
    plain: float | None = None
    points: Mapping[float, tuple[float, float | None]] = field(default_factory=dict)
    constants: Constants = FITTED

    @property
    def cache(self) -> float:
        """Bytes of keys and values."""
        return CACHE_BYTES * (self.shape.cached or 0) * self.context * self.batch

    def bytes_read(self, drafts: float = 0) -> float:
        """What a pass over one token and these drafts of each request reads."""
        rows = self.batch * (1 + self.constants.alike * drafts)
        return WEIGHTS[self.weights] * self.shape.read(rows) + self.cache

    @property
    def bytes_needed(self) -> float:
        return WEIGHTS[self.weights] * (self.shape.stored + self.shape.head) + self.cache

    @property
    def step(self) -> float:
        """Seconds of a decode step, measured or predicted."""
        if self.plain is not None:
            return self.batch / self.plain
        return self.constants.fixed + self.bytes_read() / (self.constants.share * DEVICES[self.device].bandwidth)

    def prior(self, drafts: float) -> float:
        """r(k) without a measured point."""
        fitted, step = self.constants, self.step
        fixed = min(step, fitted.fixed)
        passes = self.bytes_read(drafts) + drafts * WEIGHTS[self.weights] * self.shape.head
        reading = (step - fixed) * passes / self.bytes_read()
        return (fixed + reading + fitted.per_round + drafts * fitted.per_draft) / step

    def ratio(self, lengths: Mapping[int, float]) -> Callable[[float], float]:
        """r(k) if rounds with k drafts have these lengths. Raises UserError for a measured speed that cannot be."""
        points = {}
        for k, (speed, given) in self.points.items():
            length = given or lengths[int(k)]
            points[k] = length * (self.plain or 0) / speed
            if points[k] <= 1:
                raise UserError(
                    f"k{k:.3g}={speed:g} must be below {points[k] * speed:.4g}, which is plain= times {length:.2f} "
                    f"tokens per round; one from another text needs its own: k{k:.3g}={speed:g}@LENGTH."
                )
        return calibrated(self.prior, points)

    @property
    def speeds(self) -> int:
        """The number of measured speeds."""
        return len(self.points) + (self.plain is not None)

    @property
    def known(self) -> str:
        return f"{self.shape.kind} targets with {count_of(self.speeds, 'measured speed')}"

    @property
    def error(self) -> Error:
        """The errors of this class. Raises UserError with the reason if nothing is predicted in it."""
        error = ERRORS.get((self.shape.kind, self.speeds))
        if error and error.median <= MOST_ERROR:
            return error
        reason = error.reason if error else "no published figures show the error: give plain=, and up to two of k1= ..."
        raise UserError(f"nothing is predicted for {self.known}, because {reason}.")

    def check(self) -> None:
        """Raises UserError if this does not fit there, is unlike all published figures, or has too large errors."""
        room, needed, share = USABLE * DEVICES[self.device].memory, self.bytes_needed, self.cache / self.bytes_read()
        if needed > room:
            fits = [f"weights={name}" for name in WEIGHTS if replace(self, weights=name).bytes_needed <= room]
            fits += [f"on={name}" for name, device in DEVICES.items() if needed <= USABLE * device.memory]
            raise UserError(
                f"{byte_size(int(needed))} of weights, keys and values do not fit into the {byte_size(int(room))} that "
                f"servers use of {self.device}; {' or '.join(fits[:2]) or 'no device'} would do."
            )
        if self.shape.cached is None and self.context != CONTEXT:
            raise UserError("context= needs the config of the target, for the size of keys and values.")
        if self.plain is None and share > MOST_CACHE:
            raise UserError(
                f"keys and values are {share:.0%} of what a decode step reads, in published figures at most "
                f"{MOST_CACHE:.0%}, so the error is unknown: give plain=, measured with this batch and context."
            )
        _ = self.error


SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)B", re.IGNORECASE)


def _speed(text: str) -> float:
    return RealRange("tokens/s", 0, 1e9, excludes_low=True).parse(re.sub("tok(ens)?/s$", "", text))


def _point(k: int, text: str) -> tuple[float, float | None]:
    speed, at, length = text.partition("@")
    return _speed(speed), RealRange("tokens per round", 1, k + 1).parse(length) if at else None


def _device(text: str) -> str:
    plain = {re.sub("[-_ ]", "", name).lower(): name for name in DEVICES}
    return plain.get(re.sub("[-_ ]", "", text).lower()) or check_choice(text.upper(), tuple(DEVICES), "device")


PARTS: dict[str, Callable[[str], Any]] = {
    "on": _device,
    "target": str,
    "batch": BATCH.parse,
    "context": parse_tokens,
    "weights": lambda text: check_choice(text.lower(), tuple(WEIGHTS), "format"),
    "from": str,
    "plain": _speed,
    **{f"k{k}": partial(_point, k) for k in range(1, MOST_DRAFTS + 1)},
}
USAGE = "on=H100 target=7B batch=8 context=8k weights=fp8 plain=38tok/s k3=61tok/s"


def parse(text: str) -> dict[str, Any]:
    """The fields of Deployment that were typed, and the words for `target` and `from`. Raises UserError for anything
    else.
    """
    values: dict[str, Any] = {}
    for word in split_words(text):
        name, _, value = word.partition("=")
        if not value:
            raise UserError(f"'{word}' is not NAME=VALUE, as in {USAGE}.")
        name = check_choice(name.lower(), tuple(PARTS), "part")
        values[name] = PARTS[name](value)
    points = {k: values.pop(f"k{k}") for k in range(1, MOST_DRAFTS + 1) if f"k{k}" in values}
    if "on" not in values:
        raise UserError(f"on= is missing: name a device, one of {', '.join(DEVICES)}.")
    if points and "plain" not in values:
        raise UserError("a speed with drafts needs plain=, the measured speed of the target alone beside it.")
    if "from" in values and ("plain" in values or values.get("batch", 1) > 1):
        raise UserError("from= has the speeds of one request at a time: leave out plain=, k1= ... and batch=.")
    return values | {"device": values.pop("on"), "points": points}


COUNTS = ("drafted", "rounds", "new_tokens", "target_forwards")


def measured(rows: Sequence[Row]) -> dict[str, Any]:
    """`plain` and `points` from records of runs with the loaded drafter or of servers, and of their baselines.

    Runs with the same gamma make a point, with their mean speed, drafts per round and tokens per round. The points with
    the fewest and the most drafts are used. Raises UserError if runs with drafts or their baselines are missing.
    """
    timed = [row for row in rows if row.get("decode_tokens_per_second")]
    drafting = [
        row for row in timed if all(row.get(name) for name in COUNTS) and (row.get(SERVER) or _by_loaded_drafter(row))
    ]
    plain = [row for row in timed if row["strategy"] in {one.get("baseline") for one in drafting}]
    if not plain:
        raise UserError(
            "from= needs runs with /drafter_kind loaded, or of a server with drafts, and of their baseline."
        )
    points = {}
    for runs in gathered(((row["strategy"], row["settings"].get("gamma")), row) for row in drafting).values():
        drafted, rounds, tokens, passes = (sum(row[name] for row in runs) for name in COUNTS)
        points[drafted / rounds] = _mean_speed(runs), tokens / passes
    ends = {min(points), max(points)} if max(points) - min(points) >= 1 else {max(points)}
    return {"plain": _mean_speed(plain), "points": {k: points[k] for k in ends}}


def _by_loaded_drafter(row: Row) -> bool:
    return bool(row["strategy"] == "speculative" and row["settings"].get("drafter_kind") == LOADED)


def _mean_speed(rows: Sequence[Row]) -> float:
    return geometric_mean(row["decode_tokens_per_second"] for row in rows)
