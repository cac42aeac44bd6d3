"""/ngrams, /ngram_save and /ngram_load: look at the n-gram storage, write it to a file and read it back."""

from dataclasses import replace
from heapq import nlargest

from ngram_assisted import load_storage, save_storage
from utils.bounds import WholeRange
from utils.commands.outcomes import ChangeSettings, Outcome, Reply, ShowRows, UseStorage
from utils.commands.paths import output_in, path_in
from utils.commands.registry import Command, CommandContext
from utils.config.value_types import StorageSpec
from utils.distributed import run_once
from utils.errors import UserError
from utils.text import token_piece

EXAMPLE = "/ngram_save answers.ngrams"
DEFAULT_ROWS, MAX_ROWS = 20, 1000


def _save(argument: str, context: CommandContext) -> Outcome:
    file, storage = output_in(argument, EXAMPLE), context.harness.state.storage
    if not storage:
        raise UserError("the n-gram storage is empty: send a prompt first.")
    model = context.harness.pair.target_name
    run_once(lambda: save_storage(storage, file.path, model, overwrite=file.overwrite))
    return [Reply(f"{len(storage)} n-grams written to {file.path} ({file.path.stat().st_size / 1e6:.1f} MB)")]


def _load(argument: str, context: CommandContext) -> Outcome:
    path, harness, settings = path_in(argument, EXAMPLE), context.harness, context.settings
    storage, kind, model = load_storage(path, context.limits.vocabulary, settings.ngram_limit)
    notes = [f"{len(storage)} n-grams read from {path}: {kind} {storage.n}"]
    if settings.reset_in_between:
        notes.append("/reset_in_between was turned off to keep them")
    if model != harness.pair.target_name:
        notes.append(f"they come from runs of {model or 'an unknown model'}, not of {harness.pair.target_name}")
    settings = replace(settings, ngram_storage=StorageSpec(kind, storage.n), reset_in_between=False)
    # In this order: a changed ngram_storage makes the session create an empty storage, which is then replaced.
    return [ChangeSettings(settings), UseStorage(storage), Reply("; ".join(notes))]


def _ngrams(argument: str, context: CommandContext) -> Outcome:
    """The n-grams with the highest counts; among equal counts those with the longest contexts come first."""
    limit = WholeRange(1, MAX_ROWS).parse(argument or str(DEFAULT_ROWS))
    storage, tokenizer = context.harness.state.storage, context.harness.pair.tokenizer
    if not storage:
        raise UserError("the n-gram storage is empty: send a prompt with /ngram on first.")
    entries = (
        (count, len(prefix), prefix, token) for prefix, counts in storage.contexts() for token, count in counts.items()
    )
    rows = [
        (f"{count}x", " ".join(token_piece(tokenizer, part) for part in (*prefix, token)))
        for count, _, prefix, token in nlargest(limit, entries)
    ]
    return [Reply(f"{len(storage)} n-grams; the {len(rows)} most frequent:"), ShowRows(rows)]


STORAGE_COMMANDS = (
    Command("ngrams", "[N]", f"the N most frequent n-grams of the storage (default: {DEFAULT_ROWS})", _ngrams),
    Command("ngram_save", "FILE [overwrite]", "write the n-gram storage to a file", _save),
    Command(
        "ngram_load", "FILE", "use the n-gram storage from a file from now on, and turn off /reset_in_between", _load
    ),
)
