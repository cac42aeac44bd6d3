"""The model behind most sessions of the tests behaves as a transformers model with a cache."""

import torch
from fakes import table_model

from sampling import speculative_generate
from utils.decode.model_session import ModelSession

TEXT = [5, 9, 13, 9, 5, 9, 13, 2, 40, 5, 9]


def test_logits_have_the_same_bits_with_and_without_a_cache_at_every_width() -> None:
    model = table_model(0, vocab_size=64)
    whole = ModelSession(model, use_cache=False).feed(TEXT, keep=6)
    session = ModelSession(model)
    for width in (1, 2, 3):
        rows = session.feed([*TEXT[: 5 + width], 7, 7], keep=width + 2)[:width]
        session.rewind(5)
        assert torch.equal(rows, whole[:width])


def test_a_wrong_rewind_changes_the_logits() -> None:
    session = ModelSession(table_model(0, vocab_size=64))
    right = session.feed(TEXT, keep=1)
    session.feed([*TEXT, 7, 7], keep=2)
    session.rewind(len(TEXT) - 1)
    assert torch.equal(session.feed(TEXT, keep=1), right)
    session.feed([*TEXT, 7, 7], keep=2)
    session._cached = len(TEXT) - 1  # the cache still holds two drafts
    assert not torch.equal(session.feed(TEXT, keep=1), right)


def test_greedy_texts_are_those_of_generate_and_some_drafts_are_accepted() -> None:
    target, drafter = (table_model(seed, vocab_size=64) for seed in range(2))
    theirs = target.generate(torch.tensor([TEXT]), max_new_tokens=40, do_sample=False)[0, len(TEXT) :].tolist()
    ours, rate = speculative_generate(TEXT, drafter, target, gamma=3, max_gen_len=40, eos_tokens_id=-1)
    assert ours == theirs and 0 < rate < 1
