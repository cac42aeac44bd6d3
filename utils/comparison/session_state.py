"""What a session remembers from one line to the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ngram_assisted import NGramStorage
from utils.comparison.last_prompt import LastPrompt
from utils.comparison.reports import Finding, Report
from utils.metrics.divergence import Divergence
from utils.pairs.drafter_inputs import DrafterCaches
from utils.prompts.conversation import Conversations


@dataclass(frozen=True, slots=True)
class ShownResult:
    """What the screen showed last: its JSON records, and a finished report with its findings unless it was a prompt.

    causes: why texts differ, by the strategy's name.
    """

    records: list[dict[str, Any]]
    report: Report | None = None
    findings: Sequence[Finding] = ()
    causes: Mapping[str, Divergence] = field(default_factory=dict)


@dataclass(slots=True)
class SessionState:
    """The memory of one session.

    storage: the session's n-gram storage. rounding: the largest change of the target's logits by verify width seen
    so far.
    """

    storage: NGramStorage
    last: LastPrompt | None = None
    shown: ShownResult | None = None
    rounding: float = 0.0
    caches: DrafterCaches = field(default_factory=DrafterCaches)
    conversations: Conversations = field(default_factory=Conversations)
