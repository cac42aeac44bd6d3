"""The debug view of one round as coloured pieces of text: its drafts, its timing and why a draft was rejected.

`utils.screen.renderer` breaks and writes the lines.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from utils.decode.steps import Step
from utils.metrics.draft_trace import DraftTrace
from utils.metrics.stopwatch import RoundTiming
from utils.text import token_piece

Piece = tuple[str, str]  # a text and its colour
SIGNS = ("+ accepted", "- rejected", "= corrected", "* bonus")
RATIO_LEVELS = (  # lowest p/q, shape, its ASCII form, colour
    (0.995, "●", "@", "green"),
    (0.5, "◕", "o", "cyan"),
    (0.1, "◑", ":", "yellow"),
    (0.0, "○", ".", "red"),
)
LEGEND = (
    "{0} p/q at least 1, {1} at least 0.5, {2} at least 0.1, {3} less; "
    "probabilities before temperature and top-k/p; drafts without a distribution count as q = 1"
)


def legend(*, ascii_only: bool) -> str:
    """The meaning of signs and shapes."""
    return f"{', '.join(SIGNS)} · " + LEGEND.format(*(level[2 if ascii_only else 1] for level in RATIO_LEVELS))


def round_pieces(
    step: Step, tokenizer: Any, traces: Sequence[DraftTrace] = (), *, ascii_only: bool = False
) -> list[Piece]:
    """The tokens of a round: accepted drafts in green, rejected ones in red, the corrected or bonus token in blue.

    Signs carry the same information without colour. Drafts with a trace get the colour and the shape of their p/q.
    """
    pieces = [("+", "green", token) for token in step.drafted[: step.accepted]]
    pieces += [("-", "red", token) for token in step.drafted[step.accepted :]]
    painted = [(sign + token_piece(tokenizer, token), colour) for sign, colour, token in pieces]
    for position, trace in enumerate(traces):
        _, shape, sign, colour = next(level for level in RATIO_LEVELS if trace.ratio >= level[0])
        painted[position] = (painted[position][0] + (sign if ascii_only else shape), colour)
    if step.token is not None:
        painted.append((("*" if step.is_bonus else "=") + token_piece(tokenizer, step.token), "blue"))
    return painted


def round_timing(step: Step, timing: RoundTiming | None) -> str:
    """The milliseconds of a round by activity, and its number of new tokens."""
    return "" if timing is None else _times([timing], len(step.tokens))


def folded_rounds(timings: Sequence[RoundTiming | None]) -> list[Piece]:
    """Consecutive rounds of one token without drafts, with their total time."""
    known = [timing for timing in timings if timing is not None]
    pieces = [(f"{len(timings)} rounds without a draft:", "blue")]
    return [*pieces, (_times(known, len(timings)), "dark_grey")] if known else pieces


def _times(timings: Sequence[RoundTiming], tokens: int) -> str:
    parts = (
        f"{name} {1000 * sum(map(seconds, timings)):.1f}"
        for name, seconds in (
            ("draft", attrgetter("drafting")),
            ("verify", attrgetter("verifying")),
            ("other", attrgetter("other")),
        )
    )
    return f"{' | '.join(parts)} ms | +{tokens}"


def trace_lines(traces: Sequence[DraftTrace], tokenizer: Any) -> list[str]:
    """Lines on the drafts of a round: why one was rejected, and the sources of n-grams and matches."""
    lines = [_rejection(trace, tokenizer) for trace in traces if not trace.is_accepted]
    matches = [trace for trace in traces if trace.match_length is not None]
    hits = [f"{token_piece(tokenizer, trace.token)} from {_source(trace)}" for trace in matches]
    return [*lines, f"hits: {'; '.join(hits)}"] if hits else lines


def _rejection(trace: DraftTrace, tokenizer: Any) -> str:
    draft, target = token_piece(tokenizer, trace.token), token_piece(tokenizer, trace.target_token)
    # A sampled token may be less likely than the draft.
    verb = "preferred" if trace.target_p > trace.p else "drew"
    figures = [f"p {trace.p:.2g}"]
    if trace.q is not None:
        figures += [f"drafter q {trace.q:.2g}", f"p/q {trace.ratio:.2g}"]
    if trace.acceptance is not None and 0 < trace.acceptance < 1:
        figures.append(f"acceptance probability {trace.acceptance:.2g}")
    near = ", a near miss" if trace.is_near_miss and trace.rank > 1 else ""
    return (
        f"{draft} rejected: the target {verb} {target} (p {trace.target_p:.2g}); "
        f"{draft} was rank {trace.rank} ({', '.join(figures)}){near}"
    )


def _source(trace: DraftTrace) -> str:
    return f"{trace.origin} ({trace.match_length})" if trace.match_length else trace.origin
