"""Temperature, top-k and top-p of the processor, each changed by itself.

A temperature of 0 is greedy, which has neither top-k nor top-p. Setting one of these on greedy makes the temperature 1.
"""

from dataclasses import dataclass, replace
from typing import Any

from utils.bounds import TEMPERATURE, TOP_P, WholeRange
from utils.config.processor_value_type import ProcessorType
from utils.config.settings import Settings
from utils.config.value_types import Limits
from utils.logits_processor import (
    GreedyProcessor,
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)

OFF = "off"  # no top-k or top-p


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parts of a processor; None for a part that it lacks."""

    temperature: float
    top_k: int | None = None
    top_p: float | None = None

    @classmethod
    def of(cls, settings: Settings) -> "Sampling":
        processor: Any = settings.processor
        if isinstance(processor, GreedyProcessor):  # its own temperature has no effect
            return cls(0)
        return cls(processor.temperature, getattr(processor, "top_k", None), getattr(processor, "top_p", None))

    @property
    def processor(self) -> LogitsProcessor:
        """The processor with these parts."""
        if self.temperature == 0:
            return GreedyProcessor()
        if self.top_k is not None and self.top_p is not None:
            return TopKNucleusProcessor(self.temperature, self.top_k, self.top_p)
        if self.top_k is not None:
            return TopKProcessor(self.temperature, self.top_k)
        if self.top_p is not None:
            return NucleusProcessor(self.temperature, self.top_p)
        return MultinomialProcessor(self.temperature)

    @property
    def text(self) -> str:
        """The processor as /processor takes it."""
        return ProcessorType().show(self.processor)


def change_temperature(settings: Settings, text: str, limits: Limits) -> Settings:
    return _with_sampling(settings, replace(Sampling.of(settings), temperature=TEMPERATURE.parse(text)))


def change_top_k(settings: Settings, text: str, limits: Limits) -> Settings:
    # 0 means "no limit", as in transformers.
    top_k = None if text.lower() in (OFF, "0") else WholeRange(1, limits.vocabulary).parse(text)
    sampling = Sampling.of(settings)
    return _with_sampling(settings, replace(sampling, temperature=_warm(sampling, top_k), top_k=top_k))


def change_top_p(settings: Settings, text: str, limits: Limits) -> Settings:
    # 1 keeps every token, which is the same as no top-p.
    top_p = None if text.lower() == OFF or (value := TOP_P.parse(text)) == 1 else value
    sampling = Sampling.of(settings)
    return _with_sampling(settings, replace(sampling, temperature=_warm(sampling, top_p), top_p=top_p))


def show_temperature(settings: Settings) -> str:
    return _shown(Sampling.of(settings).temperature)


def show_top_k(settings: Settings) -> str:
    return _shown(Sampling.of(settings).top_k)


def show_top_p(settings: Settings) -> str:
    return _shown(Sampling.of(settings).top_p)


def _warm(sampling: Sampling, part: float | None) -> float:
    """The temperature to use with a top-k or top-p: 1 instead of greedy."""
    return 1.0 if sampling.temperature == 0 and part is not None else sampling.temperature


def _with_sampling(settings: Settings, sampling: Sampling) -> Settings:
    # An unchanged processor stays as it was typed: greedy may have a temperature.
    same = sampling == Sampling.of(settings)
    return settings if same else replace(settings, processor=sampling.processor)


def _shown(value: float | None) -> str:
    """The shortest text that reads back as the same number."""
    return OFF if value is None else f"{value:g}" if float(f"{value:g}") == value else repr(value)
