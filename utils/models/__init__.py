"""From a name to one checkpoint in memory: sources, memory checks, loading, quantization, devices and draft heads."""

from collections.abc import Callable

Reporter = Callable[[str], None]  # shows one line of progress to the user
