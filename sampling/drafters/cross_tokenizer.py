"""A drafter model with a different tokenizer: the text so far is retokenized for it, and its drafts are retokenized
for the target.

Known as universal assisted decoding (Timor et al. 2025, arXiv 2502.05202; assisted generation in transformers).
Drafts are the drafter's greedy tokens. The target verifies them like n-grams, so no rule is biased by what
retokenization loses.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from sampling.drafters.adaptive_gamma import AdaptiveGamma, Bucket
from utils.decode.drafts import NO_DRAFT, Draft, Verified
from utils.decode.model_session import ModelSession
from utils.decode.steps import matching_prefix

TAIL = 16  # target tokens before a draft, with which its first token may merge
BROKEN = "\N{REPLACEMENT CHARACTER}"  # stands for part of a character


class Retokenizer:
    """Translates token ids between the target's tokenizer and the drafter's."""

    def __init__(self, target: Any, drafter: Any) -> None:
        self._target, self._drafter = target, drafter
        self.end_ids = frozenset(drafter.all_special_ids)

    def to_drafter(self, context: Sequence[int]) -> list[int]:
        """The target's context in the drafter's ids."""
        ids: list[int] = self._drafter(self._target.decode(context))["input_ids"]
        # Some tokenizers append an end token, but the text continues.
        return ids[:-1] if ids and ids[-1] == self._drafter.eos_token_id else ids

    def to_target(self, context: Sequence[int], read: Sequence[int], new: Sequence[int]) -> list[int]:
        """The drafter's new ids, which follow `read`, in the target's ids after its context. Empty if they do not
        join cleanly.
        """
        # Decoded with what precedes: alone, the new ids may lose a leading blank or half a character.
        before, after = self._drafter.decode(read), self._drafter.decode([*read, *new])
        text = after[len(before) :].rstrip(BROKEN)
        tail = self._target.decode(context[-TAIL:])
        start, joined = (self._target(part, add_special_tokens=False)["input_ids"] for part in (tail, tail + text))
        # If the tail is tokenized differently with this text, the ids do not continue those of the target.
        joins = joined[: len(start)] == start and after.startswith(before)
        return list(joined[len(start) :]) if joins else []


class CrossTokenizerDrafter:
    """Drafts greedily with a model whose tokenizer differs from the target's.

    `new_session` opens a session of the drafter. `adaptive` chooses the number of drafts, by position alone, because
    the number of target tokens is not known in advance.
    """

    def __init__(
        self,
        new_session: Callable[[], ModelSession],
        retokenizer: Retokenizer,
        vocab_size: int,
        *,
        adaptive: AdaptiveGamma | None = None,
    ) -> None:
        self._new_session, self._retokenizer, self._vocab_size = new_session, retokenizer, vocab_size
        self._adaptive = adaptive
        self._session = new_session()
        self._fed: list[int] = []  # the drafter's ids that its cache may hold
        self._text_length = 0  # how many of them were text, not drafts
        self._round: tuple[list[int], list[Bucket], int] = [], [], 0

    def begin(self, prompt: list[int], context: list[int]) -> None:
        if self._adaptive is not None:
            self._adaptive.begin(prompt, context)
        self._restart()

    def _restart(self) -> None:
        self._session, self._fed, self._text_length = self._new_session(), [], 0
        self._session.begin([0])  # the text is fed round by round

    def propose(self, context: list[int], count: int) -> Draft:
        self._round = [], [], 0
        if self._adaptive is not None:
            self._adaptive.follow(context)
            count = self._adaptive.best([("position", position) for position in range(count)])
        if count < 1:
            return NO_DRAFT
        read = self._retokenizer.to_drafter(context)
        room = self._session.room(read) if read else 0
        count = count if room is None else min(count, room)
        if count < 1 or max(read) >= self._session.vocab_size:  # ids without an embedding
            return NO_DRAFT
        new = self._greedy(read, count)
        drafts = self._retokenizer.to_target(context, read, new)[:count] if new else []
        # The target's tokenizer may know ids for which its model has no logits.
        drafts = list(takewhile(lambda token: token < self._vocab_size, drafts))
        self._round = drafts, [("position", position) for position in range(len(drafts))], len(new)
        return Draft(drafts, withheld=max(0, len(new) - len(drafts)))

    def _greedy(self, read: list[int], count: int) -> list[int]:
        """At most `count` greedy tokens after `read`."""
        # The last token is fed again even if it is cached: its logits are needed.
        same = min(matching_prefix(self._fed, read), len(read) - 1)
        # Text that was fed is tokenized differently now, and a sliding window may have dropped what precedes it.
        config = self._session.model.config.get_text_config(decoder=True)
        if same < self._text_length and getattr(config, "sliding_window", None) is not None:
            self._restart()
        self._session.rewind(same)
        self._text_length = len(read)
        new: list[int] = []
        while len(new) < count:
            token = int(self._session.feed([*read, *new], keep=1)[0].argmax())
            if token in self._retokenizer.end_ids:
                break
            new.append(token)
        # The last draft was not fed, unless an end token was drawn after it.
        self._fed = [*read, *new[:-1]]
        return new

    def commit(self, context: list[int], verified: Verified) -> None:
        drafts, buckets, computed = self._round
        if self._adaptive is not None:
            self._adaptive.learn(buckets, matching_prefix(drafts, context[verified.drafted_from :]), computed)
        self._round = [], [], 0
