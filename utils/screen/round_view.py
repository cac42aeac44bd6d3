"""Shows the rounds of a run as they come. Consecutive rounds without drafts become one line."""

from collections.abc import Sequence
from typing import Any

from utils.decode.steps import Step
from utils.metrics.draft_trace import DraftTrace
from utils.metrics.stopwatch import RoundTiming
from utils.screen.renderer import Renderer

Round = tuple[Step, RoundTiming | None, Sequence[DraftTrace]]


class RoundView:
    """Shows each round with drafts at once. Rounds without drafts wait until their number is known."""

    def __init__(self, renderer: Renderer, tokenizer: Any) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self._number = 0  # the last round on the screen
        self._waiting: list[Round] = []

    @property
    def waiting(self) -> int:
        """The number of rounds that are not on the screen."""
        return len(self._waiting)

    def show(self, step: Step, timing: RoundTiming | None, traces: Sequence[DraftTrace] = ()) -> None:
        if step.drafted:
            self.end()
            self._round((step, timing, traces))
        else:
            self._waiting.append((step, timing, traces))

    def end(self) -> None:
        """Show the waiting rounds."""
        waiting, self._waiting = self._waiting, []
        if len(waiting) > 1:
            self._renderer.plain_rounds(self._number + 1, [timing for _, timing, _ in waiting])
            self._number += len(waiting)
        elif waiting:
            self._round(waiting[0])

    def _round(self, shown: Round) -> None:
        step, timing, traces = shown
        self._number += 1
        self._renderer.round(self._number, step, self._tokenizer, timing=timing, traces=traces)
