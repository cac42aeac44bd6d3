"""Asking the hub about a model before it is fetched, once and with a short wait: its client would retry for half a minute."""

from __future__ import annotations

from typing import Any

from huggingface_hub import HfApi, constants, try_to_load_from_cache

from utils.errors import UserError
from utils.models.embedded import Report
from utils.models.failures import explanation, is_offline, quiet

PATIENCE = 8.0  # seconds


def hub_arguments(name: str, revision: str | None, word: str, report: Report) -> dict[str, Any]:
    """What `from_pretrained` has to be told about a hub id. Raises UserError where it names nothing that can be had."""
    chosen = {"revision": revision} if revision else {}
    if constants.HF_HUB_OFFLINE:  # the user's own wish: nothing is asked
        return chosen
    try:
        with quiet():
            HfApi().model_info(name, revision=revision, timeout=PATIENCE)
    except Exception as error:
        if not (is_offline(error) and _is_kept(name, revision)):
            raise UserError(explanation(error, word)) from error
        report(f"the hub cannot be reached: {word} is taken as it was fetched before")
        return chosen | {"local_files_only": True}
    return chosen


def _is_kept(name: str, revision: str | None) -> bool:
    return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
