"""N-gram assisted speculative decoding: storages over token ids, and the decoder that drafts from them."""

from ngram_assisted.ngram_drafter import NGramDrafter, ngram_assisted_speculative_generate
from ngram_assisted.ngram_storage import NGramStorage, OneLevelNGramStorage

__all__ = ["NGramDrafter", "NGramStorage", "OneLevelNGramStorage", "ngram_assisted_speculative_generate"]
