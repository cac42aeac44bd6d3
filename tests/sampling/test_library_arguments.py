"""Arguments of the library functions, and the errors for invalid ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tiny import tiny_llama, tiny_t5
from toys import PATH, ToyModel, chain, decoding, session

from ngram_assisted import NGramStorage, ngram_assisted_speculative_generate
from sampling import (
    BeamWidth,
    ModelDrafter,
    autoregressive_generate,
    autoregressive_steps,
    beam_search_generate,
    beam_search_steps,
    speculative_generate,
    speculative_steps,
)
from sampling.debug import traced
from utils.decode.steps import Step
from utils.errors import UserError
from utils.metrics.results import tokens_of

one_layer = partial(tiny_llama, num_hidden_layers=1)


@pytest.mark.parametrize("prompt", [[], [64], [-1], [3, 99]])
def test_unusable_prompts_are_refused(prompt: list[int]) -> None:
    model = tiny_llama()
    with pytest.raises(UserError):
        autoregressive_generate(prompt, model)
    with pytest.raises(UserError):
        ngram_assisted_speculative_generate(prompt, NGramStorage(3, 64), model)


def test_arrays_and_tensors_of_ids_are_accepted() -> None:
    import numpy as np

    model, ids = one_layer(), [3, 9, 4]
    end = autoregressive_generate(ids, model, 9, eos_tokens_id=-1)[5]
    expected = autoregressive_generate(ids, model, 9, eos_tokens_id=end)
    for inputs in (tuple(ids), np.array(ids), torch.tensor(ids), iter(ids)):
        for ends in (np.int64(end), torch.tensor(end), torch.tensor([end, 63]), np.array([end])):
            assert autoregressive_generate(ids, model, 9, eos_tokens_id=ends)[: len(expected)] == expected
        made = speculative_generate(inputs, model, model, max_gen_len=9, eos_tokens_id=np.int64(end))[0]
        assert made == expected and all(type(token) is int for token in made)
    assert (
        ngram_assisted_speculative_generate(
            torch.tensor(ids), NGramStorage(3, 64), model, max_gen_len=9, eos_tokens_id=(end,)
        )[0]
        == expected
    )
    for inputs in ([ids], "text", torch.tensor([ids, ids]), 5, [1.5]):
        with pytest.raises(UserError):
            autoregressive_generate(inputs, model)


def test_a_decoder_only_drafter_for_an_encoder_decoder_target_is_refused() -> None:
    with pytest.raises(UserError):
        speculative_generate([1], tiny_llama(), tiny_t5())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_error_for_unusable_logits_names_the_model(bad: float) -> None:
    model = chain(PATH, 10)
    model.table[7, :] = bad
    with pytest.raises(UserError, match="^toy "):
        list(autoregressive_steps([0], session(model), decoding(3)))


def test_beam_search_and_drafters_name_the_model() -> None:
    broken, sound = chain(PATH, 10), chain(PATH, 10)
    broken.table[7, :] = float("nan")
    broken.name_or_path = "the broken one"
    with pytest.raises(UserError, match="^the broken one "):
        list(beam_search_steps([0], session(broken), decoding(3), BeamWidth()))
    with pytest.raises(UserError, match="^the broken one "):
        list(
            speculative_steps([0], ModelDrafter(session(broken), decoding(9), 10), session(sound), decoding(9), gamma=3)
        )


def test_invalid_arguments_are_refused_by_name() -> None:
    model = tiny_llama()
    for name, value in (
        ("gamma", None),
        ("gamma", 2.0),
        ("max_gen_len", None),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", 3.7),
    ):
        with pytest.raises(UserError, match=f"{name} {value}"):
            speculative_generate([1], model, model, **{name: value})
    for ends in ([[1]], "x", 1.5):
        with pytest.raises(UserError, match="eos_tokens_id"):
            autoregressive_generate([1], model, eos_tokens_id=ends)
    assert autoregressive_generate([1], model, 3, eos_tokens_id=[None, -1]) == autoregressive_generate(
        [1], model, 3, eos_tokens_id=None
    )


def test_what_is_not_a_model_is_refused_by_name() -> None:
    model = tiny_llama()
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("drafter", lambda: speculative_generate([1], None, model)),
        ("drafter", lambda: speculative_generate([1], "model", model)),
        ("target", lambda: speculative_generate([1], model, None)),
        ("target", lambda: ngram_assisted_speculative_generate([1], NGramStorage(3, 64), None)),
        ("model", lambda: autoregressive_generate([1], None)),
        ("model", lambda: beam_search_generate([1], None)),
    ]
    for name, call in calls:
        with pytest.raises(UserError, match=f"^{name} must be a transformers model, not "):
            call()


@pytest.mark.parametrize("indices", [(), (7,), (7, 12)])
def test_by_default_a_text_ends_at_the_models_own_end_tokens(indices: tuple[int, ...]) -> None:
    """Not at token 1, which is an ordinary token in most vocabularies."""
    model, prompt = one_layer(), [3, 14, 15]
    with torch.no_grad():
        model.get_output_embeddings().weight[1] *= 4
    text = autoregressive_generate(prompt, model, 40, eos_tokens_id=None)
    assert 1 in text, "otherwise this test could not fail"
    model.generation_config.eos_token_id = [text[index] for index in indices] or None
    expected = text[: min((text.index(text[index]) + 1 for index in indices), default=40)]
    assert autoregressive_generate(prompt, model) == expected
    assert autoregressive_generate(prompt, model, eos_tokens_id="model") == expected
    assert speculative_generate(prompt, model, model)[0] == expected
    assert ngram_assisted_speculative_generate(prompt, NGramStorage(3, 64), model)[0] == expected
    assert beam_search_generate(prompt, model, 40, 1, 1) == expected


def test_a_custom_processor_may_return_any_float_format() -> None:
    model = tiny_llama()
    made = autoregressive_generate([1], model, 5, lambda logits: torch.softmax(logits, -1).bfloat16(), -1, seed=0)
    assert len(made) == 5


def test_minus_infinity_is_probability_zero() -> None:
    table = chain(PATH, 10).table
    table[:, 3] = float("-inf")
    for seed in range(50):
        assert 3 not in tokens_of(autoregressive_steps([7], session(ToyModel(table)), decoding(8, seed=seed)))


def test_a_seed_repeats_a_call_and_without_one_torch_draws_it() -> None:
    from utils.logits_processor import MultinomialProcessor

    model, sampler = one_layer(), MultinomialProcessor(1.5)
    runs = [speculative_generate([1, 2], model, model, None, 3, sampler, 12, -1, seed=s)[0] for s in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]
    torch.manual_seed(3)
    first, second = (autoregressive_generate([1, 2], model, 20, sampler, -1) for _ in range(2))
    torch.manual_seed(3)
    assert autoregressive_generate([1, 2], model, 20, sampler, -1) == first != second


def test_debug_prints_each_round_with_signs(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [Step((5, 6), 1, 7), Step((8,), 1, 9)]
    for enabled, shown in ((True, "   1  +5 -6 =7\n   2  +8 *9\n"), (False, "")):
        assert list(traced(iter(steps), enabled=enabled)) == steps
        assert capsys.readouterr().out == shown
