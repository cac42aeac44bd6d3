"""Which layers of a drafter attend to a sliding window only, by its config."""

from __future__ import annotations

from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"


def sliding_sizes(checkpoint: DrafterCheckpoint) -> tuple[int | None, ...]:
    """The number of positions that each layer attends to, its own included. None for all.

    Raises UserError for layers of a different kind, or without a size.
    """
    keys, count = checkpoint.layer_keys, checkpoint.layer_count()
    types = keys.get("layer_types") or [FULL] * count
    # Some configs are copies of the target's, which has more layers.
    if not isinstance(types, list) or len(types) < count or any(kind not in (FULL, SLIDING) for kind in types[:count]):
        raise UserError(
            f"'{checkpoint.name}' has layer_types in its config.json that are not {FULL} or {SLIDING} for each of its "
            f"{count} layers."
        )
    # A config may keep the size of a window that it turns off.
    if SLIDING not in types[:count] or keys.get("use_sliding_window") is False:
        return (None,) * count
    size = keys.get("sliding_window")
    if not isinstance(size, int) or size < 1:
        raise UserError(f"'{checkpoint.name}' has sliding layers but no sliding_window in its config.json.")
    return tuple(size if kind == SLIDING else None for kind in types[:count])
