"""Drafts and who makes them: the Draft value, the Drafter protocol, and a model as a drafter.

The draft-verify loop sees only the protocol. A drafter keeps its own state (a cache, a storage) and is told after every round what became
of its draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from sampling.adaptive_gamma import DraftLength, Mark
from utils.decode.decoding import Decoding
from utils.decode.model_session import Session
from utils.decode.noise import Domain


@dataclass(frozen=True, slots=True)
class Draft:
    """tokens: k proposed ids. probs: the law (k, V) each was drawn from; None where that law is one-hot or plays no part in judging.

    What else is known of them, for whoever asks why (utils.metrics.draft_trace): said, the raw logits (1, V') that each was drawn by; matched, the
    number of tokens of context that each went by, 0 for none; runners_up, what was entered at every new position besides the text;
    unsent, how many more were worked out and not proposed; by, what kind of drafter has made them, where several take turns.
    """

    tokens: list[int]
    probs: Tensor | None = None
    said: Sequence[Tensor] = ()
    matched: Sequence[int] = ()
    runners_up: Sequence[Sequence[int]] = ()
    unsent: int = 0
    by: str = ""


NO_DRAFT = Draft([])


@dataclass(frozen=True, slots=True)
class Verified:
    """What the target said in a round that began at context length `start`: its raw logits and its processed law, both (k+1, V).

    features: the hidden states (T, F) of the rows fed since the last round, the last of them the last draft's; None where the target's
    session keeps none.
    """

    start: int
    logits: Tensor
    law: Tensor
    features: Tensor | None = None


class Drafter(Protocol):
    """Proposes tokens for the target to verify."""

    def begin(self, prompt: list[int], context: list[int]) -> None:
        """A new run: the prompt's ids, and the context new tokens will be appended to (another one for encoder-decoder targets)."""

    def propose(self, context: list[int], count: int) -> Draft:
        """At most `count` drafts for what follows the context; fewer, or none, is a fair answer."""

    def commit(self, context: list[int], verified: Verified) -> None:
        """The context as it stands after the round, and what the target said in it."""


class ModelDrafter:
    """A model that drafts by plain decoding under the target's own processor.

    session: the drafter model's own. vocab_size: the target's; q is cut or zero-filled to it, since vocabularies of one family differ in
    their padding. shares_noise: draw with the target's own noise, for the rule `coupled`. length: drafts no more than pay; without it as
    many as it is asked for. It declines from where its context ends, or where the text holds an id that it has no embedding for.
    """

    def __init__(
        self,
        session: Session,
        decoding: Decoding,
        vocab_size: int,
        *,
        shares_noise: bool = False,
        length: DraftLength | None = None,
    ) -> None:
        self._session, self._decoding, self._vocab_size = session, decoding, vocab_size
        self._shares_noise, self._length = shares_noise, length
        self._sent: tuple[list[int], list[Mark], int] | None = (
            None  # drafts, their marks, and how many were computed; None: not asked
        )
        self._known = min(vocab_size, session.vocab_size)
        self._origin = 0  # context length at which the new tokens begin
        self._readable = True

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._origin = len(context)
        bound = self._session.context_length
        self._readable = max(prompt) < self._session.vocab_size and (bound is None or len(prompt) < bound)
        if self._readable:
            self._session.begin(prompt)

    def propose(self, context: list[int], count: int) -> Draft:
        self._sent = [], [], 0
        room = self._session.room(context)
        count = count if room is None else min(count, room)
        if count < 1 or not self._readable:
            return NO_DRAFT
        start = len(context) - self._origin
        tokens: list[int] = []
        laws: list[Tensor] = []
        said: list[Tensor] = []
        marks: list[Mark] = []
        length, computed = self._length, 0
        while len(tokens) < count and (length is None or length.goes_on(marks)):
            logits = self._session.feed(context + tokens, keep=1)[:, : self._known]
            computed += 1
            law = self._decoding.law(logits, self._session.name)[0]  # q, (V,)
            if length is not None:
                marks.append(_sureness(logits))
                if not length.sends(marks):  # seen in the law, before a token is drawn from it
                    marks.pop()
                    break
            laws.append(law)
            # A row of its own: some models compute logits of all that they are fed, and a view would hold them.
            said.append(logits.clone() if logits.untyped_storage().nbytes() > logits.nbytes else logits)
            tokens.append(self._draw(laws[-1], start + len(tokens), start))
        self._sent = tokens, marks, computed
        if self._shares_noise or not tokens:
            # Drawn with noise that the judge draws with again: p/q on top of it would be biased.
            return Draft(tokens, said=said, unsent=computed - len(tokens))
        probs = torch.stack(laws)
        missing = self._vocab_size - self._known
        return Draft(tokens, pad(probs, (0, missing)) if missing else probs, said, unsent=computed - len(tokens))

    def _draw(self, law: Tensor, position: int, start: int) -> int:
        noise = self._decoding.noise
        return noise.sample(law, position) if self._shares_noise else noise.pick(law, Domain.DRAFT, position, start)

    def commit(self, context: list[int], verified: Verified) -> None:
        self._readable = self._readable and max(context[verified.start :]) < self._session.vocab_size
        if self._length is not None and self._sent is not None:
            tokens, marks, computed = self._sent
            self._length.learn(marks, agreed(tokens, context[verified.start :]), computed)
            self._sent = None
        self._session.rewind(len(context) - 1)


def agreed(drafted: Sequence[int], text: Sequence[int]) -> int:
    """How many drafts, from the front, became text."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafted, text, strict=False)))


def _sureness(logits: Tensor) -> Mark:
    """Of logits (1, V): how much the likeliest token has at temperature 1, in eighths."""
    return "sure", min(7, int(8 * torch.softmax(logits, dim=-1).max().item()))
