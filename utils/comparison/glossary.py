"""Every figure that the program shows, in one table: its name, what it is, and the fraction that it came to in a run.

/explain and the README's page are this table; a test holds the page to it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from utils.comparison.strategies import Strategy
from utils.metrics.results import Comparison, Generation

Fraction = Callable[[Strategy, Generation, Comparison], str]


def _nothing(strategy: Strategy, run: Generation, comparison: Comparison) -> str:
    return ""


def _over(part: float, whole: float, form: str, *, unit: str = "") -> str:
    """A fraction as it is written out; a dash where there is nothing to divide by."""
    written = f"{part:g}/{whole:g}" if isinstance(whole, int) else f"{part:g}/{whole:.2f}"
    return f"{written}{unit} = {part / whole:{form}}" if whole else f"{written}{unit} = -"


def _speed(strategy: Strategy, run: Generation, comparison: Comparison) -> str:
    return _over(len(run.tokens), run.seconds, ".1f", unit=" s")


def _speedup(strategy: Strategy, run: Generation, comparison: Comparison) -> str:
    if comparison.speedup is None or run.tokens_per_second is None:
        return ""
    return f"{run.tokens_per_second:.1f}/{run.tokens_per_second / comparison.speedup:.1f} = {comparison.speedup:.2f}x"


def _acceptance(strategy: Strategy, run: Generation, comparison: Comparison) -> str:
    return _over(run.accepted, run.drafted, ".3f") if strategy.drafts else ""


def _drafts(strategy: Strategy, run: Generation, comparison: Comparison) -> str:
    return _over(run.drafted, len(run.steps), ".1f") if strategy.drafts else ""


def _per_forward(strategy: Strategy, run: Generation, comparison: Comparison) -> str:
    return _over(len(run.tokens), run.target_forwards, ".2f") if strategy.uses_target else ""


def _places(strategy: Strategy, run: Generation, comparison: Comparison) -> str:
    return ", ".join(_over(accepted, tried, ".2f") for accepted, tried in run.accepted_by_position[:6])


def _declined(strategy: Strategy, run: Generation, comparison: Comparison) -> str:
    return _over(run.declined_rounds, len(run.steps), ".2f") if strategy.drafts else ""


def _times(strategy: Strategy, run: Generation, comparison: Comparison) -> str:
    if not strategy.drafts or not run.laps:
        return ""
    parts = [sum(getattr(lap, name) for lap in run.laps) for name in ("drafting", "verifying", "other")]
    return (
        " | ".join(f"{name} {1000 * part:.0f}" for name, part in zip(("draft", "verify", "other"), parts, strict=True))
        + " ms in all"
    )


def _text(strategy: Strategy, run: Generation, comparison: Comparison) -> str:
    if comparison.same is None:
        return ""
    total = len(run.tokens)
    place = comparison.first_difference
    return (
        f"{total} of {total} tokens are the target's"
        if place is None
        else f"the first {place} of {total} tokens are the target's"
    )


@dataclass(frozen=True, slots=True)
class Figure:
    """name: as on the screen. meaning: what it is, with its unit. fraction: what it came to in a run, "" where it does not apply."""

    name: str
    meaning: str
    fraction: Fraction = _nothing


FIGURES = (
    Figure("tokens", "new tokens, an end token among them", lambda strategy, run, comparison: str(len(run.tokens))),
    Figure(
        "seconds",
        "time inside the strategy, prefill and the filling of the storage included; what the screen takes is not billed",
        lambda strategy, run, comparison: (
            f"{run.seconds:.3f} s, {run.first_seconds or 0:.3f} s of them before the first token"
        ),
    ),
    Figure("tokens/s", "tokens / seconds", _speed),
    Figure("speed-up", "tokens/s over those of target-only on the same prompt; 1.00x is equal speed", _speedup),
    Figure(
        "acceptance",
        "accepted drafts / drafts, those behind a rejected one among them; those behind an accepted end token are not counted",
        _acceptance,
    ),
    Figure("drafts/round", "drafts / rounds, rounds without drafts among them: what /gamma auto has chosen", _drafts),
    Figure(
        "tokens/forward",
        "new tokens / forward passes of the target: the speed-up if drafts and windows cost nothing",
        _per_forward,
    ),
    Figure(
        "text", "whether the tokens are target-only's own, or the first one, counted from 1, that is another", _text
    ),
    Figure(
        "by place",
        "accepted / tried at the first place of a round, the second, and so on; tried: all before it were accepted",
        _places,
    ),
    Figure("declined", "rounds in which nothing was drafted / rounds: plain steps of the target", _declined),
    Figure(
        "draft | verify | other",
        "milliseconds of a round in the drafter, in the target's forward, and in all else: processors, noise, judging",
        _times,
    ),
    Figure("p", "probability of a token in the target, before the processor"),
    Figure(
        "q",
        "probability of a draft in the drafter, before the processor; drafts without a law of their own (n-grams) count as 1",
    ),
    Figure(
        "p/q",
        "p over q; where /verify rejection samples, processed min(1, p/q) is a draft's chance; else it stands if the target says it",
    ),
    Figure(
        "choice",
        "a draft's rank in the target: 1 is its likeliest token; a near miss has a tenth of the p of what the target said, or more",
    ),
    Figure("hits", "where an n-gram or a match came from, and in brackets how many tokens of context it went by"),
    Figure(
        "a draft (c)", "time of a draft / time of a plain step of the target, measured on the loaded models (/costs)"
    ),
    Figure(
        "its window (v)",
        "time of a target forward over all drafts of a round and one more token / time of a plain step (/costs)",
    ),
    Figure(
        "predicted",
        "plain steps that the text takes / those that its rounds take, v + drafts x c each (Leviathan et al. 2023, with measured costs)",
    ),
    Figure("before decoding", "/race: median time until the first tokens, prefill and first round"),
    Figure("decoding", "/race: tokens behind the first round / their seconds, median"),
    Figure(
        "verdict",
        "/race: faster or slower where all of five repeats or more agree (by chance five do once in 16), else within noise",
    ),
)
