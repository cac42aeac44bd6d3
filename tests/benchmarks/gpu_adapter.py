"""What `make gpu-check` adds to transformers 4.57, so that the project, which is written for version 5, runs on it.

Only models with full attention are checked this way: their caches differ in names and signatures alone.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def adapt_transformers() -> None:
    """Add the names of version 5 that the project uses, if transformers is imported and has those of 4.57."""
    module: Any = sys.modules.get("transformers")
    if module is None or hasattr(module, "PreTrainedConfig") or not hasattr(module, "PretrainedConfig"):
        return
    module.PreTrainedConfig = module.PretrainedConfig
    caches: Any = importlib.import_module("transformers.cache_utils")
    if not hasattr(caches.Cache, "is_croppable") and hasattr(caches, "DynamicLayer"):
        caches.Cache.is_croppable, caches.Cache.activate_past_recording = True, lambda self: None
        initialize, crop = caches.DynamicLayer.lazy_initialization, caches.DynamicLayer.crop
        # Version 5 passes the values as well as the keys.
        caches.DynamicLayer.lazy_initialization = lambda self, keys, values=None: initialize(self, keys)
        # Version 4 empties a cache that is cropped by 0 positions.
        caches.DynamicLayer.crop = lambda self, count: crop(self, count) if count else None
