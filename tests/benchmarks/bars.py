"""The bars of the benchmark: ratios that a machine should reach, with intervals, and whether it does."""

from dataclasses import dataclass
from typing import Any

from arms import NGRAM, SPECULATIVE, TARGET
from peers import GENERATE, LLAMA, LLAMA_LOOKUP, LOOKUP

from utils.metrics.intervals import Interval, speedup_interval

Texts = list[dict[str, Any]]

MEMORY_FACTOR, MEMORY_BYTES = 1.2, 500e6  # allowed: the weights times the first, plus the second
VERIFY = {5: 1.25, 9: 1.5}  # of a decode step, by width
VERIFY_AVX2 = {5: 1.45, 9: 1.85}  # on processors with AVX2 but without AVX-512
STEP = 1.3  # of the matrix products of a decode step
FIRST_TOKEN, LONG_STEP, LONGEST = 1.2, 1.1, 6000
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio and its bound. at_least: whether the ratio must not be lower than it, else higher."""

    name: str
    bound: float
    ratio: Interval | None
    at_least: bool = True

    @property
    def verdict(self) -> str:
        """Met or missed by the estimate, and "uncertain" if the bound lies within the interval."""
        if self.ratio is None:
            return NOT_MEASURED
        met = self.ratio.estimate >= self.bound if self.at_least else self.ratio.estimate <= self.bound
        uncertain = self.ratio.is_bounded and self.ratio.low < self.bound < self.ratio.high
        return ("met" if met else "missed") + (", uncertain" if uncertain else "")

    def figures(self) -> dict[str, Any]:
        """As plain values; an interval without bounds is None."""
        ratio = self.ratio
        return {
            "name": self.name,
            "bound": ("at least" if self.at_least else "at most") + f" {self.bound:.2f}",
            "ratio": ratio and ratio.estimate,
            "interval": [ratio.low, ratio.high] if ratio and ratio.is_bounded else None,
            "verdict": self.verdict,
        }


def ratio(texts: Texts, ours: str, peer: str, what: str = "decode", *, task: str | None = None) -> Interval | None:
    """How many times as fast one arm is as another, over the prompts that both ran; None if there are none.

    what: "decode" or "whole" (runs). task: only its prompts, with an interval over their repeats alone.
    """
    groups = []
    for text in texts:
        if {ours, peer} <= set(text["arms"]) and task in (None, text["task"]):
            rates = zip(text["arms"][ours][what], text["arms"][peer][what], strict=True)
            groups.append([our_rate / rate for our_rate, rate in rates if our_rate and rate])
    groups = [group for group in groups if group]
    return speedup_interval(groups, these_prompts=task is not None) if groups else None


def best(texts: Texts, names: list[str], peer: str) -> str | None:
    """The fastest of some arms, by their decoding speeds over that of one peer; None if none ran."""
    found = {name: interval.estimate for name in names if (interval := ratio(texts, name, peer))}
    return max(found, key=lambda name: found[name]) if found else None


def bars(result: dict[str, Any]) -> list[Bar]:
    """Every bar, measured or not."""
    return [*_speed_bars(result), *_verify_bars(result), *_long_bars(result), _memory_bar(result)]


def _speed_bars(result: dict[str, Any]) -> list[Bar]:
    texts, formats = result.get("texts", []), result["setting"]["formats"]
    peers = f" ({formats['ours']} against {formats['generate']})" if formats["ours"] != formats["generate"] else ""
    blocks = " (same blocks)" if formats["ours"] == "gguf" else f" ({formats['ours']} against Q4_1)"
    ours, llama = best(texts, [TARGET, NGRAM, SPECULATIVE], LLAMA), best(texts, [LLAMA, LLAMA_LOOKUP], LLAMA)
    against_llama = ratio(texts, ours, llama) if ours and llama else None
    return [
        Bar(f"plain / generate{peers}", 1.0, ratio(texts, TARGET, GENERATE)),
        Bar(f"plain / generate, whole runs{peers}", 1.0, ratio(texts, TARGET, GENERATE, "whole")),
        Bar(f"n-gram / prompt lookup{peers}", 1.2, ratio(texts, NGRAM, LOOKUP)),
        Bar("speculative / own plain, slowest task", 1.0, slowest_task(texts)),
        Bar(f"our best / best of llama.cpp{blocks}", 1.0, against_llama),
    ]


def slowest_task(texts: Texts) -> Interval | None:
    """The lowest ratio of speculative to plain decoding over the tasks. None without repeats: one run of a prompt or
    two has no interval.
    """
    tasks = dict.fromkeys(text["task"] for text in texts)
    found = [interval for task in tasks if (interval := ratio(texts, SPECULATIVE, TARGET, task=task))]
    return min((each for each in found if each.is_bounded), key=lambda each: each.estimate, default=None)


def _verify_bars(result: dict[str, Any]) -> list[Bar]:
    bounds = VERIFY_AVX2 if result["setting"]["avx2_only"] else VERIFY
    seconds = result.get("verify_seconds", {}).get("ours")
    alone = result.get("step_over_products")
    return [
        *(
            Bar(f"verify cost v({width})", bound, seconds and over(seconds[width], seconds[1]), at_least=False)
            for width, bound in bounds.items()
        ),
        Bar("decode step / its products", STEP, alone and over(alone["step"], alone["products"]), at_least=False),
    ]


def over(ours: list[float], theirs: list[float]) -> Interval | None:
    """The ratio of two lists of times that were measured in turns, without the turns in which one is missing."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True) if one and other]
    return speedup_interval([ratios]) if ratios else None


def _long_bars(result: dict[str, Any]) -> list[Bar]:
    found = result.get("long_prompts", {})

    def times(length: int, what: str) -> Interval | None:
        arms = found.get(length, {})
        if TARGET not in arms or GENERATE not in arms:
            return None
        return over(*([turn[what] for turn in arms[name]] for name in (TARGET, GENERATE)))

    return [
        *(
            Bar(f"time to first token, {length} tokens", FIRST_TOKEN, times(length, "first_seconds"), at_least=False)
            for length in (found or (500, 2000, LONGEST))
        ),
        Bar(f"decode step at {LONGEST} tokens", LONG_STEP, times(LONGEST, "step_seconds"), at_least=False),
    ]


def _memory_bar(result: dict[str, Any]) -> Bar:
    program, held = result.get("program", {}), result["setting"]["weight_bytes"]
    allowed = MEMORY_FACTOR * held + MEMORY_BYTES
    share = Interval(program["resident"] / allowed) if "resident" in program else None
    return Bar("resident memory over 1.2 weights + 500 MB", 1.0, share, at_least=False)
