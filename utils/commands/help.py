"""/help and /explain: the most important commands, all commands, or a page about one command or figure."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress

from utils.commands.shared.registry import ALIASES, GROUPS, Command, CommandContext, Outcome, ShowRows
from utils.errors import UserError, check_choice

# The definitions of figures, with their units.
FIGURES = {
    "tokens": "number of new tokens, including an end token",
    "seconds": "time of a run: prefill, filling the n-gram storage and decoding, without drawing the screen",
    "tokens/s": "tokens / seconds",
    "speed-up": "tokens/s divided by those of target-only on the same prompt; 1.00x is equal speed; of several runs "
    "the geometric mean; noise: faster, although next to no draft was accepted",
    "acceptance": "accepted drafts / drafts; drafts after a rejected one count, drafts after an accepted end token do "
    "not",
    "drafts/round": "drafts / rounds, including rounds without drafts: the average gamma that was used",
    "tokens/forward": "new tokens / forward passes of the target: the speed-up if drafting and verifying were free",
    "text": "same if the tokens are those of target-only, otherwise the first token that differs, counted from 1",
    "by position": "acceptance of the first, second, ... draft of a round, of those rounds that accepted all drafts "
    "before it",
    "accepted by kind of text": "/why: accepted drafts / drafts in text that is copied or new, in thinking (between "
    "<think> marks) or the answer, in code (between ``` lines) or prose; a token is copied if it ends four tokens that "
    "the text before contains, too",
    "rounds without drafts": "rounds in which nothing was drafted / rounds; such a round is a target forward over one "
    "token",
    "draft | verify | other": "milliseconds in the drafter, in the target's forward passes, and in everything else: "
    "processors, noise, rules",
    "p": "probability of a token under the target, before temperature, top-k and top-p",
    "q": "probability of a draft under the drafter, before temperature, top-k and top-p; n-gram drafts have no "
    "distribution and count as q = 1",
    "p/q": "p divided by q; with sampling under /verify rejection, a draft is accepted with probability min(1, p/q) of "
    "the processed distributions; otherwise it is accepted if it equals the target's token",
    "rank": "rank of a draft in the target's distribution; 1 is the likeliest token",
    "hits": "where an n-gram or a match was found, and in brackets how many tokens of context matched",
    "draft cost (c)": "time of one draft / time of a target forward over one token, measured on the loaded models "
    "(/costs)",
    "verify cost (v)": "time of a verify pass over the drafts of a round and one more token / time of a target forward "
    "over one token (/costs)",
    "predicted": "speed-up computed from the rounds and the measured costs: target forwards for the text / "
    "(v + drafts x c), summed over the rounds (Leviathan et al. 2023)",
    "time to first token": "/race: median time until the first tokens, that is, of prefill and first round",
    "decoding": "/race: tokens/s after the first round, so without the prefill; the median of the repeats",
    "range": "/race and /sweep: lowest and highest tokens/s of the repeats",
    "95 % interval": "/race: of the mean speed-up, over repeats of one prompt or over the prompts of a file; it needs "
    "two values",
    "verdict": "/race: faster or slower if the 95 % interval excludes 1, the repeats of a prompt agree, and drafts "
    "were accepted; otherwise not distinguishable, or too few with fewer than five runs",
    "ratio": "B / A of /compare and /replay: tokens/s of B divided by those of A",
}


def _explain(argument: str, context: CommandContext) -> Outcome:
    if not argument:
        return [ShowRows(list(FIGURES.items()))]
    word, names = argument.lower(), tuple(FIGURES)
    # The figure with this name, or the first one whose name contains the word.
    matches = [name for name in names if name == word or word in re.findall(r"[\w/]+", name)]
    name = word if word in matches else matches[0] if matches else check_choice(word, names, "figure")
    return [ShowRows([(name, FIGURES[name])])]


EXPLAIN = Command(
    "explain",
    "[FIGURE]",
    "what a figure means",
    _explain,
    group="results",
    rank=2,
    example=("> /explain acceptance", "acceptance    accepted drafts / drafts; ..."),
    words=FIGURES,
)


EVERYTHING = "all"


def _help(argument: str, context: CommandContext) -> Outcome:
    name = argument.removeprefix("/").lower()
    visible = context.registry.visible()
    if not name:
        others = sum(not command.rank for command in visible)
        more = (
            ("", f"/help {EVERYTHING}", f"{others} more commands"),
            ("", "/help NAME", "a command or figure, with an example"),
        )
        return [ShowRows([*_listed(command for command in visible if command.rank), *more])]
    if name == EVERYTHING:
        return [ShowRows(_listed(visible))]
    try:
        command = context.registry.find(name)
    except UserError as error:
        with suppress(UserError):
            return _explain(name, context)
        if " " not in name:
            raise UserError(f"it is not a figure. {error}") from error
        command = context.registry.find(name.split()[0])  # such as "gamma auto"
    alias = [("alias", f"/{name} stands for /{ALIASES[name]}")] if name in ALIASES else []
    return [ShowRows([*alias, *_page(command, context)])]


def _listed(commands: Iterable[Command]) -> list[tuple[str, ...]]:
    """(group, command, summary). Only the first row of each group has its name."""
    rows: list[tuple[str, ...]] = []
    shown = ""
    for command in sorted(commands, key=lambda command: GROUPS.index(command.group)):
        rows.append(("" if command.group == shown else command.group, command.typed, command.summary))
        shown = command.group
    return rows


def _page(command: Command, context: CommandContext) -> Iterator[tuple[str, str]]:
    yield "syntax", "\n".join(command.syntax or (command.typed,))
    end = "" if command.summary.endswith("?") else "."
    yield "about", f"{command.summary[0].upper()}{command.summary[1:]}{end} {command.about}".rstrip()
    if current := command.current(context.settings):
        yield "now", current
    yield "example", "\n".join(command.example)


def help_command(commands: Iterable[Command]) -> Command:
    return Command(
        "help",
        "[NAME]",
        "the most important commands, or a page",
        _help,
        group="session",
        rank=1,
        example=("> /help acceptance", "acceptance   accepted drafts / drafts, ..."),
        syntax=("/help", f"/help {EVERYTHING}", "/help NAME    a command or a figure"),
        words={EVERYTHING: "all commands", **{command.name: command.summary for command in commands}},
        at_once=True,
    )
