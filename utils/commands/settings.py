"""One command per setting, derived from the table in utils.config.settings: `/gamma` shows, `/gamma 6` sets, `/debug` flips."""

from collections.abc import Iterator
from dataclasses import Field
from functools import partial
from typing import Any

from utils.commands.registry import Command, Outcome, Situation
from utils.config.settings import Settings, changed, setting_fields, shown
from utils.config.value_types import Levels, Toggle


def tuning_commands() -> Iterator[Command]:
    """A command for every field of Settings."""
    for name, entry in setting_fields().items():
        kind = entry.metadata["kind"]
        yield Command(
            name=name,
            usage=kind.usage,
            summary=entry.metadata["help"],
            run=partial(_tune, name, entry),
            current=partial(_current, entry),
            words=kind.words,
        )


def _current(entry: Field[Any], settings: Settings) -> str:
    return shown(settings, entry)


def _tune(name: str, entry: Field[Any], argument: str, situation: Situation) -> Outcome:
    """Set the field, or show it where it needs an argument and none was given."""
    if not argument and not isinstance(entry.metadata["kind"], Toggle | Levels):
        fact = dict(situation.facts).get(entry.metadata["fact"])
        state = "" if fact is None else f"; now {fact}"
        return Outcome(reply=f"{name}: {shown(situation.settings, entry)}{state}   ({entry.metadata['help']})")
    settings = changed(situation.settings, entry, argument, situation.limits)
    needs = entry.metadata["needs"]
    idle = f"   (no effect while /{needs} is off)" if needs and not getattr(settings, needs) else ""
    return Outcome(settings=settings, reply=f"{name}: {shown(settings, entry)}{idle}")
