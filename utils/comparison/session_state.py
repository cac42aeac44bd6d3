"""What a session remembers from one line to the next."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ngram_assisted import NGramStorage
from utils.comparison.last_prompt import LastPrompt
from utils.comparison.reports import Finding, Report
from utils.comparison.run_texts import TextPiece
from utils.metrics.divergence import Divergence
from utils.pairs.drafter_inputs import DrafterCaches
from utils.prompts.conversation import Conversations
from utils.servers.connection import ServerList

MAX_RESULTS = 200  # kept for the report of /export


@dataclass(frozen=True, slots=True)
class ShownResult:
    """What the screen showed: its JSON records, and for a report also the finished report with its findings.

    `causes` explains differences between texts, and `texts` has the generated ones, both by strategy name. It must not
    hold models.
    """

    records: list[dict[str, Any]]
    report: Report | None = None
    findings: Sequence[Finding] = ()
    causes: Mapping[str, Divergence] = field(default_factory=dict)
    texts: Mapping[str, Sequence[TextPiece]] = field(default_factory=dict)


@dataclass(slots=True)
class ShownResults:
    """The last results of a session, the newest one last. `count` includes results that were dropped."""

    kept: deque[ShownResult] = field(default_factory=lambda: deque(maxlen=MAX_RESULTS))
    count: int = 0

    def add(self, result: ShownResult) -> None:
        """Add a result. Beyond MAX_RESULTS the oldest one is dropped."""
        self.kept.append(result)
        self.count += 1


@dataclass(slots=True)
class SessionState:
    """The memory of one session.

    `prompts` are those that were run, in order. `last` has the runs of the last prompt. `advice` holds the settings
    that the last verdict recommends. `servers` receive every prompt. `rounding` is the largest observed change of the
    target's logits by verify width. `first_drafts` counts, by strategy, the first drafts of rounds and how many were
    accepted. `said_low_acceptance` is True once the hint about low acceptance was shown.
    """

    storage: NGramStorage
    prompts: list[str] = field(default_factory=list)
    advice: Mapping[str, Any] | None = None
    last: LastPrompt | None = None
    results: ShownResults = field(default_factory=ShownResults)
    rounding: float = 0.0
    first_drafts: dict[str, tuple[int, int]] = field(default_factory=dict)
    said_low_acceptance: bool = False
    caches: DrafterCaches = field(default_factory=DrafterCaches)
    conversations: Conversations = field(default_factory=Conversations)
    servers: ServerList = field(default_factory=ServerList)

    @property
    def shown(self) -> ShownResult | None:
        """The last result."""
        return self.results.kept[-1] if self.results.kept else None
