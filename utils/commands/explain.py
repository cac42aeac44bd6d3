"""/explain: every figure that the program shows, with its definition and its value in the last runs.

A test compares the documentation with the table.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from utils.commands.shared.outcomes import Outcome, ShowRows
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.arms import ComparedRun
from utils.errors import check_choice
from utils.metrics.results import TOKEN
from utils.text import count_of

SHOWN_POSITIONS = 6


def _ratio(part: float | None, whole: float | None, form: str, *, unit: str = "") -> str:
    """A fraction and its value, with a dash for the value where the denominator is 0. Empty if a part is unknown."""
    if part is None or whole is None:
        return ""
    fraction = f"{part:g}/{whole:g}" if isinstance(whole, int) else f"{part:g}/{whole:.2f}"
    return f"{fraction}{unit} = {part / whole:{form}}" if whole else f"{fraction}{unit} = -"


def _speedup(entry: ComparedRun) -> str:
    ours, speedup = entry.run.tokens_per_second, entry.comparison.speedup
    if not speedup or ours is None:
        return ""
    # A comparison holds only the ratio, so the baseline's rate is recovered from it.
    return f"{ours:.1f}/{ours / speedup:.1f} = {speedup:.2f}x"


def _text(entry: ComparedRun) -> str:
    _, run, comparison = entry
    if comparison.same is None:
        return ""
    total = run.new_tokens if comparison.unit == TOKEN and run.new_tokens is not None else len(run.text)
    unit, whose = comparison.unit, "the target's" if run.is_local else f"those of {run.baseline}"
    if comparison.first_difference is None:
        return f"{total} of {count_of(total, unit)} {'is' if total == 1 else 'are'} {whose}"
    return f"the first {comparison.first_difference} of {count_of(total, unit)} are {whose}"


def _declined(entry: ComparedRun) -> str:
    generation = entry.run.generation if entry.run.drafted is not None else None
    return "" if generation is None else _ratio(generation.declined_rounds, len(generation.steps), ".2f")


def _times(entry: ComparedRun) -> str:
    generation = entry.run.generation
    if generation is None or entry.run.drafted is None or not generation.timings:
        return ""
    parts = {"draft": "drafting", "verify": "verifying", "other": "other"}
    seconds = {name: sum(getattr(timing, part) for timing in generation.timings) for name, part in parts.items()}
    return " | ".join(f"{name} {1000 * total:.0f}" for name, total in seconds.items()) + " ms in total"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the screen: its name, its definition with unit, and its fraction in a run, or an empty text."""

    name: str
    meaning: str
    fraction: Callable[[ComparedRun], str] = lambda entry: ""


FIGURES = (
    Figure(
        "tokens",
        "number of new tokens, including an end token",
        lambda entry: "" if entry.run.new_tokens is None else str(entry.run.new_tokens),
    ),
    Figure(
        "seconds",
        "time of a run: prefill, filling the n-gram storage and decoding, without the time for drawing the screen",
        lambda entry: f"{entry.run.seconds:.3f} s, of which {entry.run.first_seconds or 0:.3f} s until the first token",
    ),
    Figure(
        "tokens/s",
        "tokens / seconds",
        lambda entry: _ratio(entry.run.new_tokens, entry.run.seconds, ".1f", unit=" s"),
    ),
    Figure(
        "speed-up",
        "tokens/s divided by those of target-only on the same prompt; 1.00x is equal speed; of several runs the "
        "geometric mean; noise: faster, although next to no draft was accepted",
        _speedup,
    ),
    Figure(
        "acceptance",
        "accepted drafts / drafts; drafts after a rejected one count, drafts after an accepted end token do not",
        lambda entry: _ratio(entry.run.accepted, entry.run.drafted, ".3f"),
    ),
    Figure(
        "drafts/round",
        "drafts / rounds, including rounds without drafts: the average gamma that was used",
        lambda entry: _ratio(entry.run.drafted, entry.run.rounds, ".1f"),
    ),
    Figure(
        "tokens/forward",
        "new tokens / forward passes of the target: the speed-up if drafting and verifying were free",
        lambda entry: _ratio(entry.run.new_tokens, entry.run.target_forwards, ".2f"),
    ),
    Figure(
        "text",
        "same if the tokens are those of target-only, otherwise the first token that differs, counted from 1",
        _text,
    ),
    Figure(
        "by position",
        "acceptance of the first, second, ... draft of a round, of those rounds that accepted all drafts before it",
        lambda entry: ", ".join(
            _ratio(accepted, tried, ".2f")
            for accepted, tried in (entry.run.accepted_by_position or ())[:SHOWN_POSITIONS]
        ),
    ),
    Figure(
        "rounds without drafts",
        "rounds in which nothing was drafted / rounds; such a round is a target forward over one token",
        _declined,
    ),
    Figure(
        "draft | verify | other",
        "milliseconds in the drafter, in the target's forward passes, and in everything else: processors, noise, rules",
        _times,
    ),
    Figure("p", "probability of a token under the target, before temperature, top-k and top-p"),
    Figure(
        "q",
        "probability of a draft under the drafter, before temperature, top-k and top-p; n-gram drafts have no "
        "distribution and count as q = 1",
    ),
    Figure(
        "p/q",
        "p divided by q; with sampling under /verify rejection, a draft is accepted with probability min(1, p/q) of "
        "the processed distributions; otherwise it is accepted if it equals the target's token",
    ),
    Figure(
        "rank",
        "rank of a draft in the target's distribution; 1 is the likeliest token; a near miss has at least a tenth of "
        "the p of the target's token",
    ),
    Figure("hits", "where an n-gram or a match was found, and in brackets how many tokens of context matched"),
    Figure(
        "draft cost (c)",
        "time of one draft / time of a target forward over one token, measured on the loaded models (/costs)",
    ),
    Figure(
        "verify cost (v)",
        "time of a verify pass over the drafts of a round and one more token / time of a target forward over one "
        "token (/costs)",
    ),
    Figure(
        "predicted",
        "speed-up computed from the rounds and the measured costs: target forwards for the text / (v + drafts x c), "
        "summed over the rounds (Leviathan et al. 2023)",
    ),
    Figure("time to first token", "/race: median time until the first tokens, that is, of prefill and first round"),
    Figure("decoding", "/race: tokens/s after the first round, so without the prefill; the median of the repeats"),
    Figure("range", "/race and /sweep: lowest and highest tokens/s of the repeats"),
    Figure(
        "95 % interval",
        "/race: of the mean speed-up, over repeats of one prompt or over the prompts of a file; it needs two values",
    ),
    Figure(
        "verdict",
        "/race: faster or slower if the 95 % interval excludes 1, the repeats of a prompt agree, and drafts were "
        "accepted; otherwise not distinguishable, or too few with fewer than five runs",
    ),
    Figure(
        "mean accepted tokens (mat)",
        "/race and /verdict of Spec-Bench files: new tokens / rounds, that is, accepted drafts and the target's own "
        "token; the same as tokens/forward",
    ),
    Figure(
        "acceptance length (al)",
        "/race and /verdict of SPEED-Bench files: the mean over prompts of new tokens / rounds",
    ),
    Figure("ratio", "B / A of /compare and /replay: tokens/s of B divided by those of A"),
)
FIGURE_NAMES = tuple(figure.name for figure in FIGURES)


def _explain(argument: str, context: CommandContext) -> Outcome:
    if not argument:
        return [ShowRows([(figure.name, figure.meaning) for figure in FIGURES])]
    word = argument.lower()
    # The figure with this name, or the first one whose name contains the word.
    matches = [name for name in FIGURE_NAMES if name == word or word in re.findall(r"[\w/]+", name)]
    name = word if word in matches else matches[0] if matches else check_choice(word, FIGURE_NAMES, "figure")
    figure = FIGURES[FIGURE_NAMES.index(name)]
    last = context.harness.state.last
    values = [(entry.run.name, figure.fraction(entry)) for entry in last.compared] if last else []
    return [ShowRows([(figure.name, figure.meaning), *((name, value) for name, value in values if value)])]


EXPLAIN = Command(
    "explain",
    "[FIGURE]",
    "what a figure means, and its fraction",
    _explain,
    group="results",
    rank=2,
    page=Page(
        "The definitions of all figures on the screen, or the definition of one and its value in the last runs.",
        ("> /explain acceptance", "acceptance    accepted drafts / drafts, ...", "speculative   22/35 = 0.629"),
        see_also=("texts", "why"),
    ),
    words={figure.name: figure.meaning for figure in FIGURES},
)
