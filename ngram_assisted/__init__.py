"""Drafters that draft from text seen before: n-gram storages (NASD), prompt lookup and suffix decoding."""

from ngram_assisted.match_drafter import LongestMatch, MatchDrafter, MatchIndex, SuffixAutomaton
from ngram_assisted.ngram_drafter import NGramDrafter, ngram_assisted_speculative_generate
from ngram_assisted.ngram_storage import STORAGES, NGramStorage, OneLevelNGramStorage, load_storage, save_storage

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
