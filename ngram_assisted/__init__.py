"""N-gram assisted speculative decoding: storages over token ids, and the decoder that drafts from them."""

from ngram_assisted.match_drafter import MatchDrafter
from ngram_assisted.ngram_drafter import NGramDrafter, ngram_assisted_speculative_generate
from ngram_assisted.ngram_file import STORAGES, load_storage, save_storage
from ngram_assisted.ngram_storage import NGramStorage, OneLevelNGramStorage
from ngram_assisted.prompt_lookup import LongestMatch, SuffixAutomaton

__all__ = [
    "STORAGES",
    "LongestMatch",
    "MatchDrafter",
    "NGramDrafter",
    "NGramStorage",
    "OneLevelNGramStorage",
    "SuffixAutomaton",
    "load_storage",
    "ngram_assisted_speculative_generate",
    "save_storage",
]
