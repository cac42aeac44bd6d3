"""/ngram_save and /ngram_load: an n-gram storage that outlives its session."""

import os
from dataclasses import replace
from heapq import nlargest
from pathlib import Path

from utils.commands.registry import Command, Outcome, Situation
from utils.config.value_types import StorageSpec, Whole
from utils.errors import UserError
from utils.text import token_piece

SHOWN, MOST_SHOWN = 20, 1000


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


def _ngrams(argument: str, situation: Situation) -> Outcome:
    """The entries that were counted most often, the longest contexts first among equals."""
    most: int = Whole(1, MOST_SHOWN).parse(argument or str(SHOWN), SHOWN, situation.limits)
    storage, tokenizer = situation.bench.memory.storage, situation.bench.pair.tokenizer
    if not storage:
        raise UserError("the n-gram storage is empty: send a prompt with /ngram on first.")
    grams = (
        (count, len(context), context, token)
        for context, counts in storage.contexts()
        for token, count in counts.items()
    )
    most_often = [(count, (*context, token)) for count, _, context, token in nlargest(most, grams)]
    rows = ((f"{count}x", " ".join(token_piece(tokenizer, token) for token in gram), "") for count, gram in most_often)
    reply = f"{len(storage)} n-grams; most often ({min(most, len(storage))}), the last token followed the others:"
    return Outcome(reply=reply, rows=tuple(rows))


def _path(argument: str) -> Path:
    if not argument:
        raise UserError("give a file, for example: /ngram_save answers.ngrams")
    return Path(os.path.expanduser(argument))


STORAGE_COMMANDS = (
    Command("ngrams", "[N]", f"the N entries of the n-gram storage that were counted most often (N: {SHOWN})", _ngrams),
    Command("ngram_save", "FILE", "write the n-gram storage to a file", _save),
    Command("ngram_load", "FILE", "go on with a storage from a file; /reset_in_between is turned off", _load),
)
