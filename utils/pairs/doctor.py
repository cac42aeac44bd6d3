"""The doctor of drafters: does a drafter that reads hidden states read those that it was trained on?

The most common mistake with published drafters is silent: layer ids off by one or the wrong side of a norm. The text
stays right, but hardly any draft is accepted. So the plausible readings of a checkpoint are compared by how often they
predict the target's own text.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sampling.autoregressive import autoregressive_steps
from sampling.drafters.feature_sessions import feature_session
from utils.decode.decoding import Decoding
from utils.decode.model_info import context_length
from utils.decode.model_session import ModelSession
from utils.engine.stored_results import EntryFile
from utils.errors import UserError
from utils.logits_processor import MultinomialProcessor
from utils.models import Reporter
from utils.models.feature_drafter import Conventions, FeatureDrafter, StepwiseDrafter
from utils.pairs.pair import Pair

OWN_PROMPT = "Explain in a few paragraphs how bread is made, from the field to the table."
TEXT_TOKENS, LOAD_TOKENS = 256, 128  # tokens of the target's own text: for /pair doctor, and when a pair is loaded
DEPTH = 3  # drafts in a row: the first one depends on the features, further ones on what is fed back
MOVED = 17  # the displacement of features, in positions, that tests whether the drafter uses them
PASSAGE = 4  # repeated passages of this many tokens count once
GROUP = 4  # neighbouring rounds predict the same tokens, so they count together
LEAST_GROUPS = 11  # fewer groups cannot show that one of ten readings is significantly better
SIGNIFICANCE = 0.01  # the maximum probability of replacing a reading although no other one is better
LITTLE = 0.15  # agreement of the first draft below which a drafter is of little use
SHIFTS = {
    "": 0,
    "layer ids read as outputs of layers, one later": 1,
    "layer ids read as inputs of layers, one earlier": -1,
}
# The name of a reading whose convention is changed to False or to True.
CHANGED = {
    "norm_output": ("states fed back before the final norm", "states fed back after the final norm"),
    "norm_before_residual": ("the other residual in the first layer", "the other residual in the first layer"),
    "norm_before_head": ("no final norm before the output head", "the final norm before the output head"),
    "from_anchor": ("no drafts from the first slot of a block", "drafts from the first slot of a block"),
}
READINGS = "readings.json"  # the readings found, in the cache folder
COMMAND = "/pair doctor"
INTERRUPTED = f"The drafter is read as its files declare: its examination was interrupted ({COMMAND} repeats it)."
EARLIER = f"The drafter is read as an earlier examination found, not as its files declare ({COMMAND} repeats it)."


@dataclass(frozen=True, slots=True)
class Reading:
    """How often one reading of a checkpoint predicted the target's text.

    `name` is empty for the present reading. `hits` (positions, drafts) are 0 or 1, whether or not earlier drafts were
    right, because the text itself is fed.
    """

    name: str
    conventions: Conventions
    hits: Tensor

    @property
    def agreement(self) -> tuple[float, ...]:
        return tuple(self.hits.float().mean(0).tolist())


@dataclass(frozen=True, slots=True)
class Examination:
    """The results of an examination.

    The present reading is the first. `displaced` is the agreement of first drafts with features of other positions.
    `reads_target` is True if that is significantly lower than with the right ones.
    """

    positions: int
    readings: list[Reading]
    used: Reading
    displaced: float
    reads_target: bool

    @property
    def better(self) -> Reading | None:
        return None if self.used is self.readings[0] else self.used

    def conclusion(self) -> str:
        agreement = self.used.agreement[0]
        if not self.reads_target:
            extent = "hardly" if agreement > self.displaced else "no"
            return (
                f"The drafter predicts the target's text {extent} better from its hidden states ({agreement:.2f}) than "
                f"from those of other positions ({self.displaced:.2f}), at {self.positions} positions: it was probably "
                "made for a different target, or is read in a way that was not compared. Use a different --drafter."
            )
        if self.better is not None:
            changes = list(zip(self.readings[0].agreement, self.used.agreement, strict=False))
            before, now = max(changes, key=lambda change: change[1] - change[0])
            return (
                f"The drafter is now read with {self.better.name}: draft {changes.index((before, now)) + 1} agrees "
                f"with the target's text at {now:.2f} of {self.positions} positions, before at {before:.2f}."
            )
        right = f"The present reading is right: no other one is significantly better at {self.positions} positions."
        weak = f"Only {agreement:.2f} of the first drafts agree with the target's text: a weak drafter."
        found = [right] * (len(self.readings) > 1) + [weak] * (agreement < LITTLE)
        return (
            " ".join(found) or f"The drafter reads its target: {agreement:.2f} of the first drafts agree with its text."
        )


def own_text(
    target: object, prompt: list[int], count: int, report: Reporter = print, *, temperature: float = 0.0
) -> list[int]:
    """The prompt and the target's answer, greedy at temperature 0, up to the context length. It does not end at end
    tokens.
    """
    if (bound := context_length(target)) is not None:
        count = max(0, min(count, bound - 1 - len(prompt)))
    decoding, text = Decoding.of(MultinomialProcessor(temperature), count, end_ids=None, seed=0), list(prompt)
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
    compared = {"": drafter.conventions} | other_readings(drafter)
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
    return Examination(len(rounds), readings, used, agreement, _significance(used.hits, displaced) <= SIGNIFICANCE)


def _new_passages(text: list[int], start: int) -> list[int]:
    """The last positions with known features of the rounds to compare.

    Otherwise a text that repeats itself would repeat a single lucky draft until it looked significant.
    """
    first: dict[tuple[int, ...], int] = {}  # the end of each passage, whose last token is the first draft's
    for end in range(PASSAGE, len(text) + 1):
        first.setdefault(tuple(text[end - PASSAGE : end]), end)
    return [end - 3 for end in first.values() if start < end <= len(text) - DEPTH + 1]


def other_readings(drafter: FeatureDrafter) -> dict[str, Conventions]:
    """The readings of a checkpoint that differ in one convention from the present one, by names of the change."""
    own = drafter.conventions
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
    for name, shift in SHIFTS.items() if count else ():
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
        text, known, hits = self.tokens, 0, []
        try:
            session = feature_session(drafter)
            session.begin(text)
            depth = DEPTH if isinstance(drafter, StepwiseDrafter) else min(DEPTH, session.block_size)
            for last in self.rounds:
                session.add_features(features[known : last + 1], known, last + 1)
                known = last + 1
                # The text is fed instead of the drafts, so that every position counts.
                rows = [session.feed(text[: known + 1 + step], keep=1)[0].argmax() for step in range(depth)]
                hits.append([int(row) == text[known + 1 + step] for step, row in enumerate(rows)])
                session.rewind(known)
        finally:
            drafter.conventions = before
        return torch.tensor(hits, dtype=torch.int64)


def _significance(one: Tensor, other: Tensor) -> float:
    """The probability of such a lead in hits if both readings were equally good. Both have the same positions."""
    depth = min(one.shape[1], other.shape[1])
    differences = (one[:, :depth] - other[:, :depth]).sum(1)
    return sign_flip_test([int(group.sum()) for group in differences.split(GROUP)])


def sign_flip_test(differences: Sequence[int]) -> float:
    """The probability that the sum is at least this large if the sign of each difference were a fair coin: the exact
    paired permutation test.
    """
    sizes = [abs(difference) for difference in differences if difference]
    chances = np.ones(1)  # of each sum from -sum(sizes) to sum(sizes)
    for size in sizes:
        chances = np.convolve(chances, [0.5, *[0.0] * (2 * size - 1), 0.5])
    return float(chances[sum(sizes) + sum(differences) :].sum())


def settle_reading(pair: Pair, prompt: Callable[[], list[int]]) -> str:
    """Read an ambiguous drafter in the way that predicts the target's text best. Returns a message about it.

    It runs after the engine has started and before any measurement. A stored result of an earlier examination is used
    again. `prompt` returns the ids of OWN_PROMPT. Ctrl-C ends only the examination.
    """
    drafter = pair.drafter
    if not isinstance(drafter, FeatureDrafter):
        return ""
    file = _readings(pair)
    if file is not None and (entry := file.get(pair.engine.identity)) is not None:
        with suppress(TypeError):  # of a version with other conventions
            before, drafter.conventions = drafter.conventions, Conventions(**entry)
            return "" if drafter.conventions == before else EARLIER
    if not drafter.is_ambiguous:
        return ""
    try:
        report, ids = pair.engine.report, prompt()
        found = examine(drafter, pair.target, own_text(pair.target, ids, LOAD_TOKENS, report), len(ids), report=report)
    except KeyboardInterrupt:
        return INTERRUPTED
    except UserError as error:
        return f"How the drafter is read is ambiguous, and could not be examined: {error}"
    use(pair, found.used.conventions)
    return found.conclusion() + ("" if found.reads_target else f" {COMMAND} examines it on a longer text.")


def use(pair: Pair, conventions: Conventions) -> None:
    """Read the drafter in this way, now and in later starts with the same files."""
    assert isinstance(pair.drafter, FeatureDrafter)
    pair.drafter.conventions = conventions
    if (file := _readings(pair)) is not None:
        file.put(pair.engine.identity, asdict(conventions))


def _readings(pair: Pair) -> EntryFile | None:
    """The file of readings. None if nothing is stored."""
    results = pair.engine.results
    if results is None or not pair.engine.identity:
        return None
    return EntryFile(results.path.with_name(READINGS))
