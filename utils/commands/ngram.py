"""/ngram: n-gram assisted decoding on or off, and its storage: settings and files."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ngram_assisted import load_storage, save_storage
from utils.commands.shared.registry import (
    ChangeSettings,
    CommandContext,
    CommandError,
    Outcome,
    Reply,
    UseStorage,
    output_in,
    path_in,
)
from utils.commands.shared.setting_commands import set_or_show, setting_command
from utils.config.settings import NGRAM_PARTS, setting_fields
from utils.config.value_types import SWITCH_WORDS, StorageSpec
from utils.errors import UserError, check_choice
from utils.text import count_of

EXAMPLE = "/ngram {} answers.ngrams"


def _ngram(argument: str, context: CommandContext) -> Outcome:
    match = re.match(r"(\w*)[\s=]*(.*)", argument, re.DOTALL)
    assert match is not None
    word, rest = match[1].lower(), match[2]
    if argument.lower() in ("", "on", "off", *SWITCH_WORDS):
        return set_or_show(setting_fields()["ngram"], argument, context)
    if word not in SUB_COMMANDS:
        check_choice(argument.split()[0], ("on", "off", *SUB_COMMANDS), "the word")
        raise UserError(f"'{word}' takes nothing after it, but got '{rest}'.")
    try:
        return SUB_COMMANDS[word](rest, context)
    except UserError as error:
        raise CommandError(f"/ngram {word}: {error}") from error


def _save(argument: str, context: CommandContext) -> Outcome:
    (path, overwrite), storage = output_in(argument, EXAMPLE.format("save")), context.harness.state.storage
    if not storage:
        raise UserError("the n-gram storage is empty: send a prompt first.")
    save_storage(storage, path, context.harness.pair.target_name, overwrite=overwrite)
    return [Reply(f"{count_of(len(storage), 'n-gram')} written to {path} ({path.stat().st_size / 1e6:.1f} MB)")]


def _load(argument: str, context: CommandContext) -> Outcome:
    path, harness, settings = path_in(argument, EXAMPLE.format("load")), context.harness, context.settings
    storage, kind, model = load_storage(path, context.limits.vocabulary, settings.ngram_limit)
    notes = [f"{count_of(len(storage), 'n-gram')} read from {path}: {kind} {storage.n}"]
    if settings.reset_in_between:
        notes.append("/ngram keep was turned on, so that they are used")
    if model != harness.pair.target_name:
        notes.append(f"they come from runs of {model or 'an unknown model'}, not of {harness.pair.target_name}")
    settings = replace(settings, ngram_storage=StorageSpec(kind, storage.n), reset_in_between=False)
    # In this order: a changed ngram_storage makes the session create an empty storage, which is then replaced.
    return [ChangeSettings(settings), UseStorage(storage), Reply("; ".join(notes))]


SUB_COMMANDS: dict[str, Callable[[str, CommandContext], Outcome]] = {
    **{part.name.removeprefix("ngram "): partial(set_or_show, part) for part in NGRAM_PARTS},
    "reset": partial(set_or_show, setting_fields()["reset_in_between"]),  # the opposite of keep
    "save": _save,
    "load": _load,
}


def _words() -> dict[str, str]:
    """The completions of /ngram with their descriptions."""
    words = dict(NGRAM.words)
    for part in NGRAM_PARTS:
        word = part.name.removeprefix("ngram ")
        words |= {word: part.summary} | {f"{word} {value}": text for value, text in part.forms.items()}
    return words | {"save": "write the storage", "load": "read a storage"}


NGRAM = setting_command(setting_fields()["ngram"])
SYNTAX = (
    ("[on|off]", "run it, or not"),
    *((f"{part.name.removeprefix('ngram ')} {part.value_type.usage}", part.summary) for part in NGRAM_PARTS),
    ("save|load FILE", "write it (FILE overwrite replaces), read it"),
)
NGRAM_COMMANDS = (
    replace(
        NGRAM,
        usage="[on|off] ...",
        run=_ngram,
        syntax=tuple(f"/ngram {form:22}{meaning}" for form, meaning in SYNTAX),
        current=lambda settings: ", ".join(
            f"{part.name.removeprefix('ngram ')} {part.show(settings)}" for part in NGRAM_PARTS
        ),
        words=_words(),
        files=("save ", "load "),
    ),
)
