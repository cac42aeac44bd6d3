"""Logits processors of every kind: PROCESSORS for toy models of 8 tokens, and SAMPLERS without greedy decoding."""

from utils.logits_processor import (
    GreedyProcessor,
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)

SAMPLERS: list[LogitsProcessor] = [
    MultinomialProcessor(1.0),
    MultinomialProcessor(0.7),
    TopKProcessor(1.0, 3),
    NucleusProcessor(1.0, 0.9),
    TopKNucleusProcessor(1.2, 4, 0.95),
]
PROCESSORS: list[LogitsProcessor] = [
    GreedyProcessor(),
    MultinomialProcessor(0.6),
    MultinomialProcessor(1.2),
    TopKProcessor(1.0, 4),
    NucleusProcessor(0.9, 0.9),
    TopKNucleusProcessor(1.2, 6, 0.95),
]
