"""One command for each row of the table of settings in `utils.config`, and what /engine shows of the engines.

`/gamma` shows the value, `/gamma 6` sets it, and `/cache` without an argument switches.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from utils.commands.shared.registry import Action, ChangeSettings, Command, CommandContext, Outcome, Reply, ShowRows
from utils.config.settings import SAMPLING_PARTS, Setting, Settings, setting_fields
from utils.engine import Engine
from utils.engine.engine_choice import COMPARED_WIDTHS, EngineFigures, expected_speed
from utils.text import byte_size

OWN_COMMANDS = ("ngram", "turns")  # they have subcommands
MAX_TYPED = 20  # characters of a command and its argument in a list of /help; the page has all words
RETEST = "test"  # of /engine
NO_EFFECT = "no effect while /{} is off"
NO_TEMPLATE = "no effect: this tokenizer has no chat template"
HEADINGS = ("engine", "step", *(f"v({width})" for width in COMPARED_WIDTHS), "prefill", "memory", "threads", "bits")
LEGEND = (
    "step: ms of a decode step; v(k): time of a verify pass of k tokens in steps; prefill: tokens/s of a long prompt; "
    "memory: what an engine needs for the weights; bits: whether a verify pass has those of decode steps. *: in use. "
    "~: estimated from a few layers."
)
KEPT = "{} is used although {} is {:.0%} faster, because its bits are equal."
ELSEWHERE = "Target-only would be {:.2f}x as fast in the {} engine (estimate)."


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
        about=row.text,
        example=_example(row),
        syntax=tuple(_syntax(row)),
        see_also=row.see_also,
        current=row.show,
        words={word: row.forms.get(word, "") for word in row.value_type.words},
        free_text=row.name == "system",
    )


def _example(row: Setting) -> tuple[str, ...]:
    """The typed line and its output, which is the value itself unless the row defines it."""
    value, *shown = row.example or ("on" if row.default is False else "off",)
    return (f"> /{row.name} {value}", *(shown or [f"{row.name}: {value}"]))


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
        return [Action.RETEST_ENGINE]
    if not argument and not row.is_switch:
        return _shown(row, context)
    settings = row.change(before, argument, context.limits)
    # A toggled switch is easily mistaken for one that was only shown.
    was = "" if argument else f" (was {row.show(before)})"
    hint = "" if row.has_effect(settings) else f"   ({NO_EFFECT.format(row.needs)})"
    if name == "chat" and settings.chat is not False and not settings.chat_template:
        hint = f"   ({NO_TEMPLATE})"
    processor = _processor(row, settings)
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
    return [reply, ShowRows(engine_rows(engine), HEADINGS), *map(Reply, engine_notes(engine))]


def _processor(row: Setting, settings: Settings) -> str:
    """The whole processor, if the setting is a part of it."""
    return f"; processor: {setting_fields()['processor'].show(settings)}" if row in SAMPLING_PARTS else ""


def engine_rows(engine: Engine) -> list[tuple[str, ...]]:
    """The cells of each engine under HEADINGS."""
    table = engine.table
    rows = {name: table.get(name, EngineFigures()) for name in engine.names}
    used = engine.state.kind
    rows[used] = _present_figures(engine, rows[used])
    return [_cells(f"{name} *" if name == used else name, row) for name, row in rows.items()]


def engine_notes(engine: Engine) -> Iterator[str]:
    """Sentences below the table: what was expected, why engines were not chosen, and when that was measured."""
    table = engine.table
    yield LEGEND
    measured = {name: row for name, row in table.items() if row.is_candidate and row.step_seconds}
    used = engine.state.kind
    if len(measured) > 1:
        speeds = {name: expected_speed(row, engine.workload) for name, row in measured.items()}
        shown = ", ".join(f"{name} {speeds[name]:.1f}" for name in sorted(speeds, key=lambda name: -speeds[name]))
        day = max(row.measured_on for row in measured.values())
        yield f"Measured on {day}. Expected tokens/s of the enabled strategies: {shown}."
        fastest = max(speeds, key=lambda name: speeds[name])
        if measured.get(used, EngineFigures()).verified and speeds[fastest] > speeds[used]:
            yield KEPT.format(used, fastest, speeds[fastest] / speeds[used] - 1)
    rows = {name: table.get(name) or EngineFigures(engine.problem(name)) for name in engine.names}
    yield from (f"{name}: {row.problem}." for name, row in rows.items() if row.problem)
    if other := engine.faster_baseline():
        yield ELSEWHERE.format(other.factor, other.name)


def _present_figures(engine: Engine, row: EngineFigures) -> EngineFigures:
    """The figures of the engine in use, which were measured with whole models."""
    costs = tuple((width, 1 + engine.costs[width - 2]) for width in COMPARED_WIDTHS if width <= len(engine.costs) + 1)
    verified, threads = engine.state.verified, engine.state.threads
    measured = replace(row, verified=verified, threads=threads, nbytes=engine.nbytes())
    return replace(measured, step_seconds=engine.step_seconds, costs=costs, estimated=False) if costs else measured


def _cells(name: str, row: EngineFigures) -> tuple[str, ...]:
    costs = (row.cost(width) for width in COMPARED_WIDTHS)
    return (
        name,
        f"{'~' * row.estimated}{1000 * row.step_seconds:.1f}" if row.step_seconds else "-",
        *("-" if cost is None else f"{cost:.2f}" for cost in costs),
        f"{row.prefill:.0f}" if row.prefill else "-",
        byte_size(row.nbytes) if row.nbytes else "-",
        str(row.threads) if row.threads else "-",
        _bits(row),
    )


def _bits(row: EngineFigures) -> str:
    """What is known about the bits of verify passes: equal, not verified, or possibly different."""
    if row.verified:
        return "equal"
    if not row.step_seconds:
        return "-"
    return "not verified" if row.promise else "can differ"
