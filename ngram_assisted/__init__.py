"""N-gram assisted speculative decoding: storages over token ids, and the decoder that drafts from them."""

from ngram_assisted.drafters import MATCH_KINDS, storage_drafter
from ngram_assisted.match_drafter import MatchDrafter
from ngram_assisted.matches import LongestMatch, SuffixAutomaton
from ngram_assisted.ngram_drafter import NGramDrafter, ngram_assisted_speculative_generate
from ngram_assisted.ngram_file import STORAGES, load_storage, save_storage
from ngram_assisted.ngram_storage import NGramStorage, OneLevelNGramStorage

__all__ = [
    "MATCH_KINDS",
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
    "storage_drafter",
]
