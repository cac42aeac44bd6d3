"""Bounds that more than one module checks, without imports."""

MAX_SEED = 2**32 - 1
MAX_TEMPERATURE = 100.0
MAX_GAMMA = 63
AUTO_GAMMA = 16  # most drafts of a round whose number is chosen
MIN_ORDER, MAX_ORDER = 2, 16  # of an n-gram storage
MAX_FILLER = 64
MAX_GRAMS = 100_000_000  # that a storage may be allowed to hold

ENGINES = ("auto", "plain", "invariant")
ENGINE_WEIGHTS = ("float32", "int8")
MAX_THREADS = 1024

LOADED = "loaded"
DRAFTER_KINDS = (LOADED, "model", "head", "layers:K", "lookup", "suffix", "chain")

RULES = ("rejection", "coupled", "block")  # of verification

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "int4", "bnb-int8", "nf4")
DEVICE_PATTERN = r"cpu|mps|cuda(:\d+)?"
