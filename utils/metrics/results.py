"""Results of a run: its steps, its time, all rates, and the comparison with the target's own run.

`collect` drains any decoder. Its clock runs only inside `next()`, so the time of observers (printing, decoding text) is
not counted. A rate without a denominator is None.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from utils.decode.drafts import Draft, Drafter, DraftEvidence, Verified
from utils.decode.session import TargetSession
from utils.decode.steps import FinishReason, Step, by_position, matching_prefix

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """Seconds of one round.

    `drafting` includes the drafter's work after the verify pass. `drafts` counts all computed drafts, proposed or not.
    `kind` is the drafter kind, if several take turns.
    """

    drafting: float
    verifying: float
    total: float
    drafts: int = 0
    kind: str = ""

    @property
    def other(self) -> float:
        """The rest: processors, noise, verification rules."""
        return max(0.0, self.total - self.drafting - self.verifying)


class Stopwatch:
    """Accumulates the time since it was last read."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._start()

    def _start(self) -> None:
        self._seconds = {"drafting": 0.0, "verifying": 0.0}
        self._drafts, self._kind = 0, ""

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Count the time of the block as `drafting` or as `verifying`."""
        began = self._clock()
        try:
            yield
        finally:
            self._seconds[part] += self._clock() - began

    def count(self, draft: Draft) -> None:
        # Withheld drafts took as long to compute as proposed ones.
        self._drafts, self._kind = len(draft.tokens) + draft.withheld, draft.kind

    def read(self, total: float) -> RoundTiming:
        """The timing of a round that took `total` seconds. Starts the next round."""
        timing = RoundTiming(**self._seconds, total=total, drafts=self._drafts, kind=self._kind)
        self._start()
        return timing


class TimedDrafter:
    """A drafter under a stopwatch. A tracer receives its rounds."""

    def __init__(self, drafter: Drafter, watch: Stopwatch, tracer: "DraftTracer | None" = None) -> None:
        self._drafter, self._watch, self._tracer = drafter, watch, tracer
        self._draft: Draft | None = None

    def begin(self, prompt: list[int], context: list[int]) -> None:
        with self._watch.timing("drafting"):
            self._drafter.begin(prompt, context)

    def propose(self, context: list[int], count: int) -> Draft:
        with self._watch.timing("drafting"):
            draft = self._draft = self._drafter.propose(context, count)
        self._watch.count(draft)
        return draft

    def commit(self, context: list[int], verified: Verified) -> None:
        if self._tracer is not None:  # not billed to the drafter
            self._tracer.record(self._draft, verified)
        self._draft = None
        with self._watch.timing("drafting"):
            self._drafter.commit(context, verified)


class TimedSession:
    """The target's session under a stopwatch."""

    def __init__(self, session: TargetSession, watch: Stopwatch) -> None:
        self._session, self._watch = session, watch
        self.name = session.name
        # Untimed: only the forward pass counts as verifying.
        self.begin, self.room, self.rewind = session.begin, session.room, session.rewind
        self.take_features = session.take_features

    def feed(self, context: list[int], keep: int) -> Tensor:
        with self._watch.timing("verifying"):
            logits = self._session.feed(context, keep)
            if logits.is_cuda:
                logits[0, 0].item()  # CUDA is asynchronous: wait for the result, as the loop would do next
        return logits


@dataclass(frozen=True, slots=True)
class DraftTrace:
    """One verified draft.

    `rank` (from 1) is its rank under the target. `acceptance` is min(1, p/q) of the processed distributions, or None if
    drafts have no distribution or are verified together. `target_token` is the token in the text at its position.
    `match_length` counts the context tokens that found a match, 0 if the draft was drawn from the seed.
    """

    token: int
    p: float
    rank: int
    q: float | None
    acceptance: float | None
    target_token: int
    target_p: float
    match_length: int | None = None

    @property
    def is_accepted(self) -> bool:
        return self.token == self.target_token

    @property
    def ratio(self) -> float:
        """p/q. A draft without a q was the only proposal, so q = 1."""
        return self.p / self.q if self.q else self.p


class DraftTracer:
    """Traces the drafts of a run. `accepts_by_ratio` is True if drafts are accepted one by one by p/q."""

    def __init__(self, *, accepts_by_ratio: bool = True) -> None:
        self._accepts_by_ratio = accepts_by_ratio
        self._round: tuple[Draft, Verified] | None = None

    def record(self, draft: Draft | None, verified: Verified) -> None:
        """Keep a round until it is read. With first_target, the first one has no draft."""
        self._round = None if draft is None else (draft, verified)

    def read(self, step: Step) -> tuple[DraftTrace, ...]:
        """A trace of each draft that was verified: the accepted ones, and the first rejected one."""
        last, self._round = self._round, None
        if last is None:
            return ()
        verified = min(len(step.drafted), step.accepted + 1)
        return tuple(self._trace(*last, index, step) for index in range(verified))

    def _trace(self, draft: Draft, verified: Verified, index: int, step: Step) -> DraftTrace:
        row, own = verified.logits[index], index - verified.forced  # (V,); no drafter drafted forced tokens
        evidence = draft.evidence if own >= 0 and draft.evidence else DraftEvidence()
        token, target_token = step.drafted[index], step.tokens[index]
        logits, lengths = evidence.logits, evidence.match_lengths
        q = draft.probs if self._accepts_by_ratio and own >= 0 else None
        return DraftTrace(
            token=token,
            p=probability(row, token),
            rank=rank(row, token),
            q=probability(logits[own][0], token) if logits else None,
            # q > 0, since the token was drawn from it.
            acceptance=None if q is None else min(1.0, float(verified.probs[index, token] / q[own, token])),
            target_token=target_token,
            target_p=probability(row, target_token),
            match_length=lengths[own] if lengths else None,
        )


def probability(logits: Tensor, token: int) -> float:
    """The probability of a token under raw logits (V,)."""
    # A drafter's vocabulary may end before this id.
    return float(logits.cpu().double().softmax(-1)[token]) if token < len(logits) else 0.0


def rank(logits: Tensor, token: int) -> int:
    """The rank of a token by raw logits (V,), from 1. Ties are broken by the lowest id."""
    above = (logits > logits[token]).sum() + (logits[:token] == logits[token]).sum()
    return 1 + int(above)


def tokens_of(steps: Iterable[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def acceptance_of(steps: Iterable[Step]) -> float | None:
    """The acceptance rate: accepted drafts per draft, or None if nothing was drafted."""
    counts = [step.draft_counts for step in steps]
    drafted = sum(drafted for drafted, _ in counts)
    return sum(accepted for _, accepted in counts) / drafted if drafted else None


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished or interrupted run.

    `seconds` is the time inside the decoder, with prefill and storage fill; `first_seconds` is the time until the first
    step. `timings` has one entry per step.
    """

    steps: tuple[Step, ...]
    seconds: float
    first_seconds: float | None
    finish: FinishReason
    timings: tuple[RoundTiming, ...] = ()

    @property
    def tokens(self) -> list[int]:
        return tokens_of(self.steps)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Throughput after the first round, which contains the prefill."""
        later = len(self.tokens) - (len(self.steps[0].tokens) if self.steps else 0)
        seconds = self.seconds - (self.first_seconds or 0.0)
        return later / seconds if seconds > 0 and later > 0 else None

    @property
    def drafted(self) -> int:
        return sum(step.draft_counts[0] for step in self.steps)

    @property
    def accepted(self) -> int:
        return sum(step.draft_counts[1] for step in self.steps)

    @property
    def forced(self) -> int:
        """The accepted drafts that a grammar forces. They do not count as drafts."""
        return sum(step.accepted_forced for step in self.steps)

    @property
    def acceptance_rate(self) -> float | None:
        return acceptance_of(self.steps)

    @property
    def target_forwards(self) -> int:
        return sum(step.forwards for step in self.steps)

    @property
    def declined_rounds(self) -> int:
        return sum(not step.drafted for step in self.steps)

    @property
    def accepted_by_position(self) -> list[tuple[int, int]]:
        """(accepted, verified) for each draft position."""
        return by_position([step.draft_counts for step in self.steps])


TOKEN, CHARACTER = "token", "character"  # what a position in a text counts


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run compared with its baseline's.

    `decode_speedup` excludes the first round. `first_difference` is a 0-based index, and `unit` is what it counts.
    A figure that cannot be computed is None.
    """

    speedup: float | None = None
    same: bool | None = None
    first_difference: int | None = None
    decode_speedup: float | None = None
    unit: str = TOKEN

    @property
    def text(self) -> str:
        """Whether the text equals the baseline's, in the words of every table."""
        return "-" if self.same is None else difference_text(self.first_difference, self.unit)


def difference_text(first_difference: int | None, unit: str = TOKEN) -> str:
    """The cell of a table for the first difference of two texts."""
    return "same" if first_difference is None else f"differs at {unit} {first_difference + 1}"


def collect(
    steps: Iterator[Step],
    watch: Callable[[Step, RoundTiming, Sequence[DraftTrace]], None] = lambda step, timing, traces: None,
    clock: Clock = time.perf_counter,
    *,
    stopwatch: Stopwatch | None = None,
    tracer: DraftTracer | None = None,
) -> Generation:
    """Drain a decoder. Ctrl-C ends the run: earlier steps are returned with FinishReason.INTERRUPTED.

    `watch` receives each step, its timing and its traces. `stopwatch` and `tracer` are those of the decoder's drafter
    and target.
    """
    made: list[Step] = []
    timings: list[RoundTiming] = []
    stopwatch = stopwatch or Stopwatch(clock)
    seconds: float = 0.0
    first: float | None = None
    began: float | None = None  # None outside `next()`, where no time is counted
    finish = FinishReason.LENGTH
    try:
        while True:
            began = clock()
            step = next(steps, None)
            spent, began = clock() - began, None
            seconds += spent
            if step is None:
                break
            first = seconds if first is None else first
            made.append(step)
            timings.append(stopwatch.read(spent))
            finish = step.finish or finish
            watch(step, timings[-1], tracer.read(step) if tracer else ())
    except KeyboardInterrupt:
        finish = FinishReason.INTERRUPTED
        seconds += 0.0 if began is None else clock() - began
    return Generation(tuple(made), seconds, first, finish, tuple(timings))


def pooled(runs: Iterable[Generation]) -> Generation:
    """Several runs as one, for rates over all of them. The result has no timings."""
    runs = list(runs)
    steps = tuple(step for run in runs for step in run.steps)
    return Generation(steps, sum(run.seconds for run in runs), None, FinishReason.LENGTH)


def first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int | None:
    """The index of the first difference, or None if both are equal. If one is a prefix of the other, its length."""
    same = matching_prefix(ours, theirs)
    return None if same == len(ours) == len(theirs) else same


COPIED_TOKENS = 4  # a token is copied if it ends this many tokens that the text before it contains, too
TEMPLATE_END = 16  # tokens at the end of a prompt in which a chat template may begin the thinking
THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
# A fence begins a line, or an item of a list.
CODE = re.compile(r"^[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?```.*?(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def spans_of(prompt: Sequence[int], steps: Sequence[Step], tokenizer: Any) -> dict[str, list[int]]:
    """[accepted, drafted] by kind of text, for kinds with drafts: copied or new, thinking or answer, code or prose.

    A draft belongs to the kinds of the token that the answer has at its position, whether it is accepted or not. A pair
    of kinds is left out if the first one does not occur.
    """
    tokens = tokens_of(steps)
    pieces = tokenizer.batch_decode([[token] for token in tokens], clean_up_tokenization_spaces=False)
    opened = str(tokenizer.decode(list(prompt[-TEMPLATE_END:]))).rstrip().endswith("<think>")
    starts = [*accumulate((len(step.tokens) for step in steps), initial=0)]
    counts: dict[str, list[int]] = {}
    for names, flags in (
        (("copied", "new"), _copied(prompt, tokens)),
        (("thinking", "answer"), _inside(THINKING, pieces, "<think>" * opened)),
        (("code", "prose"), _inside(CODE, pieces)),
    ):
        for start, step in zip(starts, steps, strict=False) if any(flags) else ():
            for index in set(range(len(step.drafted))) - set(step.forced):
                # Drafts may reach beyond the end of the answer.
                count = counts.setdefault(names[not flags[min(start + index, len(flags) - 1)]], [0, 0])
                count[0] += index < step.accepted
                count[1] += 1
    return counts


def _copied(prompt: Sequence[int], tokens: Sequence[int]) -> list[bool]:
    text, seen, found = [*prompt, *tokens], set[tuple[int, ...]](), []
    for end in range(1, len(text) + 1):
        gram = tuple(text[max(0, end - COPIED_TOKENS) : end])
        found.append(gram in seen)
        seen |= {gram} if len(gram) == COPIED_TOKENS else set()
    return found[len(prompt) :]


def _inside(pattern: re.Pattern[str], pieces: Sequence[str], opening: str = "") -> list[bool]:
    """Whether the middle of each token is in a part of the text that matches, with its marks."""
    spans = [match.span() for match in pattern.finditer(opening + "".join(pieces))]
    starts = accumulate(map(len, pieces), initial=len(opening))
    middles = (start + len(piece) / 2 for start, piece in zip(starts, pieces, strict=False))
    return [any(low <= middle < high for low, high in spans) for middle in middles]
