"""Exact enumeration: run a verification rule through every outcome of every draw and add up the probabilities.

The rules are the program's own functions. `Exact` replaces their tensors by fractions, and `Branching` replaces their
noise. Nothing is sampled and nothing is rounded, so distributions are compared as equal fractions.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from utils.decode.drafts import Draft
from utils.decode.noise import Domain

Row = tuple[Fraction, ...]
Distribution = Callable[[tuple[int, ...]], Row]  # from the tokens so far to the distribution of the next one
Text = tuple[int, ...]
Verify = Callable[..., tuple[int, int]]


class Exact:
    """A vector or a matrix of fractions with the tensor operations that the rules use."""

    device = None

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

    def any(self) -> bool:
        return any(self.values)

    def sum(self) -> "Exact":
        return Exact(sum(self.values))

    def item(self) -> Fraction:
        return self.values

    def tolist(self) -> list[Fraction]:
        return list(self.values)


class Uniform:
    """A number drawn from (0, 1) that can only be compared. Each comparison is a branch."""

    def __init__(self, noise: "Branching", scale: Fraction = Fraction(1)) -> None:
        self.noise, self.scale = noise, scale

    def __mul__(self, factor: Fraction) -> "Uniform":
        return Uniform(self.noise, self.scale * factor)

    def __le__(self, bound: Fraction) -> bool:
        below = min(Fraction(1), max(Fraction(0), Fraction(bound) / self.scale)) if self.scale else Fraction(1)
        return self.noise.choose([below, 1 - below]) == 0

    def __ge__(self, bound: Fraction) -> bool:
        return not self <= bound


class Branching:
    """Noise that follows one path through the tree of outcomes. `probability` is that of the path."""

    def __init__(self, path: list[int]) -> None:
        self._path, self._taken = path, 0
        self._keys: set[tuple[int, ...]] = set()
        self.widths: list[int] = []
        self.probability = Fraction(1)

    def choose(self, weights: Sequence[Fraction]) -> int:
        """The index of one of the outcomes with a positive weight."""
        possible = [index for index, weight in enumerate(weights) if weight > 0]
        branch = self._path[self._taken] if self._taken < len(self._path) else 0
        self._taken += 1
        self.widths.append(len(possible))
        self.probability *= weights[possible[branch]] / sum(weights)
        return possible[branch]

    def _use(self, *key: int) -> None:
        """Draws are independent only if no two of them look up the same noise."""
        assert key not in self._keys, f"noise {key} is used twice"
        self._keys.add(key)

    def uniform(self, domain: Domain, position: int, start: int) -> Uniform:
        self._use(domain, position, start)
        return Uniform(self)

    def pick(self, weights: Exact, domain: Domain, position: int, start: int) -> int:
        self._use(domain, position, start)
        return self.choose(weights.values)

    def sample(self, weights: Exact, position: int) -> int:
        self._use(Domain.TARGET, position)
        return self.choose(weights.values)

    def samples(self, probs: Exact, start: int) -> Iterator[int]:
        for index, row in enumerate(probs.values):
            self._use(Domain.TARGET, start + index)
            yield self.choose(row)


def every_path(walk: Callable[[Branching], Text]) -> Iterator[tuple[Text, Fraction]]:
    """The result and probability of every path through `walk`."""
    path: list[int] = []
    while True:
        noise = Branching(path)
        yield walk(noise), noise.probability
        taken = (path + [0] * len(noise.widths))[: len(noise.widths)]
        while taken and taken[-1] + 1 == noise.widths[len(taken) - 1]:
            taken.pop()
        if not taken:
            return
        path = [*taken[:-1], taken[-1] + 1]


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


def outcome_probs(walk: Callable[[Branching], Text]) -> dict[Text, Fraction]:
    """The probability of every outcome of a round."""
    probs: dict[Text, Fraction] = defaultdict(Fraction)
    for text, probability in every_path(walk):
        probs[text] += probability
    return dict(probs)


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
