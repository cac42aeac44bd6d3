"""What the debug view says of a round, as text and colours: its drafts, where its time went, and in full why drafts fell."""

from collections.abc import Sequence
from typing import Any

from utils.decode.steps import Step
from utils.metrics.draft_trace import DraftNote
from utils.metrics.stopwatch import Lap
from utils.text import token_piece

Piece = tuple[str, str]  # text, and its colour
SIGNS = ("+ accepted", "- rejected", "= corrected", "* bonus")
LEVELS = (
    (0.995, "●", "@", "green"),
    (0.5, "◕", "o", "cyan"),
    (0.1, "◑", ":", "yellow"),
    (0.0, "○", ".", "red"),
)  # from which p/q on
LEGEND = "{0} p/q 1 or more, {1} half or more, {2} a tenth or more, {3} less; before the processor, q = 1 for drafts without a law"


def legend(*, ascii_only: bool) -> str:
    """What signs and shapes mean."""
    return f"{', '.join(SIGNS)} · " + LEGEND.format(*(level[2 if ascii_only else 1] for level in LEVELS))


def pieces_of(step: Step, tokenizer: Any, notes: Sequence[DraftNote] = (), *, ascii_only: bool = False) -> list[Piece]:
    """The round's tokens: accepted drafts green, rejected red, the corrected or bonus token blue; signs say the same without colour.

    With notes, drafts that were judged have the colour and the shape of their p/q.
    """
    pieces = [("+", "green", token) for token in step.drafted[: step.accepted]]
    pieces += [("-", "red", token) for token in step.drafted[step.accepted :]]
    painted = [(sign + token_piece(tokenizer, token), colour) for sign, colour, token in pieces]
    for place, note in enumerate(notes):
        _, shape, sign, colour = next(level for level in LEVELS if note.ratio >= level[0])
        painted[place] = (painted[place][0] + (sign if ascii_only else shape), colour)
    if step.token is not None:
        painted.append((("*" if step.is_bonus else "=") + token_piece(tokenizer, step.token), "blue"))
    return painted


def spent(step: Step, lap: Lap | None) -> str:
    """Where a round's time went, and how many tokens it brought."""
    if lap is None:
        return ""
    parts = (
        f"{name} {1000 * seconds:.1f}"
        for name, seconds in (("draft", lap.drafting), ("verify", lap.verifying), ("other", lap.other))
    )
    return f"{' | '.join(parts)} ms | +{len(step.tokens)}"


def explained(notes: Sequence[DraftNote], tokenizer: Any) -> list[str]:
    """Lines about a round's drafts: why one fell, and where hits came from."""
    lines = [_fallen(note, tokenizer) for note in notes if not note.stood]
    hits = [f"{token_piece(tokenizer, note.token)} from {_source(note)}" for note in notes if note.match is not None]
    return [*lines, *([f"hits: {'; '.join(hits)}"] if hits else [])]


def _fallen(note: DraftNote, tokenizer: Any) -> str:
    figures = [f"p {note.p:.2g}"]
    if note.q is not None:
        figures += [f"q {note.q:.2g}", f"p/q {note.ratio:.2g}"]
    if note.chance is not None and 0 < note.chance < 1:
        figures.append(f"it had a chance of {note.chance:.2g}")
    verdict = "a near miss" if note.is_near else "lost"
    if note.rank == 1:
        verdict = "the likeliest, but the draw fell on another"
    wanted = f"the target said {token_piece(tokenizer, note.wanted)} (p {note.wanted_p:.2g})"
    return f"{token_piece(tokenizer, note.token)}: {wanted}; the draft is its choice {note.rank}, {', '.join(figures)}: {verdict}"


def _source(note: DraftNote) -> str:
    return f"{note.origin} ({note.match})" if note.match else note.origin
