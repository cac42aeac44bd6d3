"""What a distillation says while it works: how far it is, how fast, how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable

SAY_SECONDS = 15.0

Report = Callable[[str], None]


class Teller:
    """Says now and then how far something is. made, wanted: tokens there at the beginning, and at the end."""

    def __init__(self, report: Report, what: str, made: int, wanted: int) -> None:
        self._report, self._what, self._made, self.wanted = report, what, made, wanted
        self._first, self._began = made, time.monotonic()
        self._said = self._began

    def tell(self, count: int, remark: str = "") -> None:
        """So many tokens more."""
        self._made += count
        now = time.monotonic()
        if now - self._said > SAY_SECONDS:
            self._said, speed = now, (self._made - self._first) / (now - self._began)
            left = clock((self.wanted - self._made) / speed)
            self._report(
                f"{self._what}: {self._made:,} of {self.wanted:,} tokens, {speed:,.0f} tokens/s{remark}, {left} left"
            )


def clock(seconds: float) -> str:
    """Hours and minutes, or minutes and seconds."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def said(rates: dict[str, list[float | None]]) -> str:
    """Acceptance by place."""
    shown = {
        name: " ".join("-" if rate is None else f"{rate:.3f}" for rate in places) for name, places in rates.items()
    }
    return f"greedy acceptance {shown['greedy']}, at T = 1 {shown['drawn']}"
