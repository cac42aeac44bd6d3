"""Two drafters in a row: the second drafts where the first one declines."""

from dataclasses import replace

from sampling.drafters.model import Draft, Drafter, Verified


class ChainDrafter:
    """first: asked first, usually one that costs next to nothing. Who drafts depends on the text so far alone: no rule minds.

    kinds: of the two, which drafts are marked with.
    """

    def __init__(self, first: Drafter, second: Drafter, *, kinds: tuple[str, str] = ("", "")) -> None:
        self._first, self._second, self._kinds = first, second, kinds

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._first.begin(prompt, context)
        self._second.begin(prompt, context)

    def propose(self, context: list[int], count: int) -> Draft:
        draft = self._first.propose(context, count)
        if draft.tokens:
            return replace(draft, by=self._kinds[0])
        return replace(self._second.propose(context, count), by=self._kinds[1])

    def commit(self, context: list[int], verified: Verified) -> None:
        self._first.commit(context, verified)
        self._second.commit(context, verified)
