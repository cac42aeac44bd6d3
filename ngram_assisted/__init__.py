"""Drafters that draft from text seen before: n-gram storages (NASD), prompt lookup and suffix decoding."""

from ngram_assisted.match_drafter import MatchDrafter, MatchIndex
from ngram_assisted.ngram_drafter import NGramDrafter, ngram_assisted_speculative_generate
from ngram_assisted.ngram_file import STORAGES, load_storage, save_storage
from ngram_assisted.ngram_storage import NGramStorage, OneLevelNGramStorage
from ngram_assisted.prompt_lookup import LongestMatch
from ngram_assisted.suffix_automaton import SuffixAutomaton

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
