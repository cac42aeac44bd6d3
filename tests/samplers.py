"""One logits processor of each kind that samples."""

from utils.logits_processor import (
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
