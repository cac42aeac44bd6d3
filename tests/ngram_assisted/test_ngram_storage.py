"""The storages against a brute-force counter, and what the drafter enters into them."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_llama

from ngram_assisted import NGramDrafter, NGramStorage, OneLevelNGramStorage, ngram_assisted_speculative_generate
from sampling import autoregressive_generate, speculative_steps
from utils.decode.decoding import Decoding
from utils.decode.model_session import ModelSession
from utils.errors import UserError

TOKENS = st.integers(0, 4)
UPDATES = st.lists(st.tuples(st.lists(TOKENS, max_size=6), st.lists(TOKENS, max_size=4)), max_size=25)


def brute_force(entries: list[tuple[list[int], int]], context: Sequence[int], sizes: Sequence[int]) -> int | None:
    """The next token by counting all entries: longest context first, highest count, then first seen."""
    for size in sizes:
        if size > len(context):
            continue
        wanted = list(context[len(context) - size :])
        followers = [token for seen, token in entries if len(seen) >= size and seen[len(seen) - size :] == wanted]
        if followers:
            return max(
                dict.fromkeys(followers), key=followers.count
            )  # dict keeps first-seen order, max keeps the first
    return None


@given(n=st.integers(2, 5), prompt=st.lists(TOKENS, max_size=12), updates=UPDATES, query=st.lists(TOKENS, max_size=6))
@pytest.mark.parametrize("storage_class", [NGramStorage, OneLevelNGramStorage])
def test_next_tokens_equal_the_brute_force_counter(
    storage_class, n: int, prompt: list, updates: list, query: list
) -> None:
    storage = storage_class(n, 5)
    storage.initialize(prompt)
    entries = [(prompt[:index], prompt[index]) for index in range(1, len(prompt))]
    sizes = range(n - 1, 0, -1) if storage_class is NGramStorage else [n - 1]
    for context, followers in updates:
        storage.update(context, followers)
        entries += [(context, token) for token in followers]
        assert storage.next_token(query) == brute_force(entries, query, sizes)
    assert storage.next_token(query) == brute_force(entries, query, sizes)
    for size in range(1, len(query) + 1):
        gram = query[:size]
        known = size - 1 in sizes and any(
            len(seen) >= size - 1 and seen[len(seen) - size + 1 :] == gram[:-1] and token == gram[-1]
            for seen, token in entries
        )
        assert storage.has_gram(gram) == known
    storage.reset()
    assert storage.next_token(query) is None


def test_the_longest_known_context_decides() -> None:
    storage = NGramStorage(3, 10)
    storage.initialize([1, 2, 3, 9, 2, 4, 9, 2, 4])
    assert storage.next_token([1, 2]) == 3
    assert storage.next_token([7, 2]) == 4
    assert storage.next_token([2]) == 4
    assert storage.next_token([8]) is None
    assert storage.next_token([]) is None


def test_order_two_uses_one_token_of_context() -> None:
    storage = NGramStorage(2, 10)
    storage.initialize([5, 6])
    assert storage.next_token([0, 5]) == 6


def test_one_level_stores_its_own_order_only() -> None:
    storage = OneLevelNGramStorage(3, 10)
    storage.initialize([1, 2, 3])
    assert storage.next_token([1, 2]) == 3
    assert storage.next_token([2]) is None
    assert storage.has_gram([1, 2, 3]) and not storage.has_gram([1, 2])


def test_the_first_seen_token_wins_a_tie() -> None:
    storage = NGramStorage(2, 10)
    for token in (4, 7, 7, 4):
        storage.update([1], [token])
    assert storage.next_token([1]) == 4
    storage.update([1], [7])
    assert storage.next_token([1]) == 7


def test_initialize_adds_and_reset_empties() -> None:
    storage = NGramStorage(3, 10)
    storage.initialize([1, 2])
    storage.initialize([3, 4])
    assert (storage.next_token([1]), storage.next_token([3])) == (2, 4)
    storage.reset()
    assert storage.next_token([1]) is None


@pytest.mark.parametrize(("n", "size"), [(1, 5), (17, 5), (3, 0)])
def test_orders_and_sizes_out_of_range_are_refused(n: int, size: int) -> None:
    with pytest.raises(UserError):
        NGramStorage(n, size)


def test_tokens_outside_the_vocabulary_are_refused_and_nothing_is_entered() -> None:
    storage = NGramStorage(2, 5)
    with pytest.raises(UserError, match=r"\b5\b.*\b4\b"):
        storage.update([1], [2, 5])
    assert storage.next_token([1]) is None


class Recorder(NGramStorage):
    """Records what is entered."""

    def __init__(self, n: int, vocab_size: int) -> None:
        super().__init__(n, vocab_size)
        self.calls: list[tuple[list[int], list[int]]] = []
        self.resets = 0
        self.prompts: list[list[int]] = []

    def initialize(self, ids: Sequence[int]) -> None:
        self.prompts.append(list(ids))
        super().initialize(ids)

    def update(self, ids: Sequence[int], next_tokens: list[int]) -> None:
        self.calls.append((list(ids), list(next_tokens)))
        super().update(ids, next_tokens)

    def reset(self) -> None:
        self.resets += 1
        super().reset()


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("first_target", [True, False])
def test_each_position_enters_its_token_and_the_targets_runners_up_once(top_k: int, first_target: bool) -> None:
    import torch

    model, prompt, storage = tiny_llama(), [3, 9, 3, 9, 4], Recorder(3, 64)
    made, _ = ngram_assisted_speculative_generate(
        prompt,
        storage,
        model,
        gamma=4,
        filler_top_k=top_k,
        max_gen_len=15,
        eos_tokens_id=-1,
        first_target=first_target,
        stop_if_unknown=True,
    )
    text = prompt + made
    with torch.no_grad():
        best = model(torch.tensor([text])).logits[0].topk(top_k).indices.tolist()
    entered = storage.calls
    assert storage.prompts == [prompt]
    assert len(entered) == len(made)
    for index, (context, followers) in enumerate(entered, start=len(prompt)):
        assert context == text[max(0, index - 2) : index]
        assert (
            followers == [text[index], *(token for token in best[index - 1] if token != text[index])][: len(followers)]
        )
        assert len(followers) == top_k  # under greedy the generated token is among the top k
    assert storage.resets == 0


def test_a_storage_is_kept_between_calls() -> None:
    model, storage = tiny_llama(), NGramStorage(3, 64)
    arguments = {"gamma": 4, "max_gen_len": 20, "eos_tokens_id": -1, "filler_top_k": 1, "stop_if_unknown": True}
    first, _ = ngram_assisted_speculative_generate([1, 2, 3], storage, model, **arguments)
    second, rate = ngram_assisted_speculative_generate([1, 2, 3], storage, model, **arguments)
    assert first == second and rate > 0.5


def test_drafts_after_unknown_contexts_come_from_the_seed() -> None:
    def drafts(seed: int) -> list[tuple[int, ...]]:
        plan = Decoding.of(None, 9, end_ids=None, seed=seed)
        drafter = NGramDrafter(NGramStorage(3, 64), plan.noise, stop_if_unknown=False, filler_top_k=1)
        return [step.drafted for step in speculative_steps([1], drafter, ModelSession(tiny_llama()), plan, gamma=3)]

    assert drafts(1) == drafts(1) != drafts(2)
    assert len({token for draft in drafts(1) for token in draft}) > 5


@pytest.mark.parametrize("size", [60, 70])
@pytest.mark.parametrize("stop_if_unknown", [True, False])
def test_the_storages_vocabulary_may_be_larger_or_smaller(size: int, stop_if_unknown: bool) -> None:
    """Padded vocabularies: ids that only the storage or only the target has are neither drafted nor entered."""
    model = tiny_llama()
    expected = autoregressive_generate([1, 2, 3], model, 30, eos_tokens_id=-1)
    storage = NGramStorage(2, size)
    if size > 64:
        storage.update([3], [69])
        storage.update([expected[0]], [66, 66])
    made, _ = ngram_assisted_speculative_generate(
        [1, 2, 3],
        storage,
        model,
        max_gen_len=30,
        eos_tokens_id=-1,
        first_target=False,
        stop_if_unknown=stop_if_unknown,
        filler_top_k=64,
    )
    assert made == expected


@pytest.mark.parametrize("top_k", [0, 65])
def test_fillers_out_of_range_are_refused(top_k: int) -> None:
    with pytest.raises(UserError, match="filler_top_k"):
        ngram_assisted_speculative_generate([1], NGramStorage(2, 64), tiny_llama(), filler_top_k=top_k)
