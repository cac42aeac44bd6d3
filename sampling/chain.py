"""Two drafters in a row: the second drafts where the first one declines."""

from sampling.drafting import Draft, Drafter, Verified


class ChainDrafter:
    """first: asked first, usually one that costs next to nothing. Who drafts depends on the text so far alone: no rule minds."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._first, self._second = first, second

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._first.begin(prompt, context)
        self._second.begin(prompt, context)

    def propose(self, context: list[int], count: int) -> Draft:
        draft = self._first.propose(context, count)
        return draft if draft.tokens else self._second.propose(context, count)

    def commit(self, context: list[int], verified: Verified) -> None:
        self._first.commit(context, verified)
        self._second.commit(context, verified)
