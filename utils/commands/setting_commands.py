"""One command for each row of the table of settings in `utils.config`, and what /engine shows of the engines.

`/gamma` shows the value, `/gamma 6` sets it, and `/cache` without an argument switches.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import takewhile

from ngram_assisted import load_storage, save_storage
from utils.commands.shared import registry
from utils.config.settings import (
    NGRAM_PARTS,
    SAMPLING_PARTS,
    Setting,
    Settings,
    apply_typed,
    listed_settings,
    setting_fields,
    split_setting,
)
from utils.config.value_types import SWITCH_WORDS, StorageSpec
from utils.engine import Engine
from utils.engine.engine_choice import COMPARED_WIDTHS, EngineFigures, expected_speed
from utils.errors import UserError, check_choice, naming
from utils.files import read_text, write_file
from utils.text import byte_size, count_of, escaped, unescaped

MAX_TYPED = 20  # characters of a command and its argument in a list of /help; the page has all words
RETEST = "test"  # of /engine
NO_EFFECT = "   (no effect while /chat is off)"
NO_TEMPLATE = "   (no effect: this tokenizer has no chat template)"
HEADINGS = ("engine", "step", *(f"v({width})" for width in COMPARED_WIDTHS), "prefill", "memory", "threads", "bits")
LEGEND = (
    "step: ms of a decode step; v(k): time of a verify pass of k tokens in steps; prefill: tokens/s of a long prompt; "
    "memory: what an engine needs for the weights; bits: whether a verify pass has those of decode steps. *: in use. "
    "~: estimated from a few layers."
)
KEPT = "{} is used although {} is {:.0%} faster, because its bits are equal."


def setting_command(row: Setting) -> registry.Command:
    usage, width = row.value_type.usage, max(map(len, row.forms), default=0)
    return registry.Command(
        row.name,
        usage if len(row.name + usage) <= MAX_TYPED else "NAME",
        row.summary,
        partial(set_or_show, row),
        group=row.group,
        rank=row.rank,
        about=row.text,
        example=_example(row),
        syntax=tuple(f"/{row.name} {form:{width}}    {text}" for form, text in row.forms.items()),
        current=row.show,
        words={word: row.forms.get(word, "") for word in row.value_type.words},
    )


def _example(row: Setting) -> tuple[str, ...]:
    """The typed line and its output. By default they have the first word that is not the default value."""
    others = (word for word in row.value_type.words if word != row.value_type.show(row.default))
    value, *shown = row.example or (next(others),)
    return (f"> /{row.name} {value}", *(shown or [f"{row.name}: {value}"]))


def set_or_show(row: Setting, argument: str, context: registry.CommandContext) -> registry.Outcome:
    """Set the value. Without an argument, toggle a switch or show any other setting."""
    before, name = context.settings, row.name
    if name == "engine" and argument.lower() == RETEST:
        return [registry.Action.RETEST_ENGINE]
    if not argument and not row.value_type.is_switch:
        return _shown(row, context)
    settings = row.change(before, argument, context.limits)
    # A toggled switch is easily mistaken for one that was only shown.
    was = "" if argument else f" (was {row.show(before)})"
    hint = NO_EFFECT if row.needs_chat and not settings.uses_chat else ""
    if name == "chat" and settings.chat is not False and not settings.chat_template:
        hint = NO_TEMPLATE
    processor = _processor(row, settings)
    return [registry.ChangeSettings(settings, f"{name}: {row.describe(settings)}{was}{processor}{hint}")]


def _shown(row: Setting, context: registry.CommandContext) -> registry.Outcome:
    """The value, and what is in effect if that can differ: /engine auto shows which engine was chosen."""
    fact = dict(context.facts()).get(row.fact) if row.fact else None
    state = "" if fact is None else f"; now {fact}"
    value = f"{row.describe(context.settings)}{state}{_processor(row, context.settings)}"
    about = "; ".join(filter(None, (row.summary, "|".join(row.value_type.words))))
    reply = registry.Reply(f"{row.name}: {value}" + (f"   ({about})" if about else ""))
    if row.name != "engine":
        return [reply]
    engine = context.harness.pair.engine
    return [reply, registry.ShowRows(engine_rows(engine), HEADINGS), *map(registry.Reply, engine_notes(engine))]


def _processor(row: Setting, settings: Settings) -> str:
    """The whole processor, if the setting is a part of it."""
    return f"; processor: {setting_fields()['processor'].show(settings)}" if row in SAMPLING_PARTS else ""


def engine_rows(engine: Engine) -> list[tuple[str, ...]]:
    """The cells of each engine under HEADINGS."""
    table = engine.table
    rows = {name: table.get(name, EngineFigures()) for name in engine.problems}
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
    rows = {name: table.get(name) or EngineFigures(problem) for name, problem in engine.problems.items()}
    yield from (f"{name}: {row.problem}." for name, row in rows.items() if row.problem)
    if other := engine.faster_baseline():
        yield f"Target-only would be {other.factor:.2f}x as fast in the {other.name} engine (estimate)."


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


EXAMPLE = "/ngram {} answers.ngrams"


def _ngram(argument: str, context: registry.CommandContext) -> registry.Outcome:
    match = re.match(r"(\w*)[\s=]*(.*)", argument, re.DOTALL)
    assert match is not None
    word, rest = match[1].lower(), match[2]
    if argument.lower() in ("", "on", "off", *SWITCH_WORDS):
        return set_or_show(setting_fields()["ngram"], argument, context)
    if word == "reset":  # the opposite of keep
        return set_or_show(setting_fields()["reset_in_between"], rest, context)
    if word not in NGRAM_FORMS:
        check_choice(argument.split()[0], ("on", "off", *NGRAM_FORMS), "the word")
        raise UserError(f"'{word}' takes nothing after it, but got '{rest}'.")
    with naming(word):
        return NGRAM_FORMS[word][0](rest, context)


def _save_ngrams(argument: str, context: registry.CommandContext) -> registry.Outcome:
    (path, overwrite), storage = registry.output_in(argument, EXAMPLE.format("save")), context.harness.state.storage
    if not storage:
        raise UserError("the n-gram storage is empty: send a prompt first.")
    save_storage(storage, path, context.harness.pair.target_name, overwrite=overwrite)
    return [registry.Reply(f"{count_of(len(storage), 'n-gram')} written to {path} ({byte_size(path.stat().st_size)})")]


def _load_ngrams(argument: str, context: registry.CommandContext) -> registry.Outcome:
    path, harness, settings = registry.path_in(argument, EXAMPLE.format("load")), context.harness, context.settings
    storage, kind, model = load_storage(path, context.limits.vocabulary, settings.ngram_limit)
    notes = [f"{count_of(len(storage), 'n-gram')} read from {path}: {kind} {storage.n}"]
    if settings.reset_in_between:
        notes.append("/ngram keep was turned on, so that they are used")
    if model != harness.pair.target_name:
        notes.append(f"they come from runs of {model or 'an unknown model'}, not of {harness.pair.target_name}")
    settings = replace(settings, ngram_storage=StorageSpec(kind, storage.n), reset_in_between=False)
    # In this order: a changed ngram_storage makes the session create an empty storage, which is then replaced.
    return [registry.ChangeSettings(settings), storage, registry.Reply("; ".join(notes))]


# The words after /ngram: what they run, their argument, and their meaning.
NGRAM_FORMS: dict[str, tuple[Callable[[str, registry.CommandContext], registry.Outcome], str, str]] = {
    **{
        part.name.removeprefix("ngram "): (partial(set_or_show, part), part.value_type.usage, part.summary)
        for part in NGRAM_PARTS
    },
    "save": (_save_ngrams, "FILE [overwrite]", "write the storage"),
    "load": (_load_ngrams, "FILE", "read a storage"),
}
SETTING_COMMANDS = {
    row.name: setting_command(row) for row in (*setting_fields().values(), *SAMPLING_PARTS) if row.group
}
SETTING_COMMANDS["ngram"] = replace(
    SETTING_COMMANDS["ngram"],
    usage="[on|off] ...",
    run=_ngram,
    syntax=(
        "/ngram [on|off]              run it, or not",
        *(f"/ngram {f'{word} {usage}':22}{meaning}" for word, (_, usage, meaning) in NGRAM_FORMS.items()),
    ),
    current=lambda settings: ", ".join(
        f"{part.name.removeprefix('ngram ')} {part.show(settings)}" for part in NGRAM_PARTS
    ),
    words=SETTING_COMMANDS["ngram"].words | {word: meaning for word, (_, _, meaning) in NGRAM_FORMS.items()},
    files=("save ", "load "),
)


FORGOTTEN = "{} forgotten; the next prompt begins a new conversation"
NEW = "new"
LONGEST_VALUE = 40  # characters in /show
# The first line of a file with escaped values.
HEADER = r"# settings of /save for /run; in their values \n is a newline and \\ a backslash"


def _show(argument: str, context: registry.CommandContext) -> registry.Outcome:
    rows = [*context.facts()]
    for name, entry in listed_settings().items():
        value = entry.describe(context.settings)
        cut = value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE].rstrip()} ... (/{name})"
        rows.append((name, cut))
    return [registry.ShowRows(rows)]


def _turns(argument: str, context: registry.CommandContext) -> registry.Outcome:
    if argument.lower() != NEW:
        return set_or_show(setting_fields()["turns"], argument, context)
    turns = count_of(len(context.harness.state.conversations), "turn")
    return [registry.Action.FORGET_CONVERSATIONS, registry.Reply(FORGOTTEN.format(turns))]


def _save(argument: str, context: registry.CommandContext) -> registry.Outcome:
    path, overwrite = registry.output_in(argument, "/save evening.txt")
    values = ((name, entry.show(context.settings)) for name, entry in listed_settings().items())
    lines = [HEADER, *(f"/{name} {escaped(value)}" for name, value in values)]
    write_file(path, ("\n".join(lines) + "\n").encode(), overwrite=overwrite)
    return [registry.Reply(f"settings saved to {path}; /run {path} restores them")]


def _run(argument: str, context: registry.CommandContext) -> registry.Outcome:
    path = registry.path_in(argument, "/run evening.txt")
    # Windows ends lines with "\r\n". Other separators, such as a form feed, may be part of a prompt.
    header, *lines = (line.removesuffix("\r") for line in read_text(path).split("\n"))
    body = [line for line in (header, *lines) if line.strip() and not line.startswith("#")]
    if not header.startswith(HEADER):
        return [registry.RunLines(body)]
    # The settings at the start are one change. Blanks at the ends of values are escaped, others were typed by a user.
    named = list(takewhile(bool, map(split_setting, body)))
    values = {name.replace(" ", "_"): unescaped(text.strip()) for name, text in filter(None, named)}
    settings = apply_typed(context.settings, values, context.limits)
    rows = ((name, row, row.show(settings)) for name, row in listed_settings().items())
    changes = [f"{name} {escaped(value)}" for name, row, value in rows if value != row.show(context.settings)]
    summary = f"{count_of(len(named), 'setting')} read from {path}: {', '.join(changes) or 'nothing changes'}"
    rest = [unescaped(line) if line.startswith("/") else line for line in body[len(named) :]]
    # Twice, because a change of the engine or of the drafter kind measures costs, and the file has its own.
    again = [registry.ChangeSettings(settings)] if settings.costs else []
    return [registry.ChangeSettings(settings, summary), *again, registry.RunLines(rest)]


SETTING_COMMANDS["turns"] = replace(
    SETTING_COMMANDS["turns"],
    run=_turns,
    usage=f"[on|off|{NEW}]",
    words=SETTING_COMMANDS["turns"].words | {NEW: "begin a new conversation"},
)
SESSION_COMMANDS = (
    registry.Command(
        "undo",
        "",
        "revert the last change of a setting",
        lambda argument, context: [registry.Action.UNDO_SETTINGS],
        group="session",
        about="This includes the drafter of /learn. Repeat it for earlier changes.",
        example=("> /undo", "undone: cache on (was off)"),
    ),
    registry.Command(
        "save",
        "FILE",
        "write all settings to a file",
        _save,
        group="session",
        about="/run restores them.",
        example=("> /save evening.txt", "settings saved to evening.txt"),
        syntax=("/save FILE", "/save FILE overwrite    replaces a file"),
        files=("",),
    ),
    registry.Command(
        "run",
        "FILE",
        "run a file of commands and prompts",
        _run,
        group="session",
        about="It has one per line; # begins a comment.",
        example=("> /run evening.txt",),
        files=("",),
    ),
    registry.Command(
        "show",
        "",
        "the loaded models and all settings",
        _show,
        group="session",
        example=("> /show", "gamma   auto"),
    ),
    registry.Command(
        "clear",
        "",
        "clear the screen",
        lambda argument, context: [registry.Action.CLEAR_SCREEN],
        group="session",
        example=("> /clear",),
    ),
    registry.Command(
        "quit",
        "",
        "leave; so does Ctrl-D",
        lambda argument, context: [registry.Action.QUIT],
        group="session",
        rank=2,
        about="Ctrl-C stops a running prompt or report instead.",
        example=("> /quit",),
        at_once=True,
    ),
)
