"""One command for each setting, derived from the table in `utils.config.settings`.

`/gamma` shows the value, `/gamma 6` sets it, and `/cache` without an argument switches a toggle.
"""

from collections.abc import Iterator
from functools import partial

from utils.commands.outcomes import ChangeSettings, Outcome, Reply
from utils.commands.registry import Command, CommandContext
from utils.config.settings import Setting, setting_fields
from utils.config.value_types import Toggle, ToggleOrChoice

NO_EFFECT = "no effect while /{} is off"
NO_TEMPLATE = "no effect: this tokenizer has no chat template"


def setting_commands() -> Iterator[Command]:
    """A command for every field of Settings."""
    for name, entry in setting_fields().items():
        value_type = entry.value_type
        yield Command(
            name=name,
            usage=value_type.usage,
            summary=entry.help,
            run=partial(_set_or_show, name, entry),
            current=entry.show,
            words=value_type.words,
        )


def _set_or_show(name: str, entry: Setting, argument: str, context: CommandContext) -> Outcome:
    """Set the field. Without an argument switch a toggle, and show any other field."""
    if not argument and not isinstance(entry.value_type, Toggle | ToggleOrChoice):
        # What is in effect can differ from the setting: /engine auto says which engine was chosen.
        fact = dict(context.facts).get(entry.fact)
        state = "" if fact is None else f"; now {fact}"
        return [Reply(f"{name}: {entry.show(context.settings)}{state}   ({entry.help})")]
    settings = entry.change(context.settings, argument, context.limits)
    hint = "" if entry.has_effect(settings) else f"   ({NO_EFFECT.format(entry.needs)})"
    if name == "chat" and settings.chat is not False and not settings.chat_template:
        hint = f"   ({NO_TEMPLATE})"
    return [ChangeSettings(settings, f"{name}: {entry.show(settings)}{hint}")]
