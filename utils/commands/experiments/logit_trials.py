"""Logits of the same positions computed in several ways: the modes of /audit that compare logits instead of texts.

A trial cuts the text at a random position and computes the logits of the last positions before the cut by verify
width, with and without a cached prefix, or alone and in a batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random

from torch import Tensor

from utils.comparison.countdown import Countdown
from utils.comparison.harness import Harness
from utils.comparison.job import Job
from utils.comparison.reports import Finding, Note, Progress, ReportEvent
from utils.decode.logit_drift import LogitDrift, logits_by_width
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.metrics.results import tokens_of
from utils.text import count_of

LARGEST_BATCH = 8


@dataclass(frozen=True, slots=True)
class TrialText:
    """The text of the trials. `job` has the prompt, `context` the decoder's tokens, and `random` picks the cuts."""

    job: Job
    trials: int
    random: Random
    context: list[int]

    @classmethod
    def of(cls, harness: Harness, job: Job, trials: int, random: Random) -> "TrialText":
        """The prompt and the target's answer, with the prompt repeated until two verify passes fit."""
        session = job.session("target", rewinds=False)
        context = [*session.begin(job.prompt), *tokens_of(harness.baseline.steps(job))]
        # A short answer would leave no room for random cuts at the largest verify width.
        room, missing = session.room(context), max(0, 2 * (job.settings.max_drafts + 1) - len(context))
        context += islice(cycle(job.prompt), missing if room is None else min(missing, room))
        return cls(job, trials, random, context)

    @property
    def width(self) -> int:
        """The maximum verify width: all drafts of a round and one token."""
        return self.job.settings.max_drafts + 1

    def cuts(self) -> Iterator[tuple[list[int], int]]:
        """The text up to a cut, and the number of positions to compare before it, for each trial."""
        for _ in range(self.trials):
            end = self.random.randint(min(self.width + 1, len(self.context)), len(self.context))
            yield self.context[:end], max(1, min(self.width, end - 1))

    def session(
        self, *, rewinds: bool = True, cache: bool | None = None, others: Sequence[list[int]] = ()
    ) -> ModelSession:
        """A session of the target that has begun the prompt, in a batch with `others`.

        Raises UserError if the session must rewind but the model's cache does not support it.
        """
        settings = self.job.settings if cache is None else replace(self.job.settings, cache=cache)
        session = replace(self.job, settings=settings).session("target", rewinds=rewinds)
        session.begin(self.job.prompt, others)
        return session

    def choices(self, logits: Tensor, end: int) -> tuple[int, ...]:
        """The tokens drawn from logits (k, V) under the current processor and seed."""
        decoding = self.job.decoding
        return tuple(decoding.noise.samples(decoding.probs(logits, "The target"), end))

    def shuffled(self, tokens: list[int]) -> list[int]:
        """The same tokens in random order after the first."""
        return [*tokens[:1], *self.random.sample(tokens[1:], len(tokens) - 1)]


@dataclass(frozen=True, slots=True)
class Trial:
    """One cut. `versions` has logits (k, V) of the same positions, one tensor per way to compute them. `end` is the
    length of the text, `width` the largest verify width.
    """

    versions: list[Tensor]
    end: int
    width: int = 0


def widths(text: TrialText) -> Iterator[Trial]:
    """Logits by decode steps, by verify passes of each width up to gamma + 1, and by one prefill."""
    for context, count in text.cuts():
        base = text.session()
        if len(context) > count:
            base.feed(context[:-count], keep=1)
        versions = [logits_by_width(base, context, count, width) for width in range(1, count + 1)]
        yield Trial([*versions, text.session().feed(context, keep=count)], len(context), width=count)


def prefixes(text: TrialText) -> Iterator[Trial]:
    """Logits with a cached prefix, after other drafts were rewound, and without a cache."""
    for context, count in text.cuts():
        known = len(context) - count
        cached = text.session(cache=True)
        if known:
            # Any other tokens serve as drafts: a rewind must remove them completely.
            cached.feed([*context[:known], *reversed(context[-count:])], keep=1)
            cached.rewind(known)
        sessions = (cached, text.session(cache=False))
        yield Trial([session.feed(context, keep=count) for session in sessions], len(context))


def batches(text: TrialText) -> Iterator[Trial]:
    """Logits of the text alone, and in a batch of 2 to 8 with shuffled texts and prompts."""
    for number, (context, count) in enumerate(text.cuts()):
        size = 1 + number % (LARGEST_BATCH - 1)
        others = [text.shuffled(context) for _ in range(size)]
        prompts = [text.shuffled(text.job.prompt) for _ in range(size)]
        alone = text.session(rewinds=False).feed(context, keep=count)
        # Row 0 is the same text. All rows have the same length, so nothing is padded.
        batched = text.session(rewinds=False, others=prompts).feed_rows([context, *others], count)[0]
        yield Trial([alone, batched], len(context))


MODES: dict[str, Callable[[TrialText], Iterator[Trial]]] = {"width": widths, "prefix": prefixes, "batch": batches}


def logit_events(mode: str, harness: Harness, text: TrialText) -> Iterator[ReportEvent]:
    """One finding for the trials of a mode. Ctrl-C keeps the finished trials."""
    yield Progress(f"{mode}: {count_of(text.trials, 'position')} in {count_of(len(text.context), 'token')} ...")
    drift, unique, done, width = LogitDrift(0.0, 0, 0), 0, 0, 0
    countdown = Countdown()
    try:
        for trial in MODES[mode](text):
            drift += LogitDrift.of(trial.versions)
            unique = max(unique, len({text.choices(version, trial.end) for version in trial.versions}))
            width = max(width, trial.width)
            done += 1
            yield from countdown.at(done / text.trials, f"{mode}: {done} of {text.trials} positions")
    except UserError as error:
        yield Note(f"{mode}: left out. {error}")
    finally:  # Ctrl-C is raised again once the finding is consumed
        if done:
            if mode != "batch":  # the program itself never verifies in batches
                harness.state.rounding = max(harness.state.rounding, drift.difference)
            yield _finding(mode, done, unique, drift, width=width)


def _finding(mode: str, done: int, unique: int, drift: LogitDrift, *, width: int) -> Finding:
    figures = {
        "mode": mode,
        "trials": done,
        "unique_outputs": unique,
        "largest_logit_difference": drift.difference,
        "argmax_flips": drift.flips,
        "positions": drift.positions,
    }
    cells = (mode, str(done), str(unique), f"{drift.difference:.2g}", f"{drift.flips} of {drift.positions}")
    return Finding(cells, figures | ({"widest_window": width} if width else {}))
