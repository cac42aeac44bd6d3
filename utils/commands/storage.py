"""/ngram_save and /ngram_load: an n-gram storage that outlives its session."""

import os
from dataclasses import replace
from pathlib import Path

from utils.commands.registry import Command, Outcome, Situation
from utils.errors import UserError
from utils.kinds import StorageSpec


def _save(argument: str, situation: Situation) -> Outcome:
    path, storage = _path(argument), situation.bench.memory.storage
    if not storage:
        raise UserError("the n-gram storage is empty: send a prompt first.")
    situation.bench.storages.save(storage, path, situation.bench.pair.target_name)
    return Outcome(reply=f"{len(storage)} n-grams written to {path} ({path.stat().st_size / 1e6:.1f} MB)")


def _load(argument: str, situation: Situation) -> Outcome:
    path, bench, settings = _path(argument), situation.bench, situation.settings
    storage, kind, model = bench.storages.load(path, bench.vocabulary, settings.ngram_limit)
    notes = [f"{len(storage)} n-grams read from {path}: {kind} {storage.n}"]
    if settings.reset_in_between:
        notes.append("/reset_in_between is off now, so that they are kept")
    if model != bench.pair.target_name:
        notes.append(f"they come from runs of {model or 'an unknown model'}, not of {bench.pair.target_name}")
    changed = replace(settings, ngram_storage=StorageSpec(kind, storage.n), reset_in_between=False)
    return Outcome(settings=changed, storage=storage, reply="; ".join(notes))


def _path(argument: str) -> Path:
    if not argument:
        raise UserError("give a file, for example: /ngram_save answers.ngrams")
    return Path(os.path.expanduser(argument))


STORAGE_COMMANDS = (
    Command("ngram_save", "FILE", "write the n-gram storage to a file", _save),
    Command("ngram_load", "FILE", "go on with a storage from a file; /reset_in_between is turned off", _load),
)
