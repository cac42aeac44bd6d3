"""A model as a drafter, and a chain of two drafters."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from sampling.drafters.adaptive_gamma import AdaptiveGamma, Bucket
from utils.decode.decoding import Decoding
from utils.decode.drafts import NO_DRAFT, Draft, Drafter, DraftEvidence, Verified
from utils.decode.noise import Domain
from utils.decode.session import Session
from utils.decode.steps import matching_prefix
from utils.logits_processor import one_thread


class ModelDrafter:
    """Drafts autoregressively under the target's own processor.

    `session` is the drafter model's. `vocab_size` is the target's; q is cut or zero-padded to it, because vocabularies
    of one family differ in their padding. `shares_noise` draws with the target's own noise, for the rule `coupled`.
    `adaptive` chooses the number of drafts; without it, as many as requested are drafted. With `observed`, drafts carry
    the logits that they were drawn from. `block` is the number of drafts in a pass of the session. It declines once its
    context is full, or if the text has an id outside its vocabulary.
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
    ) -> None:
        self._session, self._decoding, self._vocab_size, self._block = session, decoding, vocab_size, block
        self._shares_noise, self._adaptive, self._observed = shares_noise, adaptive, observed
        # The round's drafts, their buckets, and how many distributions were computed. None: `propose` was not called.
        self._round: tuple[list[int], list[Bucket], int] | None = None
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
        self._round = [], [], 0
        if self._adaptive is not None:
            self._adaptive.follow(context)
        room = self._session.room(context)
        count = count if room is None else min(count, room)
        if count < 1 or not self._readable:
            return NO_DRAFT
        start = len(context) - self._origin
        tokens: list[int] = []
        rows: list[Tensor] = []  # q of each draft, (V,)
        seen: list[Tensor] = []
        buckets: list[Bucket] = []
        adaptive, grammar, computed = self._adaptive, self._decoding.grammar, 0
        while len(tokens) < count and (adaptive is None or adaptive.continues(buckets)):
            # Cut before the processor, so that q is normalised over the ids that both models have.
            logits = self._session.feed(context + tokens, keep=1)[:, : self._shared_vocab]
            computed = max(computed + 1, self._block)
            if grammar is not None:
                logits = grammar.masked(logits, (context + tokens)[self._origin :])
                if logits.isinf().all():  # the drafter's vocabulary ends before all that is allowed
                    break
            q = self._decoding.probs(logits, self._session.name)[0]
            if adaptive is not None:
                confidence = self._confidence(context + tokens, logits)
                buckets.append(("confidence", min(7, int(8 * confidence))))  # in eighths
                if not adaptive.proposes(buckets):  # decided by the distribution, before a token is drawn from it
                    buckets.pop()
                    break
            rows.append(q)
            if self._observed:
                seen.append(logits.clone())  # a view would keep the logits of everything that was fed
            tokens.append(self._draw(q, start + len(tokens), start))
        self._round = tokens, buckets, computed
        evidence = DraftEvidence(logits=seen) if self._observed else None
        return Draft(tokens, self._probs(rows), computed - len(tokens), evidence=evidence)

    @one_thread()
    def _confidence(self, context: list[int], logits: Tensor) -> float:
        """How likely the draft after this context is to be accepted: the highest probability of its logits (1, V) at
        temperature 1. It must not depend on the token that is drawn.
        """
        return float(torch.softmax(logits, dim=-1).max().item())

    @one_thread()
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
        text = context[verified.start :]
        self._readable = self._readable and max(text) < self._session.vocab_size
        if self._adaptive is not None and self._round is not None:
            tokens, buckets, computed = self._round
            self._adaptive.learn(buckets, matching_prefix(tokens, text[verified.forced :]), computed)
            self._round = None
        self._session.rewind(len(context) - 1)


class ChainDrafter:
    """Drafts with a first drafter, and with a second one if the first has no drafts.

    The first one usually costs almost nothing. `kinds` are their names, which label drafts.

    The choice depends on the text so far alone, so no verification rule is biased.
    """

    def __init__(self, first: Drafter, second: Drafter, *, kinds: tuple[str, str] = ("", "")) -> None:
        self._first, self._second, self._kinds = first, second, kinds

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._first.begin(prompt, context)
        self._second.begin(prompt, context)

    def propose(self, context: list[int], count: int) -> Draft:
        draft = self._first.propose(context, count)
        if draft.tokens:
            return replace(draft, kind=self._kinds[0])
        return replace(self._second.propose(context, count), kind=self._kinds[1])

    def commit(self, context: list[int], verified: Verified) -> None:
        # Both, whichever drafted: each keeps a cache or a storage of the whole text.
        self._first.commit(context, verified)
        self._second.commit(context, verified)
