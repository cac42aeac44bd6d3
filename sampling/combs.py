"""Combs: leaves beside a chain of drafts, so that a round may go on where a draft is rejected.

Only the most likely path is drafted further; a leaf is one of the drafter's next best tokens in place of a draft. The
drafter stays a chain, and the target verifies all of them in one pass. Wider trees (EAGLE-2, arXiv 2406.16858) need
more drafter passes and verify rows than they save where a verify pass costs more with every row.

Which places get leaves depends on distributions and on the chain, never on the tokens of the leaves: otherwise the
output would be biased.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sampling.adaptive_gamma import AcceptanceEstimates, AdaptiveGamma, Bucket, ThroughputEstimate
from utils.bounds import MAX_GAMMA
from utils.decode.drafts import matching_prefix
from utils.decode.noise import Domain, Noise
from utils.decode.steps import Leaf
from utils.metrics.costs import Costs

PER_PLACE = 3  # leaves in place of one draft
MOST = 4  # leaves of a round without costs
LEAST_VALUE = 0.1  # probability with which a leaf is accepted, below which it is not proposed without costs


@dataclass(frozen=True, slots=True)
class Place:
    """A draft of the chain and what it was drawn from.

    bucket: of its confidence. q: its distribution (V,). logits: those of q (V'). runners_up: the highest probabilities
    of other tokens at temperature 1, highest first.
    """

    token: int
    bucket: Bucket
    q: Tensor
    logits: Tensor
    runners_up: tuple[float, ...]

    @classmethod
    def of(cls, token: int, bucket: Bucket, q: Tensor, logits: Tensor) -> "Place":
        """logits: (V',)."""
        top = logits.topk(min(PER_PLACE + 1, len(logits)))
        values = (top.values - logits.logsumexp(dim=-1)).exp()
        pairs = zip(values.tolist(), top.indices.tolist(), strict=True)
        others = [value for value, index in pairs if index != token]
        return cls(token, bucket, q, logits, tuple(others[:PER_PLACE]))


class Comb:
    """Chooses the leaves of each round and learns how often they are accepted.

    shares_noise: whether drafts are drawn with the target's noise; leaves are then the next tokens of the same race.
    (GLS, arXiv 2506.05632, couples lists of drafts by several noise vectors; here there is one.) costs: of verify
    passes; leaves are then chosen by their gain over their cost, otherwise by their probability alone. draft_cost: of
    one draft, in decode steps. kind: of the drafter, if its costs are in the table. adaptive: chooses the chain's
    length, if anything does; its estimate of the run's throughput is used.
    """

    def __init__(
        self,
        noise: Noise,
        *,
        shares_noise: bool,
        costs: Costs | None = None,
        draft_cost: float = 0.0,
        adaptive: AdaptiveGamma | None = None,
        kind: str = "",
    ) -> None:
        self._noise, self._shares_noise, self._adaptive = noise, shares_noise, adaptive
        self._table, self._costs, self._draft_cost, self._kind = costs, costs, draft_cost, kind
        self._estimates, self._throughput = AcceptanceEstimates(), ThroughputEstimate()

    def follow(self, context: Sequence[int]) -> None:
        """Start a round: what follows is decided by the costs at this context length."""
        if self._table is not None:
            self._costs = self._table.at(len(context))
            if self._kind:
                self._draft_cost = self._costs.draft_cost(self._kind)

    def leaves(self, places: Sequence[Place], start: int) -> tuple[Leaf, ...]:
        """The leaves beside a chain. start: the round's first position among the new tokens."""
        counts = self._counts(places)
        return tuple(
            Leaf(index, token)
            for index, place in enumerate(places)
            for token in self._tokens(place, counts[index], start + index, start)
        )

    def _counts(self, places: Sequence[Place]) -> Counter[int]:
        """How many leaves each place gets: those that are worth their cost."""
        candidates: list[tuple[float, int]] = []  # value and place
        reached = 1.0  # probability that all drafts before the place are accepted
        for index, place in enumerate(places):
            bound = 1.0
            for probability in place.runners_up:
                # A leaf is verified only after its likelier siblings, so it cannot be worth more.
                bound = min(bound, self._estimates.probability(_bucket(probability)))
                candidates.append((reached * bound, index))
            reached *= self._estimates.probability(place.bucket)
        candidates.sort(key=lambda candidate: -candidate[0])
        count = self._best([value for value, _ in candidates][: MAX_GAMMA - len(places)], len(places))
        return Counter(index for _, index in candidates[:count])

    def _best(self, values: Sequence[float], chain: int) -> int:
        """How many leaves of these values, the highest first, to propose beside a chain of drafts. A value is the
        expected gain in tokens.
        """
        if self._costs is None:
            return sum(value >= LEAST_VALUE for value in values[:MOST])
        rate = self._throughput.rate if self._adaptive is None else self._adaptive.rate
        gain, gains = 0.0, [0.0]
        for count, value in enumerate(values, start=1):
            gain += value
            gains.append(gain - rate * (self._costs.pass_cost(chain, count) - self._costs.pass_cost(chain)))
        return gains.index(max(gains))

    def _tokens(self, place: Place, count: int, position: int, start: int) -> list[int]:
        """The tokens of this many leaves at a place, in the order in which they are verified."""
        if self._shares_noise:
            drawn = self._noise.ranking(place.q, position, count + 1)[1:]
        else:
            drawn = self._without_replacement(place, count, position, start)
        # A processor leaves few tokens a probability, greedy decoding one. Further leaves have no distribution.
        likeliest = place.logits.topk(min(1 + 2 * count, len(place.logits))).indices.tolist()
        listed = [token for token in likeliest if token != place.token and token not in drawn]
        return [*drawn, *listed][:count]

    def _without_replacement(self, place: Place, count: int, position: int, start: int) -> list[int]:
        rest, drawn = place.q.clone(), [place.token]
        while len(drawn) <= count:
            rest[drawn[-1]] = 0
            if not rest.any():
                break
            drawn.append(self._noise.pick(rest, Domain.LEAF, position, start, index=len(drawn)))
        return drawn[1:]

    def learn(self, places: Sequence[Place], leaves: Sequence[Leaf], text: Sequence[int], *, computed: int) -> None:
        """Learn from a round. text: its new tokens. computed: how many distributions were computed."""
        accepted = matching_prefix([place.token for place in places], text)
        outcomes = [(place.bucket, index < accepted) for index, place in enumerate(places[: accepted + 1])]
        ranks: Counter[int] = Counter()
        for leaf in leaves:
            if leaf.place <= accepted:
                bucket = _bucket(places[leaf.place].runners_up[ranks[leaf.place]])
                follows = list(text[accepted : accepted + 1])  # empty after an accepted end token
                outcomes.append((bucket, leaf.place == accepted and follows == [leaf.token]))
            ranks[leaf.place] += 1
        self._estimates.learn(outcomes)
        if self._costs is not None:
            time = 1 + self._costs.pass_cost(len(places), len(leaves)) + computed * self._draft_cost
            self._throughput.add(len(text), time)


def _bucket(probability: float) -> Bucket:
    """A runner-up's probability in sixteenths. Above one half it is not a runner-up of a greedy draft."""
    return "runner_up", min(7, int(16 * probability))
