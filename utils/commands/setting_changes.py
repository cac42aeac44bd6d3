"""Changes or shows one setting, for every command that does so."""

from utils.commands.outcomes import ChangeSettings, Outcome, Reply, RetestEngine, ShowTable
from utils.commands.registry import CommandContext
from utils.comparison.engine_page import HEADINGS, engine_notes, engine_rows
from utils.config.sampling_parts import Sampling
from utils.config.setting_parts import SAMPLING_PARTS, SettingPart
from utils.config.settings import Setting, Settings

RETEST = "test"  # of /engine
NO_EFFECT = "no effect while /{} is off"
NO_TEMPLATE = "no effect: this tokenizer has no chat template"
SAMPLING_NAMES = tuple(part.name for part in SAMPLING_PARTS)


def set_or_show(name: str, entry: Setting | SettingPart, argument: str, context: CommandContext) -> Outcome:
    """Set the value. Without an argument switch a switch, and show any other setting."""
    before = context.settings
    if name == "engine" and argument.lower() == RETEST:
        return [RetestEngine()]
    if not argument and not entry.is_switch:
        # What is in effect can differ from the setting: /engine auto says which engine was chosen.
        fact = dict(context.facts).get(entry.fact)
        state = "" if fact is None else f"; now {fact}"
        reply = Reply(f"{name}: {entry.describe(before)}{state}{_processor(name, before)}   ({entry.help})")
        return [reply, *_engine_table(context)] if name == "engine" else [reply]
    settings = entry.change(before, argument, context.limits)
    # A switch that was not named is easily taken for one that was only shown.
    was = "" if argument else f" (was {entry.show(before)})"
    hint = "" if entry.has_effect(settings) else f"   ({NO_EFFECT.format(entry.needs)})"
    if name == "chat" and settings.chat is not False and not settings.chat_template:
        hint = f"   ({NO_TEMPLATE})"
    processor = _processor(name, settings) + _implied(name, before, settings)
    return [ChangeSettings(settings, f"{name}: {entry.describe(settings)}{was}{processor}{hint}")]


def _engine_table(context: CommandContext) -> Outcome:
    """The measurements of all engines."""
    engine = context.harness.pair.engine
    return [ShowTable(HEADINGS, engine_rows(engine)), *map(Reply, engine_notes(engine))]


def _processor(name: str, settings: Settings) -> str:
    """The whole processor, after one of its parts was changed."""
    return f"; processor: {Sampling.of(settings).text}" if name in SAMPLING_NAMES else ""


def _implied(name: str, before: Settings, settings: Settings) -> str:
    """What a change of a part of the processor has changed besides that part."""
    if name not in SAMPLING_NAMES:
        return ""
    old, new = Sampling.of(before), Sampling.of(settings)
    if name != "temperature" and old.temperature != new.temperature:
        return f" (at temperature {new.temperature:g}, because greedy has no {name})"
    dropped = [part for part in ("top_k", "top_p") if getattr(old, part) and not getattr(new, part) and part != name]
    return f" (greedy has no {' and no '.join(dropped)})" if dropped else ""
