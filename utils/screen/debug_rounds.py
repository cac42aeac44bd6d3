"""The debug view of one round as coloured pieces of text: its drafts, its timing and why a draft was rejected.

Lines are broken and written by `utils.screen.renderer`.
"""

from collections.abc import Sequence
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
    "before the processor, q = 1 for drafts without probabilities"
)
NEAR_MISS, UNLIKELY, NOT_SAMPLED = "near miss", "unlikely", "most likely, but a different token was sampled"


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
    if timing is None:
        return ""
    parts = (
        f"{name} {1000 * seconds:.1f}"
        for name, seconds in (("draft", timing.drafting), ("verify", timing.verifying), ("other", timing.other))
    )
    return f"{' | '.join(parts)} ms | +{len(step.tokens)}"


def trace_lines(traces: Sequence[DraftTrace], tokenizer: Any) -> list[str]:
    """Lines on the drafts of a round: why one was rejected, and where n-grams and matches were found."""
    lines = [_rejection(trace, tokenizer) for trace in traces if not trace.is_accepted]
    matches = [trace for trace in traces if trace.match_length is not None]
    hits = [f"{token_piece(tokenizer, trace.token)} from {_source(trace)}" for trace in matches]
    return [*lines, f"hits: {'; '.join(hits)}"] if hits else lines


def _rejection(trace: DraftTrace, tokenizer: Any) -> str:
    figures = [f"p {trace.p:.2g}"]
    if trace.q is not None:
        figures += [f"q {trace.q:.2g}", f"p/q {trace.ratio:.2g}"]
    if trace.acceptance is not None and 0 < trace.acceptance < 1:
        figures.append(f"acceptance probability {trace.acceptance:.2g}")
    verdict = NEAR_MISS if trace.is_near_miss else UNLIKELY
    if trace.rank == 1:
        verdict = NOT_SAMPLED
    target = f"target {token_piece(tokenizer, trace.target_token)} (p {trace.target_p:.2g})"
    draft = token_piece(tokenizer, trace.token)
    return f"{draft}: {target}; the draft is choice {trace.rank}, {', '.join(figures)}: {verdict}"


def _source(trace: DraftTrace) -> str:
    return f"{trace.origin} ({trace.match_length})" if trace.match_length else trace.origin
