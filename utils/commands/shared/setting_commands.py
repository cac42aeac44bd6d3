"""One command for each row of the table of settings in `utils.config`.

`/gamma` shows the value, `/gamma 6` sets it, and `/cache` without an argument switches.
"""

from collections.abc import Iterator
from functools import partial

from utils.commands.shared.outcomes import ChangeSettings, Outcome, Reply, RetestEngine, ShowTable
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.engine_page import HEADINGS, engine_notes, engine_rows
from utils.config.setting_table import SAMPLING_PARTS, Setting, setting_fields
from utils.config.settings import Settings

OWN_COMMANDS = ("ngram", "turns")  # they have subcommands
MAX_TYPED = 20  # characters of a command and its argument in a list of /help; the page has all words
RETEST = "test"  # of /engine
NO_EFFECT = "no effect while /{} is off"
NO_TEMPLATE = "no effect: this tokenizer has no chat template"


def setting_commands() -> Iterator[Command]:
    """A command for every setting without subcommands."""
    for row in (*setting_fields().values(), *SAMPLING_PARTS):
        if row.group and row.name not in OWN_COMMANDS:
            yield setting_command(row)


def setting_command(row: Setting) -> Command:
    """The command that shows and changes a setting."""
    usage = row.value_type.usage
    return Command(
        row.name,
        usage if len(row.name + usage) <= MAX_TYPED else "NAME",
        row.summary,
        partial(set_or_show, row),
        group=row.group,
        rank=row.rank,
        page=Page(row.text, _example(row), tuple(_syntax(row)), row.see_also),
        current=row.show,
        words=row.value_type.words,
        meanings=row.forms,
        free_text=row.name == "system",
    )


def _example(row: Setting) -> tuple[str, ...]:
    """The typed line and its output, which is the value itself unless the row defines it."""
    value, *shown = row.example or ("",)
    return (f"> /{row.name} {value}".rstrip(), *(shown or [f"{row.name}: {value}"]))


def _syntax(row: Setting) -> Iterator[str]:
    """A line for each form of the argument that the row describes."""
    width = max(map(len, row.forms), default=0)
    yield from (f"/{row.name} {form:{width}}    {text}" for form, text in row.forms.items())
    if row.forms and row.is_switch:
        yield f"/{row.name:{width + len(row.name) + 1}}    switch between on and off"


def set_or_show(row: Setting, argument: str, context: CommandContext) -> Outcome:
    """Set the value. Without an argument, toggle a switch or show any other setting."""
    before, name = context.settings, row.name
    if name == "engine" and argument.lower() == RETEST:
        return [RetestEngine()]
    if not argument and not row.is_switch:
        return _shown(row, context)
    settings = row.change(before, argument, context.limits)
    # A toggled switch is easily mistaken for one that was only shown.
    was = "" if argument else f" (was {row.show(before)})"
    hint = "" if row.has_effect(settings) else f"   ({NO_EFFECT.format(row.needs)})"
    if name == "chat" and settings.chat is not False and not settings.chat_template:
        hint = f"   ({NO_TEMPLATE})"
    processor = _processor(row, settings) + _implied(row, before, settings)
    return [ChangeSettings(settings, f"{name}: {row.describe(settings)}{was}{processor}{hint}")]


def _shown(row: Setting, context: CommandContext) -> Outcome:
    """The value, and what is in effect if that can differ: /engine auto shows which engine was chosen."""
    fact = dict(context.facts()).get(row.fact) if row.fact else None
    state = "" if fact is None else f"; now {fact}"
    value = f"{row.describe(context.settings)}{state}{_processor(row, context.settings)}"
    about = "; ".join(filter(None, (row.summary, "|".join(row.value_type.words))))
    reply = Reply(f"{row.name}: {value}" + (f"   ({about})" if about else ""))
    if row.name != "engine":
        return [reply]
    engine = context.harness.pair.engine
    return [reply, ShowTable(HEADINGS, engine_rows(engine)), *map(Reply, engine_notes(engine))]


def _processor(row: Setting, settings: Settings) -> str:
    """The whole processor, if the setting is a part of it."""
    return f"; processor: {setting_fields()['processor'].show(settings)}" if row in SAMPLING_PARTS else ""


def _implied(row: Setting, before: Settings, settings: Settings) -> str:
    """Other parts of the processor that a change of one part has changed."""
    if row not in SAMPLING_PARTS:
        return ""
    old, new = before.processor, settings.processor
    if row.name != "temperature" and old.effective_temperature != new.effective_temperature:
        return f" (at temperature {new.effective_temperature:g}, because greedy has no {row.name})"
    others = [part for part in SAMPLING_PARTS[1:] if part is not row]
    dropped = [part.name for part in others if part.get(before) and not part.get(settings)]
    return f" (greedy has no {' and no '.join(dropped)})" if dropped else ""
