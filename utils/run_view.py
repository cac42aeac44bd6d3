"""What the screen shows of one run as its steps pass."""

from collections.abc import Sequence
from typing import Any

from utils.events import Step
from utils.laps import Lap
from utils.notes import DraftNote
from utils.printing import Renderer
from utils.text import TextStream


class RunView:
    """Its text as it grows; or every round, and then its text."""

    def __init__(self, renderer: Renderer, tokenizer: Any, colour: str, *, rounds: bool) -> None:
        self._renderer, self._tokenizer, self._colour, self._traces = renderer, tokenizer, colour, rounds
        self._text = TextStream(tokenizer)
        self._count = 0
        self._held = ""

    def show(self, step: Step, lap: Lap, notes: Sequence[DraftNote] = ()) -> None:
        """Show one more step."""
        self._count += 1
        text = self._text.add(step.tokens)
        if self._traces:
            self._renderer.round(self._count, step, self._tokenizer, lap, notes)
            self._held += text
        else:
            self._renderer.stream(text, self._colour)

    def end(self) -> None:
        """The run is over: show what was held back."""
        self._renderer.stream(self._held + self._text.end(), self._colour)
        self._renderer.newline()
