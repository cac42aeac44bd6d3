"""Two drafters in a row: the second drafts when the first declines."""

from dataclasses import replace

from utils.decode.drafts import Draft, Drafter, Verified


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
