"""A drafter with another tokenizer: it reads the text so far in its own words, and what it says is read in the target's.

Known as universal assisted decoding (Timor et al. 2025, arXiv 2502.05202, and the assisted generation of transformers). Drafts are what the
drafter finds likeliest, told as text; the target judges them as it judges n-grams, so that no rule is biased whatever is lost on the way.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from sampling.adaptive_gamma import DraftLength, Mark
from sampling.drafters.model import NO_DRAFT, Draft, Verified, agreed
from utils.decode.model_session import ModelSession

TAIL = 16  # tokens of the target's before a draft, among which its first may merge
BROKEN = "\N{REPLACEMENT CHARACTER}"  # stands for part of a character


class Translation:
    """ours: the target's tokenizer. theirs: the drafter's."""

    def __init__(self, ours: Any, theirs: Any) -> None:
        self._ours, self._theirs = ours, theirs
        self.endings = frozenset(theirs.all_special_ids)

    def heard(self, context: Sequence[int]) -> list[int]:
        """The target's ids as the drafter reads them."""
        ids: list[int] = self._theirs(self._ours.decode(context))["input_ids"]
        return ids[:-1] if ids and ids[-1] == self._theirs.eos_token_id else ids

    def said(self, context: Sequence[int], heard: Sequence[int], new: Sequence[int]) -> list[int]:
        """The drafter's new ids as the target would write them behind its context."""
        before, after = self._theirs.decode(heard), self._theirs.decode([*heard, *new])
        text = after[len(before) :].rstrip(BROKEN)
        tail = self._ours.decode(context[-TAIL:])
        start, whole = (self._ours(part, add_special_tokens=False)["input_ids"] for part in (tail, tail + text))
        return list(whole[len(start) :]) if whole[: len(start)] == start and after.startswith(before) else []


class TranslatedDrafter:
    """opened: a new session of the drafter's own. length: drafts no more than pay, by place alone: nobody knows what will be one token."""

    def __init__(
        self,
        opened: Callable[[], ModelSession],
        translation: Translation,
        vocab_size: int,
        *,
        length: DraftLength | None = None,
    ) -> None:
        self._opened, self._translation, self._vocab_size = opened, translation, vocab_size
        self._length = length
        self._session = opened()
        self._read: list[int] = []  # the drafter's ids that its cache may hold, and how many of them were text
        self._firm = 0
        self._sent: tuple[list[int], list[Mark], int] = [], [], 0

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._renew()

    def _renew(self) -> None:
        self._session, self._read, self._firm = self._opened(), [], 0
        self._session.begin([0])  # what it reads is told round by round

    def propose(self, context: list[int], count: int) -> Draft:
        self._sent = [], [], 0
        if self._length is not None:
            count = self._length.best([("place", place) for place in range(count)])
        heard = self._translation.heard(context)
        room = self._session.room(heard) if heard else 0
        count = count if room is None else min(count, room)
        if count < 1 or max(heard) >= self._session.vocab_size:
            return NO_DRAFT
        said = self._likeliest(heard, count)
        drafts = self._translation.said(context, heard, said)[:count] if said else []
        drafts = list(takewhile(lambda token: token < self._vocab_size, drafts))
        self._sent = drafts, [("place", place) for place in range(len(drafts))], len(said)
        return Draft(drafts, unsent=max(0, len(said) - len(drafts)))

    def _likeliest(self, heard: list[int], count: int) -> list[int]:
        same = min(agreed(self._read, heard), len(heard) - 1)
        if same < self._firm and _has_windows(
            self._session.model
        ):  # text that it read is written otherwise now, and may be out of sight
            self._renew()
        self._session.rewind(same)
        self._firm = len(heard)
        said: list[int] = []
        while len(said) < count:
            token = int(self._session.feed([*heard, *said], keep=1)[0].argmax())
            if token in self._translation.endings:
                break
            said.append(token)
        self._read = [*heard, *said[:-1]]
        return said

    def commit(self, context: list[int], verified: Verified) -> None:
        drafts, marks, computed = self._sent
        if self._length is not None:
            self._length.learn(marks, agreed(drafts, context[verified.start :]), computed)
        self._sent = [], [], 0


def _has_windows(model: Any) -> bool:
    return getattr(model.config.get_text_config(decoder=True), "sliding_window", None) is not None
