"""Adaptive gamma: as many drafts per round as are likely to pay for a wider verify pass, down to none.

What is known of a draft before it is verified (the length of the context match, the drafter's confidence, its
position) is its bucket. The acceptance probability of a bucket is estimated from the run so far; costs come from the
table. Clocks play no part: the same run drafts the same. No rule is biased by this: whether there is one more draft
depends on earlier drafts and on distributions, never on the token that would be drawn. (Dropping a drawn draft
because it looks unlikely would bias the output.)

A run must not become noticeably slower than the target alone. Therefore drafts must be expected to gain clearly more
than they cost, and what they may lose is bounded: by a small share of the run so far, its prompt included, and by what
earlier drafts have gained. The first draft has to pay for reading the prompt as well; until then the drafter computes
nothing.
"""

from collections.abc import Sequence
from math import inf

from utils.metrics.costs import Costs

Bucket = tuple[str, int]

# Acceptance probability by bucket before any evidence, worth PRIOR_WEIGHT drafts. The last entry holds beyond the end.
PRIORS = {
    "match": (0.0, 0.3, 0.55, 0.75, 0.85),  # tokens of the context match; 0: drawn from the seed
    "confidence": (0.22, 0.38, 0.49, 0.59, 0.67, 0.76, 0.86, 0.96),  # eighths of the highest probability
    "position": (0.6,),  # in its round, from 0
    "any": (0.0,),  # cautious: nothing is accepted before there is evidence
}
PRIOR_WEIGHT = 2.0
DECAY = 0.98  # of old evidence, per round, so that what failed long ago is tried again
# Below 1, so that the expected number of accepted drafts is bounded, however many are considered.
MAX_PROBABILITY = 0.98
LOOKAHEAD = 8  # further drafts that are considered
LOSS = 0.03  # share of a run's time by the target alone that drafts may lose
MARGIN = 0.1  # tokens that drafts must be expected to gain in a round, because measured costs are not exact
EXPECTED_TOKENS = 32  # of a run; it may end long before the maximum number of new tokens
COST_STEP = 32  # tokens of context for which the same costs hold, because interpolating them takes time in each round
ANY: Bucket = ("any", 0)


class ThroughputEstimate:
    """Tokens per unit of time of a run, in decode steps by the table of costs. Old rounds decay."""

    def __init__(self) -> None:
        self._tokens = self._time = PRIOR_WEIGHT  # starts as autoregressive decoding
        self.gain = 0.0  # decode steps that drafts have saved in the whole run; negative if they have lost time

    def add(self, tokens: int, time: float) -> None:
        self._tokens, self._time = DECAY * self._tokens + tokens, DECAY * self._time + time
        self.gain += tokens - time

    @property
    def rate(self) -> float:
        """Tokens per decode step so far, at least 1, the rate of autoregressive decoding."""
        return max(1.0, self._tokens / self._time)


class AdaptiveGamma:
    """Estimates acceptance probabilities by bucket and chooses the number of drafts with the highest value.

    `costs` are those of verify passes and, if the table has them, of drafts of this `kind`. `block` is the number of
    drafts that are computed at once, whose cost does not depend on how many are proposed. `max_new` is the maximum
    number of new tokens; without it, losses are not bounded. `rival` chooses for a drafter that has the round if this
    one declines: drafts have to be worth more than the rival's are expected to be. Both share the estimate of the run's
    throughput, and each learns only from rounds in which it drafted. A drafter calls `begin` and, in each round,
    `follow`.
    """

    def __init__(
        self,
        costs: Costs,
        *,
        block: int = 1,
        kind: str = "",
        max_new: float = inf,
        rival: "AdaptiveGamma | None" = None,
    ) -> None:
        self._rival, self._shares = rival, rival is not None
        self._throughput: ThroughputEstimate = ThroughputEstimate() if rival is None else rival._throughput
        if rival is not None:
            rival._shares = True
        self._table, self._costs, self._draft_cost, self._block = costs, costs, costs.draft_cost(kind), block
        self._kind, self._max_new = kind, max_new
        self._evidence: dict[Bucket, tuple[float, float]] = {}  # (accepted, verified), decayed
        self._origin = 0  # context length at which the new tokens begin
        self._prompt = self._encoded = 0  # tokens of the prompt, and of them in an encoder
        self._length = self._read = 0  # tokens of the text, and those that the drafter has read

    def begin(self, prompt: Sequence[int], context: Sequence[int]) -> None:
        """Start a run, as for a drafter."""
        self._origin, self._prompt = len(context), len(prompt)
        self._encoded = len(prompt) if len(prompt) != len(context) else 0
        self._read = 0
        self.follow(context)

    def follow(self, context: Sequence[int]) -> None:
        """Start a round: what follows is decided by the costs at this context length."""
        self._length = len(context) + self._encoded
        self._use_costs(self._length)
        if self._rival is not None:
            self._rival.follow(context)

    def _use_costs(self, length: int) -> None:
        """Decide by the costs at about this context length."""
        length -= length % COST_STEP
        if length != self._costs.length:
            self._costs = self._table.at(length)
            self._draft_cost = self._costs.draft_cost(self._kind)

    def probability(self, bucket: Bucket) -> float:
        """The estimated acceptance probability of a draft in this bucket, given that all drafts before it are
        accepted.
        """
        priors = PRIORS[bucket[0]]
        prior = priors[min(bucket[1], len(priors) - 1)]
        accepted, verified = self._evidence.get(bucket, (0.0, 0.0))
        return min(MAX_PROBABILITY, (accepted + prior * PRIOR_WEIGHT) / (verified + PRIOR_WEIGHT))

    def cost(self, drafts: int) -> float:
        """What this many drafts add to a round."""
        computed = max(drafts, self._block) if drafts else 0
        return self._costs.verify_cost(drafts) + computed * self._draft_cost

    @property
    def never_drafts(self) -> bool:
        """Whether nothing can be drafted in this run: reading the prompt costs more than drafts can save in the longest
        run, or more than they may lose, which gains of another drafter may pay for, or a first draft, without which
        there will be no evidence, is not expected to pay at either end of the run.
        """
        most = self._max_new  # drafts save less than a decode step per token
        if self._reading >= most or (not self._shares and self._reading > LOSS * (self._prefill + most)):
            return True
        return most != inf and not self._evidence and not any(map(self._may_pay, (0, most)))

    def _may_pay(self, further: float) -> bool:
        """Whether a first draft is expected to pay after so many further tokens, whatever drafts may lose by then."""
        self._use_costs(self._length + int(further))
        best = max(self._values(_positions(0), is_bounded=False))
        self._use_costs(self._length)
        return best > 0

    @property
    def _reading(self) -> float:
        """What the drafter needs to read the text that it has not read yet."""
        return self._costs.reading_cost(self._kind, self._length - self._read)

    @property
    def _prefill(self) -> float:
        """The time of the target's prefill, in decode steps at this context length."""
        return self._table.prefill_cost(self._prompt) / self._costs.step

    @property
    def _made(self) -> int:
        """Number of new tokens so far."""
        return self._length - self._encoded - self._origin

    @property
    def _spare(self) -> float:
        """Decode steps that drafts may lose now."""
        if self._max_new == inf:
            return inf
        made = max(self._made, min(EXPECTED_TOKENS, self._max_new))
        return LOSS * (self._prefill + made) + self._throughput.gain

    @property
    def rate(self) -> float:
        """Tokens per decode step of the run so far."""
        return self._throughput.rate

    def best(self, buckets: Sequence[Bucket]) -> int:
        """How many of these drafts, all of them available, to propose."""
        if not buckets:
            return 0
        values = self._values(buckets)
        if self._rival is not None:
            values[0] = max(self._rival._values(_positions(0)))
        return values.index(max(values))

    def continues(self, buckets: Sequence[Bucket]) -> bool:
        """Whether to compute one more draft after those in these buckets, knowing only its position."""
        count = len(buckets)
        # Verify costs rise in steps: one more draft may not pay where several do, so all later stops are compared.
        values = self._values([*buckets, *_positions(count)])
        return max(values[count + 1 :]) > values[count]

    def proposes(self, buckets: Sequence[Bucket]) -> bool:
        """Whether the last draft, whose distribution is known by now, is worth a wider verify pass. Its own cost is
        already spent.
        """
        reached = 1.0
        for bucket in buckets:
            reached *= self.probability(bucket)
        count = len(buckets)
        # `reached` is the expected gain in tokens; the other side is what the run produces in the extra verify time.
        return reached > self.rate * (self._least_cost(count) - self._least_cost(count - 1))

    def _least_cost(self, drafts: int) -> float:
        """Of verify passes with at least this many drafts. Some kernels take longer for fewer rows."""
        return min(map(self._costs.verify_cost, range(drafts, drafts + LOOKAHEAD)))

    def _values(self, buckets: Sequence[Bucket], *, is_bounded: bool = True) -> list[float]:
        """The value of proposing 0, 1, ... drafts: expected tokens minus what the run generates in the same time.

        It is minus infinity if they might lose too much, unless that is not bounded.
        """
        # E[accepted]: with one probability a for all drafts, (1 - a^(g+1)) / (1 - a) - 1 (Leviathan et al. 2023).
        tokens, reached, rate = 0.0, 1.0, self.rate
        cautious, certain = 0.0, self.probability(ANY)
        left, reading, spare = max(1, self._max_new - self._made), self._reading, self._spare if is_bounded else inf
        if reading - certain / (1 - certain) > spare:  # too much for any number of drafts
            return [0.0] + [-inf] * len(buckets)
        values = [0.0]
        for count, bucket in enumerate(buckets, start=1):
            reached *= self.probability(bucket)
            tokens += reached
            cautious += certain**count
            cost = self.cost(count)
            # Reading is spread over the rounds that remain.
            value = tokens - MARGIN - rate * (cost + reading * (1 + tokens) / left)
            values.append(value if cost + reading - cautious <= spare else -inf)
        return values

    def learn(self, buckets: Sequence[Bucket], accepted: int, computed: int = 0) -> None:
        """Learn from a round: the buckets of its drafts, and how many were accepted.

        Drafts after the first rejected one carry no information. `computed` is the number of computed distributions, if
        it exceeds that of proposed ones.
        """
        self._evidence = {bucket: (DECAY * good, DECAY * tried) for bucket, (good, tried) in self._evidence.items()}
        for position, bucket in enumerate(buckets[: accepted + 1]):
            # Positions are counted as well: nothing else is known of a draft that is not yet computed.
            for known in (bucket, ("position", position), ANY):
                good, tried = self._evidence.get(known, (0.0, 0.0))
                self._evidence[known] = (good + (position < accepted), tried + 1)
        if buckets or computed or not self._shares:  # without drafts, another drafter may have had the round
            count = len(buckets)
            time = 1 + self._costs.verify_cost(count) + max(count, computed) * self._draft_cost
            self._throughput.add(accepted + 1, time)
        if buckets or computed:
            self._throughput.gain -= self._reading
            self._read = self._length


def _positions(count: int) -> list[Bucket]:
    """The buckets of drafts after so many, of which only the position is known."""
    return [("position", position) for position in range(count, count + LOOKAHEAD)]
