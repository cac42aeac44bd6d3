"""The doctor of drafters: does a drafter that reads hidden states read those that it was trained on?

The most common mistake with published drafters is silent: layer ids off by one or the wrong side of a norm. The text
stays right, but hardly any draft is accepted. So the plausible readings of a checkpoint are compared by how often they
predict the target's own text.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sampling.autoregressive import autoregressive_steps
from sampling.drafters.feature_sessions import feature_session
from utils.decode.decoding import Decoding
from utils.decode.model_info import context_length
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.files import file_state
from utils.models.feature_drafter import Conventions, FeatureDrafter, StepwiseDrafter
from utils.models.target_identity import fingerprint
from utils.pairs.pair import Pair

OWN_PROMPT = "Explain in a few paragraphs how bread is made, from the field to the table."
TEXT_TOKENS, LOAD_TOKENS = 256, 128  # tokens of the target's own text: for /pair doctor, and when a pair is loaded
DEPTH = 3  # drafts in a row: the first one depends on the features, further ones on what is fed back
MOVED = 17  # the displacement of features, in positions, that tests whether the drafter uses them
PASSAGE = 4  # repeated passages of this many tokens count once
GROUP = 4  # neighbouring rounds predict the same tokens, so they count together
LEAST_GROUPS = 11  # fewer groups cannot show that one of ten readings is significantly better
SIGNIFICANCE = 0.01  # the maximum probability of replacing a reading although no other one is better
SHIFTS = {
    0: "",
    1: "layer ids read as outputs of layers, one later",
    -1: "layer ids read as inputs of layers, one earlier",
}
# The name of a reading whose convention is changed to False or to True.
CHANGED = {
    "norm_output": ("states fed back before the final norm", "states fed back after the final norm"),
    "norm_before_residual": ("the other residual in the first layer", "the other residual in the first layer"),
    "norm_before_head": ("no final norm before the output head", "the final norm before the output head"),
    "from_anchor": ("no drafts from the first slot of a block", "drafts from the first slot of a block"),
}
READINGS = "readings"  # in the cache folder: the readings found, one file for each drafter and target
COMMAND = "/pair doctor"
INTERRUPTED = f"The drafter is read as its files declare: its examination was interrupted ({COMMAND} repeats it)."
EARLIER = f"The drafter is read as an earlier examination found, not as its files declare ({COMMAND} repeats it)."
Reporter = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """How often one reading of a checkpoint predicted the target's text.

    `name` is empty for the present reading. `hits` (positions, drafts) are 0 or 1. A draft counts whether or not those
    before it were right, because the text itself is fed.
    """

    name: str
    conventions: Conventions
    hits: Tensor

    @property
    def agreement(self) -> tuple[float, ...]:
        """For each draft in a row, the share of positions at which it was right."""
        return tuple(self.hits.float().mean(0).tolist())


def own_text(target: object, prompt: list[int], count: int, report: Reporter = print) -> list[int]:
    """The prompt and the target's greedy answer, up to the context length. It does not end at end tokens."""
    if (bound := context_length(target)) is not None:
        count = max(0, min(count, bound - 1 - len(prompt)))
    decoding, text = Decoding.of(None, count, end_ids=None, seed=0), list(prompt)
    for step in autoregressive_steps(prompt, ModelSession(target, rewinds=False), decoding):
        text += step.tokens
        report(f"generating text of the target: {len(text) - len(prompt)}/{count} tokens")
    return text


def examine(
    drafter: FeatureDrafter, target: object, text: list[int], start: int, *, report: Reporter = print
) -> Examination:
    """Compare the readings of a checkpoint on the target's own text, from position `start` on.

    Afterwards the drafter's conventions are as before. Raises UserError if the text is too short or too repetitive to
    distinguish readings.
    """
    rounds = _new_passages(text, start)
    if len(rounds) < GROUP * LEAST_GROUPS:
        raise UserError(
            f"Only {len(rounds)} different passages of the target's text can be compared, which are too few to examine "
            f"the drafter: {GROUP * LEAST_GROUPS} are needed."
        )
    compared = {"": drafter.conventions} | other_readings(drafter, drafter.conventions)
    layers = dict.fromkeys(layer for each in compared.values() for layer in each.feature_layers)
    own, readings = OwnText(text, rounds, _hidden_states(target, text, tuple(layers))), list[Reading]()
    for name, conventions in compared.items():
        report(f"comparing readings of the drafter: {len(readings) + 1} of {len(compared)}")
        readings.append(Reading(name, conventions, own.hits(drafter, conventions)))
    # By significance, not by the sum of hits: readings may draft blocks of different lengths.
    level, best = min((_significance(each.hits, readings[0].hits), place) for place, each in enumerate(readings))
    used = readings[best if level * len(readings[1:]) <= SIGNIFICANCE else 0]
    displaced = own.hits(drafter, used.conventions, moved=MOVED)
    agreement = float(displaced[:, 0].float().mean())
    return Examination(rounds, readings, used, agreement, _significance(used.hits, displaced) <= SIGNIFICANCE)


def _new_passages(text: list[int], start: int) -> list[int]:
    """The last positions with known features of the rounds to compare.

    Otherwise a text that repeats itself would repeat a single lucky draft until it looked significant.
    """
    seen: set[tuple[int, ...]] = set()
    found = []
    for end in range(PASSAGE, len(text) + 1):
        passage = tuple(text[end - PASSAGE : end])  # its last token is the first draft's
        if passage not in seen and start < end <= len(text) - DEPTH + 1:
            found.append(end - 3)
        seen.add(passage)
    return found


def other_readings(drafter: FeatureDrafter, own: Conventions) -> dict[str, Conventions]:
    """The readings of a checkpoint that differ from this one in one convention, by a description of the change."""
    shifted = shifted_layers(own.feature_layers, drafter.target_layers)
    found = {name: replace(own, feature_layers=layers) for name, layers in shifted.items()}
    for flag in drafter.doubtful:
        change: dict[str, Any] = {flag: not getattr(own, flag)}
        found[CHANGED[flag][change[flag]]] = replace(own, **change)
    return found


def shifted_layers(own: tuple[int, ...], count: int) -> dict[str, tuple[int, ...]]:
    """The hidden states one layer earlier or later, and the last one before or after the final norm.

    `count` is the number n of the target's layers, or 0 for a drafter whose layers are certain. Number n is after the
    final norm, as -1 is, and n + 1 before it.
    """
    own, found = tuple(count if layer == -1 else layer for layer in own), {}
    for shift, name in SHIFTS.items() if count else ():
        layers = tuple(min(layer, count) + shift for layer in own)
        if min(layers) < 0 or max(layers) > count:
            continue
        found[name or "the last hidden state after the final norm"] = layers
        if count in layers:
            last = "the last hidden state before the final norm"
            found[f"{name}, {last}" if name else last] = tuple(layer + (layer == count) for layer in layers)
    return {name: layers for name, layers in found.items() if layers != own}


@torch.no_grad()
def _hidden_states(target: object, text: list[int], layers: tuple[int, ...]) -> dict[int, Tensor]:
    """The hidden states (T, H) of a text by number."""
    session = ModelSession(target, rewinds=False, features=layers)
    session.begin(text)
    session.feed(text, keep=1)
    features = session.take_features()
    assert features is not None
    return dict(zip(layers, features.chunk(len(layers), dim=-1), strict=True))


@dataclass(frozen=True, slots=True)
class OwnText:
    """A text of the target, the rounds to compare (see _new_passages), and its hidden states (T, H) by number."""

    tokens: list[int]
    rounds: list[int]
    states: dict[int, Tensor]

    @torch.no_grad()
    def hits(self, drafter: FeatureDrafter, conventions: Conventions, *, moved: int = 0) -> Tensor:
        """Whether each of up to DEPTH drafts in a row is the text's token (rounds, drafts).

        Round i knows the features up to i. `moved` displaces the features by this many positions.
        """
        features = torch.cat([self.states[layer] for layer in conventions.feature_layers], dim=-1).roll(moved, 0)
        before, drafter.conventions = drafter.conventions, conventions
        try:
            return self._hits(drafter, features)
        finally:
            drafter.conventions = before

    def _hits(self, drafter: FeatureDrafter, features: Tensor) -> Tensor:
        text, session = self.tokens, feature_session(drafter)
        session.begin(text)
        depth = DEPTH if isinstance(drafter, StepwiseDrafter) else min(DEPTH, session.block_size)
        known, hits = 0, []
        for last in self.rounds:
            session.add_features(features[known : last + 1], known, last + 1)
            known = last + 1
            # The text is fed instead of the drafts, so that every position counts.
            rows = [session.feed(text[: known + 1 + step], keep=1)[0].argmax() for step in range(depth)]
            hits.append([int(row) == text[known + 1 + step] for step, row in enumerate(rows)])
            session.rewind(known)
        return torch.tensor(hits, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Examination:
    """The results of an examination.

    `readings` are those compared, the present one first. `used` is the reading to use from now on. `displaced` is the
    agreement of first drafts with features of other positions. `reads_target` is True if that is significantly lower
    than with the right ones.
    """

    rounds: list[int]
    readings: list[Reading]
    used: Reading
    displaced: float
    reads_target: bool

    @property
    def better(self) -> Reading | None:
        """The reading that is significantly better than the present one."""
        return None if self.used is self.readings[0] else self.used

    def gain(self) -> tuple[int, float, float]:
        """The draft that the better reading improves most, counted from 0, and its agreement before and now."""
        pairs = list(zip(self.readings[0].agreement, self.used.agreement, strict=False))
        place = max(range(len(pairs)), key=lambda index: pairs[index][1] - pairs[index][0])
        return place, *pairs[place]


def _significance(one: Tensor, other: Tensor) -> float:
    """The probability of such a lead in hits if both readings were equally good. Both have the same positions."""
    depth = min(one.shape[1], other.shape[1])
    differences = (one[:, :depth] - other[:, :depth]).sum(1)
    return sign_flip_test([int(group.sum()) for group in differences.split(GROUP)])


def sign_flip_test(differences: Sequence[int]) -> float:
    """The probability that the sum is at least this large if the sign of each difference were a fair coin: the exact
    paired permutation test.
    """
    sums = Counter({0: 1})
    for difference in differences:
        turned: Counter[int] = Counter()
        for total, ways in sums.items():
            turned[total + difference] += ways
            turned[total - difference] += ways
        sums = turned
    return sum(ways for total, ways in sums.items() if total >= sum(differences)) / (1 << len(differences))


def settle_reading(pair: Pair, prompt: Callable[[], list[int]]) -> str:
    """Read an ambiguous drafter in the way that predicts the target's text best. Returns a message about it.

    It runs after the engine has started and before any measurement. A stored result of an earlier examination is used
    again. `prompt` returns the ids of OWN_PROMPT. Ctrl-C ends only the examination.
    """
    drafter = pair.drafter
    if not isinstance(drafter, FeatureDrafter) or drafter.origin is None:
        return ""
    if (known := _stored(_reading_file(pair, drafter))) is not None:
        before, drafter.conventions = drafter.conventions, known
        return "" if known == before else EARLIER
    if not drafter.origin.is_ambiguous:
        return ""
    try:
        report, ids = pair.engine.report, prompt()
        found = examine(drafter, pair.target, own_text(pair.target, ids, LOAD_TOKENS, report), len(ids), report=report)
    except KeyboardInterrupt:
        return INTERRUPTED
    except UserError as error:
        return f"How the drafter is read is ambiguous, and could not be examined: {error}"
    use(pair, found.used.conventions)
    return _sentence(found)


def use(pair: Pair, conventions: Conventions) -> None:
    """Read the drafter in this way, now and in later starts."""
    drafter = pair.drafter
    assert isinstance(drafter, FeatureDrafter)
    drafter.conventions = conventions
    if (file := _reading_file(pair, drafter)) is not None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(asdict(conventions)), encoding="utf-8")


def _reading_file(pair: Pair, drafter: FeatureDrafter) -> Path | None:
    """The file for this drafter, its declarations and this target. None if nothing is stored."""
    origin, results = drafter.origin, pair.engine.results
    if origin is None or results is None:
        return None
    try:
        made_from = repr([origin.declared, *map(file_state, origin.files), fingerprint(pair.target).tolist()])
    except (OSError, RuntimeError, TypeError):  # weights whose data are elsewhere have no fingerprint
        return None
    return Path(results.path).parent / READINGS / f"{hashlib.sha256(made_from.encode()).hexdigest()}.json"


def _stored(file: Path | None) -> Conventions | None:
    """The reading from an earlier examination. None if it is absent or damaged: the drafter is examined again."""
    with suppress(OSError, ValueError, TypeError):
        if file is not None:
            found = Conventions(**json.loads(file.read_text(encoding="utf-8")))
            return replace(found, feature_layers=tuple(found.feature_layers))
    return None


def _sentence(found: Examination) -> str:
    """The result of an examination, for the messages of loading."""
    agreement = found.used.agreement[0]
    if not found.reads_target:
        return (
            f"The drafter agrees with the target's text at {agreement:.2f} of {len(found.rounds)} positions, and "
            f"with hidden states of other positions at {found.displaced:.2f}: {COMMAND} examines it on a longer text."
        )
    if found.better is None:
        return f"How the drafter is read was ambiguous; its files are right (agreement {agreement:.2f})."
    place, before, now = found.gain()
    which = "" if place == 0 else f" of draft {place + 1}"
    return (
        f"{found.better.name}: agreement{which} {now:.2f} against {before:.2f} as declared, at "
        f"{len(found.rounds)} positions of the target's own text."
    )
