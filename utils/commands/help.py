"""/help: the most important commands on one screen, all commands, or a page about one command or figure."""

from collections.abc import Iterable, Iterator
from contextlib import suppress

from utils.commands.shared.outcomes import Outcome, ShowRows
from utils.commands.shared.registry import ALIASES, GROUPS, Command, CommandContext, CommandError, Registry
from utils.errors import UserError

EVERYTHING = "all"


def _help(argument: str, context: CommandContext) -> Outcome:
    name = argument.removeprefix("/").lower()
    if not name:
        return [ShowRows(_first_page(context.registry))]
    if name == EVERYTHING:
        return [ShowRows(_listed(context.registry.visible()))]
    try:
        command = context.registry.find(name)
    except UserError as error:
        with suppress(UserError):
            return context.registry.run(f"/explain {name}", context)
        if " " not in name:
            raise CommandError(f"{name} is not a figure. {error}") from error
        command = context.registry.find(name.split()[0])  # such as "gamma auto"
    alias = [("alias", f"/{name} stands for /{ALIASES[name]}")] if name in ALIASES else []
    return [ShowRows([*alias, *_page(command, context)])]


def _first_page(registry: Registry) -> list[tuple[str, ...]]:
    visible = registry.visible()
    others = sum(not command.rank for command in visible)
    return [
        *_listed(command for command in visible if command.rank),
        ("", f"/help {EVERYTHING}", f"{others} more commands"),
        ("", "/help NAME", "a command or figure, with an example"),
    ]


def _listed(commands: Iterable[Command]) -> list[tuple[str, ...]]:
    """(group, command, summary). Only the first row of each group has its name."""
    rows: list[tuple[str, ...]] = []
    shown = ""
    for command in sorted(commands, key=lambda command: GROUPS.index(command.group)):
        rows.append(("" if command.group == shown else command.group, command.typed, command.summary))
        shown = command.group
    return rows


def _page(command: Command, context: CommandContext) -> Iterator[tuple[str, str]]:
    """Rows of (label, text)."""
    yield "syntax", "\n".join(command.syntax or (command.typed,))
    yield "about", command.about
    if current := command.current(context.settings):
        yield "now", current
    yield "example", "\n".join(command.example)
    if command.see_also:
        names = {known.name for known in context.registry}
        yield "see also", ", ".join(f"/{name}" if name in names else name for name in command.see_also)


def help_command(commands: Iterable[Command]) -> Command:
    """/help for these commands."""
    others = list(commands)
    return Command(
        "help",
        "[NAME]",
        "this list",
        _help,
        group="session",
        rank=1,
        about="The most important commands, all commands, or one page about a command or a figure on the screen.",
        example=("> /help acceptance", "acceptance   accepted drafts / drafts, ..."),
        syntax=("/help", f"/help {EVERYTHING}", "/help NAME    a command or a figure"),
        see_also=("explain", "show"),
        words={
            EVERYTHING: "all commands",
            **{command.name: command.summary for command in others},
        },
        at_once=True,
    )
