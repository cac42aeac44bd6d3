"""Exact enumeration: run a verification rule or a whole decoder through every outcome of every draw and add up the
probabilities.

The code under test is the program's own; `Branching` replaces its noise. With `Exact` in place of tensors the sums are
equal fractions; with tensors they differ by rounding. Nothing is sampled, so there are no false alarms.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import torch

from utils.decode.drafts import Draft
from utils.decode.noise import Domain
from utils.decode.steps import Step
from utils.metrics.results import tokens_of

Row = tuple[Fraction, ...]
Distribution = Callable[[tuple[int, ...]], Row]  # from the tokens so far to the distribution of the next one
Text = tuple[int, ...]
Verify = Callable[..., tuple[int, int]]
Number = float | Fraction


class Exact:
    """A vector or a matrix of fractions with the tensor operations that the rules use."""

    device = torch.device("cpu")

    def __init__(self, values: Any) -> None:
        self.values = values

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple):
            return Exact([self.values[row][column] for row, column in zip(*key, strict=True)])
        picked = self.values[key]
        return Exact(picked) if isinstance(picked, Sequence) else picked

    def __len__(self) -> int:
        return len(self.values)

    def __mul__(self, factor: Fraction) -> "Exact":
        return Exact([value * Fraction(factor) for value in self.values])

    def __sub__(self, other: "Exact") -> "Exact":
        return Exact([mine - theirs for mine, theirs in zip(self.values, other.values, strict=True)])

    def clamp(self, min: int) -> "Exact":
        return Exact([max(value, Fraction(min)) for value in self.values])

    def to(self, device: Any) -> "Exact":
        return self

    def cpu(self) -> "Exact":
        return self

    def any(self) -> bool:
        return any(self.values)

    def sum(self) -> "Exact":
        return Exact(sum(self.values))

    def item(self) -> Fraction:
        return self.values

    def tolist(self) -> list[Fraction]:
        return list(self.values)


class Uniform:
    """A number from (0, 1), possibly scaled, that can be compared or rounded down. Each result is a branch."""

    def __init__(self, noise: "Branching", key: tuple[int, ...], scale: Number = 1) -> None:
        self._noise, self._key, self._scale = noise, key, scale

    def __mul__(self, factor: Number) -> "Uniform":
        return Uniform(self._noise, self._key, self._scale * factor)

    def __le__(self, bound: Number) -> bool:
        if not self._scale:
            return True
        below = min(Fraction(1), max(Fraction(0), bound / self._scale))
        return self._noise.split(self._key, [below, 1 - below]) == 0

    def __ge__(self, bound: Number) -> bool:
        return not self <= bound

    def __int__(self) -> int:
        return self._noise.split(self._key, [Fraction(1)] * int(self._scale))


class Branching:
    """Noise that follows one path of outcomes; `probability` is that of the path.

    It refuses to use a key twice, because only different keys give independent numbers.
    """

    def __init__(self, path: list[int]) -> None:
        self._path = path
        self._used: set[tuple[int, ...]] = set()
        self.widths: list[int] = []
        self.probability: Number = Fraction(1)

    def choose(self, weights: Sequence[Number]) -> int:
        """The index of one of the outcomes with a positive weight."""
        possible = [index for index, weight in enumerate(weights) if weight > 0]
        if len(possible) == 1:
            return possible[0]
        depth = len(self.widths)
        branch = self._path[depth] if depth < len(self._path) else 0
        self.widths.append(len(possible))
        self.probability *= weights[possible[branch]] / sum(weights)
        return possible[branch]

    def split(self, key: tuple[int, ...], weights: Sequence[Number]) -> int:
        """The outcome that the number with this key selects by inversion. Each key may be used once."""
        assert key not in self._used, f"noise {key} is used twice"
        self._used.add(key)
        return self.choose(weights)

    def uniform(self, domain: Domain, position: int, start: int) -> Uniform:
        return Uniform(self, (domain, position, start))

    def pick(self, weights: Any, domain: Domain, position: int, start: int) -> int:
        return self.split((domain, position, start), weights.tolist())

    def sample(self, weights: Any, position: int) -> int:
        return self.split((Domain.TARGET, position, 0), weights.tolist())

    def samples(self, rows: Any, start: int) -> Iterator[int]:
        for index, row in enumerate(rows.tolist()):
            yield self.split((Domain.TARGET, start + index, 0), row)


class Reusing(Branching):
    """Noise for known mistakes: a key that is used again gives the same number, of which an interval is known."""

    def __init__(self, path: list[int]) -> None:
        super().__init__(path)
        self._known: dict[tuple[int, ...], tuple[Number, Number]] = {}

    def split(self, key: tuple[int, ...], weights: Sequence[Number]) -> int:
        low, high = self._known.get(key, (Fraction(0), Fraction(1)))
        total = sum(weights)
        edges = [edge / total for edge in accumulate(weights, initial=Fraction(0))]
        cells = [(max(low, left), min(high, right)) for left, right in pairwise(edges)]
        index = self.choose([max(Fraction(0), right - left) for left, right in cells])
        self._known[key] = cells[index]
        return index


def outcome_probs(walk: Callable[[Branching], Text], noise: type[Branching] = Branching) -> dict[Text, Any]:
    """The probability of every result of `walk`, over all paths."""
    probs: dict[Text, Any] = defaultdict(Fraction)
    path: list[int] = []
    while True:
        branching = noise(path)
        probs[walk(branching)] += branching.probability
        path = (path + [0] * len(branching.widths))[: len(branching.widths)]
        while path and path[-1] + 1 == branching.widths[len(path) - 1]:
            path.pop()
        if not path:
            return dict(probs)
        path[-1] += 1


def text_probs(decode: Callable[[Any], Iterable[Step]], noise: type[Branching] = Branching) -> dict[Text, Any]:
    """The probability of every text of a decoder. `decode` starts a run with the noise that it is given."""
    return outcome_probs(lambda branching: tuple(tokens_of(decode(branching))), noise)


def distance(first: dict[Text, Any], second: dict[Text, Any]) -> float:
    """Total variation distance between two distributions of texts."""
    return float(sum(abs(first.get(text, 0) - second.get(text, 0)) for text in {**first, **second}) / 2)


def never(text: Text) -> bool:
    """For a drafter that drafts as many tokens as requested."""
    return False


def one_round(
    p: Distribution,
    q: Distribution,
    gamma: int,
    verify: Verify,
    noise: Branching,
    stops: Callable[[Text], bool] = never,
) -> Text:
    """The tokens of one round: draft from q until `stops` holds for the drafts so far, then verify with p."""
    tokens: list[int] = []
    while len(tokens) < gamma and not stops(tuple(tokens)):
        tokens.append(noise.pick(Exact(q(tuple(tokens))), Domain.DRAFT, len(tokens), 0))
    before = [tuple(tokens[:index]) for index in range(len(tokens) + 1)]
    draft = Draft(tokens, Exact([q(prefix) for prefix in before[:-1]]))  # type: ignore[arg-type]
    accepted, token = verify(Exact([p(prefix) for prefix in before]), draft, noise, start=0)
    return (*tokens[:accepted], token)


def one_hot_round(p: Distribution, drafted: Text, verify: Verify, noise: Branching) -> Text:
    """The tokens of one round with a fixed draft."""
    probs = Exact([p(drafted[:index]) for index in range(len(drafted) + 1)])
    accepted, token = verify(probs, Draft(list(drafted)), noise, start=0)
    return (*drafted[:accepted], token)


def joint(p: Distribution, length: int, prefix: Text = ()) -> dict[Text, Fraction]:
    """The probability, given `prefix`, of every text of `length` tokens that begins with it."""
    texts = {prefix: Fraction(1)}
    for _ in range(length - len(prefix)):
        texts = {
            (*text, token): mass * weight
            for text, mass in texts.items()
            for token, weight in enumerate(p(text))
            if weight
        }
    return texts


def completed(rounds: dict[Text, Fraction], p: Distribution, length: int) -> dict[Text, Fraction]:
    """The distribution of the first `length` tokens if autoregressive decoding continues after the round."""
    probs: dict[Text, Fraction] = defaultdict(Fraction)
    for text, probability in rounds.items():
        for whole, mass in joint(p, length, text).items():
            probs[whole] += probability * mass
    return dict(probs)


def mean_accepted(rounds: dict[Text, Fraction]) -> Fraction:
    """Expected number of accepted drafts in a round."""
    return sum(((len(text) - 1) * probability for text, probability in rounds.items()), Fraction(0))


def grid(size: int, steps: int) -> list[Row]:
    """Every distribution over `size` tokens in multiples of 1 / steps."""
    if size == 1:
        return [(Fraction(1),)]
    cuts = [[]]
    for _ in range(size - 1):
        cuts = [[*cut, nxt] for cut in cuts for nxt in range(cut[-1] if cut else 0, steps + 1)]
    return [tuple(Fraction(after - before, steps) for before, after in pairwise([0, *cut, steps])) for cut in cuts]


def contextual(seed: int, size: int) -> Distribution:
    """A random distribution over `size` tokens for every context. Some tokens have probability 0."""
    rows: dict[Text, Row] = {}
    source = Random(seed)

    def probs(text: Text) -> Row:
        if text not in rows:
            weights = [source.choice((0, 1, 1, 2, 3, 5, 8)) for _ in range(size)]
            weights[source.randrange(size)] += 1
            rows[text] = tuple(Fraction(weight, sum(weights)) for weight in weights)
        return rows[text]

    return probs
