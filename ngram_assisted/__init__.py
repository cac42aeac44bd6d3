"""Drafters that draft from text seen before: n-gram storages (NASD), prompt lookup and suffix decoding."""

from ngram_assisted.ngram_storage import STORAGES, NGramStorage, OneLevelNGramStorage, load_storage, save_storage
from ngram_assisted.text_drafters import (
    LongestMatch,
    MatchDrafter,
    MatchIndex,
    NGramDrafter,
    SuffixAutomaton,
    ngram_assisted_speculative_generate,
)

__all__ = [
    "STORAGES",
    "LongestMatch",
    "MatchDrafter",
    "MatchIndex",
    "NGramDrafter",
    "NGramStorage",
    "OneLevelNGramStorage",
    "SuffixAutomaton",
    "load_storage",
    "ngram_assisted_speculative_generate",
    "save_storage",
]
