"""N-gram assisted speculative decoding: storages over token ids, and the decoder that drafts from them."""

from ngram_assisted.draft_length import DraftLength
from ngram_assisted.ngram_drafter import NGramDrafter, ngram_assisted_speculative_generate
from ngram_assisted.ngram_file import STORAGES, load_storage, save_storage
from ngram_assisted.ngram_storage import NGramStorage, OneLevelNGramStorage

__all__ = [
    "STORAGES",
    "DraftLength",
    "NGramDrafter",
    "NGramStorage",
    "OneLevelNGramStorage",
    "load_storage",
    "ngram_assisted_speculative_generate",
    "save_storage",
]
