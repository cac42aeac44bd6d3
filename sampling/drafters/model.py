"""A model as a drafter."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from sampling.adaptive_gamma import AdaptiveGamma, Bucket
from sampling.combs import Comb, Place
from utils.decode.decoding import Decoding
from utils.decode.drafts import NO_DRAFT, Draft, DraftEvidence, Verified, matching_prefix
from utils.decode.noise import Domain
from utils.decode.session import Session
from utils.decode.steps import Leaf


@dataclass(slots=True)
class Round:
    """The drafts of a round, their buckets, what leaves are chosen from, the leaves, and how many distributions were
    computed.
    """

    tokens: list[int] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    leaves: tuple[Leaf, ...] = ()
    computed: int = 0


class ModelDrafter:
    """Drafts autoregressively under the target's own processor.

    session: the drafter model's. vocab_size: the target's; q is cut or zero-padded to it, since vocabularies of one
    family differ in their padding. shares_noise: draw with the target's own noise, for the rule `coupled`. adaptive:
    chooses the number of drafts; without it, as many as requested are drafted. observed: whether drafts carry the
    logits they were drawn from. block: how many drafts a pass of the session gives. comb: chooses leaves beside the
    drafts. It declines once its context is full, or if the text holds an id outside its vocabulary.
    """

    def __init__(
        self,
        session: Session,
        decoding: Decoding,
        vocab_size: int,
        *,
        shares_noise: bool = False,
        adaptive: AdaptiveGamma | None = None,
        observed: bool = False,
        block: int = 1,
        comb: Comb | None = None,
    ) -> None:
        self._session, self._decoding, self._vocab_size, self._block = session, decoding, vocab_size, block
        self._comb = comb
        self._shares_noise, self._adaptive, self._observed = shares_noise, adaptive, observed
        self._round: Round | None = None  # None: not asked this round
        self._shared_vocab = min(vocab_size, session.vocab_size)
        self._origin = 0  # context length at which the new tokens begin
        self._readable = True

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._origin = len(context)
        if self._adaptive is not None:
            self._adaptive.begin(prompt, context)
        bound = self._session.context_length
        # `begin` would raise for such a prompt, but the target can still decode it without drafts.
        self._readable = max(prompt) < self._session.vocab_size and (bound is None or len(prompt) < bound)
        if self._readable:
            self._session.begin(prompt)

    def propose(self, context: list[int], count: int) -> Draft:
        self._round = Round()
        for chooser in (self._adaptive, self._comb):
            if chooser is not None:
                chooser.follow(context)
        room = self._session.room(context)
        count = count if room is None else min(count, room)
        if count < 1 or not self._readable:
            return NO_DRAFT
        start = len(context) - self._origin
        tokens, buckets = self._round.tokens, self._round.buckets
        rows: list[Tensor] = []  # q of each draft, (V,)
        seen: list[Tensor] = []
        adaptive, computed = self._adaptive, 0
        while len(tokens) < count and (adaptive is None or adaptive.continues(buckets)):
            # Cut before the processor, so that q is normalised over the ids that both models have.
            logits = self._session.feed(context + tokens, keep=1)[:, : self._shared_vocab]
            computed = max(computed + 1, self._block)
            q = self._decoding.probs(logits, self._session.name)[0]
            if adaptive is not None or self._comb is not None:
                buckets.append(_bucket(self._confidence(context + tokens, logits)))
            if adaptive is not None and not adaptive.proposes(buckets):
                buckets.pop()  # decided by the distribution, before a token is drawn from it
                break
            rows.append(q)
            if self._observed:
                seen.append(logits.clone())  # a view would keep the logits of everything that was fed
            tokens.append(self._draw(q, start + len(tokens), start))
            if self._comb is not None:
                self._round.places.append(Place.of(tokens[-1], buckets[-1], q, logits[0]))
        self._round.computed = computed
        evidence = DraftEvidence(logits=seen) if self._observed else None
        if self._comb is not None:
            self._round.leaves = self._comb.leaves(self._round.places, start)
        return Draft(tokens, self._probs(rows), computed - len(tokens), evidence=evidence, leaves=self._round.leaves)

    def _confidence(self, context: list[int], logits: Tensor) -> float:
        """How likely the draft after this context is to be accepted: the highest probability of its logits (1, V) at
        temperature 1. It must not depend on the token that is drawn.
        """
        return float(torch.softmax(logits, dim=-1).max().item())

    def _probs(self, rows: list[Tensor]) -> Tensor | None:
        """q as (k, V). None if the drafts share the target's noise: accepting by p/q on top of that would be biased."""
        if self._shares_noise or not rows:
            return None
        missing = self._vocab_size - self._shared_vocab
        probs = torch.stack(rows)
        return pad(probs, (0, missing)) if missing else probs

    def _draw(self, q: Tensor, position: int, start: int) -> int:
        noise = self._decoding.noise
        return noise.sample(q, position) if self._shares_noise else noise.pick(q, Domain.DRAFT, position, start)

    def commit(self, context: list[int], verified: Verified) -> None:
        text, last = context[verified.start :], self._round
        self._readable = self._readable and max(text) < self._session.vocab_size
        accepted = 0
        if last is not None:
            accepted = matching_prefix(last.tokens, text)
            self._learn(last, accepted, text)
        self._round = None
        # What follows the accepted drafts of the chain was not fed, or a rejected draft in its place.
        self._session.rewind(min(verified.start + accepted, len(context) - 1))

    def _learn(self, last: Round, accepted: int, text: list[int]) -> None:
        if self._comb is not None:
            self._comb.learn(last.places, last.leaves, text, computed=last.computed)
        if self._adaptive is not None:
            leaf = len(text) > accepted + 1  # a bonus token follows, so the token after the drafts was a leaf
            self._adaptive.learn(last.buckets, accepted, last.computed, leaves=len(last.leaves), leaf=leaf)


def _bucket(confidence: float) -> Bucket:
    """A confidence in eighths."""
    return "confidence", min(7, int(8 * confidence))
