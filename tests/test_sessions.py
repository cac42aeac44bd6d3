"""What a session computes: no more than its cache lacks, an encoder once, and no recurrent state that would have to go back."""

import pytest
from tiny import tiny_llama, tiny_mamba, tiny_t5

from ngram_assisted import NGramDrafter, NGramStorage, ngram_assisted_speculative_generate
from sampling import (
    autoregressive_generate,
    speculative_generate,
    speculative_steps,
)
from utils.caching import ModelSession
from utils.decoding import Decoding
from utils.errors import UserError


def test_each_feed_computes_only_what_the_cache_lacks() -> None:
    """Prefill once, then one row per plain step and gamma + 1 rows (at most one more) per round."""
    widths: list[tuple[int, int]] = []
    model = tiny_llama()
    model.register_forward_hook(
        lambda module, args, kwargs, output: widths.append((kwargs["input_ids"].shape[1], output.logits.shape[1])), with_kwargs=True
    )
    autoregressive_generate([1] * 9, model, 5, eos_tokens_id=-1)
    assert widths == [(9, 1), (1, 1), (1, 1), (1, 1), (1, 1)]
    widths.clear()
    plan = Decoding.of(None, 12, end_ids=None, seed=0)
    drafter = NGramDrafter(NGramStorage(2, 64), plan.noise, stop_if_unknown=False)
    list(speculative_steps([1] * 9, drafter, ModelSession(model), plan, gamma=3))
    assert widths[0] == (12, 4)
    assert all(rows == kept <= 4 for rows, kept in widths[1:])


def test_an_encoder_runs_once() -> None:
    model, calls = tiny_t5(), []
    model.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    autoregressive_generate([1, 2, 3], model, 6, eos_tokens_id=-1)
    assert len(calls) == 1


def test_a_recurrent_cache_is_refused_before_the_first_token_with_the_remedy() -> None:
    model = tiny_mamba()
    with pytest.raises(UserError, match="recurrent.*use_cache=False"):
        speculative_generate([1, 2], model, model)
    with pytest.raises(UserError, match="recurrent"):
        ngram_assisted_speculative_generate([1, 2], NGramStorage(2, 64), model)
    expected = autoregressive_generate([1, 2], model, 6, eos_tokens_id=-1)
    assert speculative_generate([1, 2], model, model, max_gen_len=6, eos_tokens_id=-1, use_cache=False)[0] == expected
