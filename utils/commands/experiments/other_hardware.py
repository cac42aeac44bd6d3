"""The time of rounds on hardware that is not here: a model with five constants, and how far it was off.

A forward pass takes a fixed time plus the bytes that it reads over the memory's bandwidth; a round adds its drafts and
a fixed time. Measured speeds replace what they measure. The errors are those on published figures that the constants
were not fitted to (tests/benchmarks/predictor.py). Acceptance does not depend on hardware and comes from a replay.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from utils.errors import UserError


class Device(NamedTuple):
    """An accelerator: bytes per second and bytes of its memory, and the manufacturer's page that states them."""

    bandwidth: float
    memory: float
    source: str


NVIDIA, GEFORCE = "nvidia.com/en-us/data-center/", "nvidia.com/en-us/geforce/graphics-cards/"
APPLE, AMD = "support.apple.com/en-us/", "amd.com/en/products/accelerators/instinct/mi300/"
DEVICES = {
    "B200": Device(8.0e12, 180e9, f"{NVIDIA}dgx-b200"),
    "H200": Device(4.8e12, 141e9, f"{NVIDIA}h200"),
    "H100": Device(3.35e12, 80e9, f"{NVIDIA}h100 (SXM)"),
    "H100-PCIe": Device(2.0e12, 80e9, f"{NVIDIA}h100 (PCIe)"),
    "H20": Device(4.0e12, 96e9, "viperatech.com/product/nvidia-hgx-h20"),
    "A100": Device(2.039e12, 80e9, f"{NVIDIA}a100 (80 GB, SXM)"),
    "A100-40GB": Device(1.555e12, 40e9, f"{NVIDIA}a100 (40 GB)"),
    "L40S": Device(0.864e12, 48e9, f"{NVIDIA}l40s"),
    "MI300X": Device(5.3e12, 192e9, f"{AMD}mi300x.html"),
    "RTX5090": Device(1.792e12, 32e9, f"{GEFORCE}50-series/rtx-5090"),
    "RTX4090": Device(1.008e12, 24e9, f"{GEFORCE}40-series/rtx-4090"),
    "RTX3090": Device(0.936e12, 24e9, f"{GEFORCE}30-series/rtx-3090-3090ti"),
    "M1Max": Device(0.4e12, 64e9, f"{APPLE}111901"),
    "M2Ultra": Device(0.8e12, 192e9, f"{APPLE}111835"),
    "M3Max": Device(0.4e12, 128e9, f"{APPLE}117737"),
    "M4Max": Device(0.546e12, 128e9, f"{APPLE}121554"),
}
# Bytes per parameter. int4 has scales, and some tensors with more bits.
WEIGHTS = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.58}
CACHE_BYTES = 2.0  # per value of the keys and values


def woken(experts: int, active: int, rows: float) -> float:
    """The expected number of experts that `rows` independent tokens need, if each needs `active` of them."""
    return experts * (1 - (1 - active / experts) ** rows)


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of parameters of a target: those that every pass reads, all, and those of one expert in all layers.

    `cached` is the number of values of keys and values per token, or None if it is unknown.
    """

    always: float
    stored: float
    experts: int = 0
    active: int = 0
    expert: float = 0.0
    cached: float | None = None

    def read(self, rows: float) -> float:
        return self.always + (self.expert * woken(self.experts, self.active, rows) if self.experts else 0.0)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self:
        """From the fields of a config.json of transformers. Raises UserError if it does not have all that is needed."""
        config = config.get("text_config") or config
        odd = [name for name in ("kv_lora_rank", "interleave_moe_layer_step", "full_attention_interval") if config.get(name)]
        if odd or "linear_attention" in (config.get("layer_types") or ()):
            raise UserError(f"this architecture ({(odd or ['linear_attention'])[0]}) is not supported: {SIZE_HINT}.")
        try:
            return cls._of_llama(config)
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise UserError(f"the config has no usable {error.args[0]!r}: {SIZE_HINT}.") from error

    @classmethod
    def _of_llama(cls, config: Mapping[str, Any]) -> Self:
        """Attention with shared keys and values, gated feed-forward layers or experts, and an output head."""
        hidden, layers, heads = (config[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        shared_heads = config.get("num_key_value_heads") or heads
        size = config.get("head_dim") or hidden // heads
        experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
        dense = config.get("first_k_dense_replace") or 0 if experts else layers
        each = 3 * hidden * (config.get("moe_intermediate_size") or config["intermediate_size"])
        extra = config.get("num_shared_experts") or config.get("n_shared_experts") or 0
        always = layers * hidden * 2 * size * (heads + shared_heads)  # queries and outputs, keys and values
        always += dense * 3 * hidden * config["intermediate_size"] + (layers - dense) * extra * each
        head = config["vocab_size"] * hidden
        stored = always + (1 if config.get("tie_word_embeddings") else 2) * head + (layers - dense) * experts * each
        active = config["num_experts_per_tok"] if experts else 0
        expert = (layers - dense) * each if experts else 0.0
        return cls(always + head, stored, experts, active, expert, 2 * layers * shared_heads * size)


SIZE_HINT = "give a size, such as target=7B"


@dataclass(frozen=True, slots=True)
class Constants:
    """What was fitted to published figures.

    A pass takes `fixed` seconds besides reading, which reaches this `share` of the memory's bandwidth. A round takes
    `per_round` seconds more than a pass, and `per_draft` for each draft besides reading the drafter. A further token of
    a request wakes as many new experts as this part of an independent token: tokens of one text need `alike` ones.
    """

    fixed: float
    share: float
    per_round: float
    per_draft: float
    alike: float


FITTED = Constants(fixed=1.5e-3, share=0.8, per_round=1e-3, per_draft=0.15e-3, alike=0.25)


@dataclass(frozen=True, slots=True)
class Workload:
    """What runs there: a target, the parameters of its drafter, and requests of this context length in a batch."""

    shape: Shape
    drafter: float
    batch: int = 1
    context: int = 0
    weights: str = "bf16"
    constants: Constants = field(default=FITTED)

    @property
    def cache(self) -> float:
        """Bytes of keys and values."""
        return CACHE_BYTES * (self.shape.cached or 0) * self.context * self.batch

    def bytes_read(self, drafts: int = 0) -> float:
        """Bytes that a pass over one token and these drafts of each request reads."""
        rows = self.batch * (1 + self.constants.alike * drafts)
        return WEIGHTS[self.weights] * self.shape.read(rows) + self.cache

    @property
    def bytes_needed(self) -> float:
        return WEIGHTS[self.weights] * (self.shape.stored + self.drafter) + self.cache

    @property
    def cache_share(self) -> float:
        return self.cache / self.bytes_read()

    def step(self, device: Device) -> float:
        """Seconds of a decode step."""
        return self.constants.fixed + self.bytes_read() / (self.constants.share * device.bandwidth)

    def ratio(self, step: float, drafts: int) -> float:
        """A round with these drafts over a decode step that takes `step` seconds."""
        fitted, once = self.constants, self.bytes_read()
        reading = max(step - fitted.fixed, 0.0)
        passes = self.bytes_read(drafts) + drafts * WEIGHTS[self.weights] * self.drafter
        seconds = min(step, fitted.fixed) + reading * passes / once + fitted.per_round + drafts * fitted.per_draft
        return seconds / step


Ratio = Callable[[int], float]


def calibrated(prior: Ratio, points: Mapping[int, float]) -> Ratio:
    """r(k) through up to two measured points: one scales the extra time of the model, two make r(k) = a + c k."""
    match sorted(points.items()):
        case []:
            return prior
        case [(k, measured)]:
            scale = (measured - 1) / (prior(k) - 1)
            return lambda drafts: 1 + scale * (prior(drafts) - 1)
        case [(k, low), (other, high)]:
            slope = (high - low) / (other - k)
            return lambda drafts: low + slope * (drafts - k)
    raise UserError("give at most two of k1= to k7=.")


class Error(NamedTuple):
    """Errors on published cells of models that the constants were not fitted to, where 0.25 is a factor of 1.25: the
    median and the 90th percentile over series, and the numbers of predictions and of series.
    """

    median: float
    high: float
    cells: int
    series: int
