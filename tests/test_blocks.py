"""Where a text ends: end tokens and lengths inside accepted blocks, the context's end; and what a session computes."""

import pytest
from tiny import tiny_bart, tiny_llama, tiny_mamba, tiny_t5
from toys import ToyModel, chain, decoding, session

from ngram_assisted import NGramDrafter, NGramStorage, ngram_assisted_speculative_generate
from sampling import (
    BeamWidth,
    ModelDrafter,
    autoregressive_generate,
    autoregressive_steps,
    beam_search_steps,
    speculative_generate,
    speculative_steps,
)
from sampling.drafting import Draft, Verified
from utils.caching import ModelSession
from utils.decoding import Decoding
from utils.errors import UserError
from utils.events import FinishReason, Step
from utils.logits_processor import GreedyProcessor
from utils.results import Generation, collect, tokens_of

PATH = [0, 7, 3, 9, 4, 8, 2, 6, 1, 5]


class Fixed:
    """A drafter that proposes a fixed text by position."""

    def __init__(self, text: list[int]) -> None:
        self._text, self._origin = text, 0
        self.asked: list[int] = []

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._origin = len(context)

    def propose(self, context: list[int], count: int) -> Draft:
        self.asked.append(count)
        start = len(context) - self._origin
        return Draft(self._text[start : start + count])

    def commit(self, context: list[int], verified: Verified) -> None:
        """Nothing to keep."""


def run(drafts: list[int], *, gamma: int, length: int = 9, ends: tuple[int, ...] = ()) -> Generation:
    target = chain(PATH, 10)
    plan = decoding(length, processor=GreedyProcessor(), ends=ends)
    return collect(speculative_steps([0], Fixed(drafts), session(target), plan, gamma=gamma))


@pytest.mark.parametrize("gamma", range(7))
@pytest.mark.parametrize("place", range(1, 9))
def test_an_end_token_ends_the_text_exactly_there(gamma: int, place: int) -> None:
    result = run(PATH[1:], gamma=gamma, ends=(PATH[place],))
    assert result.tokens == PATH[1 : place + 1]
    assert result.finish is FinishReason.STOP
    assert result.acceptance_rate in (1.0, None)


def test_drafts_behind_an_accepted_end_token_are_not_counted() -> None:
    result = run(PATH[1:], gamma=6, ends=(PATH[3],))
    assert result.steps == (Step((7, 3, 9), 3, None, FinishReason.STOP),)
    assert (result.drafted, result.accepted) == (3, 3)


def test_an_end_token_as_corrected_and_as_bonus_token() -> None:
    assert run([7, 5, 5, 5], gamma=3, ends=(3,)).steps == (Step((7, 5, 5), 1, 3, FinishReason.STOP),)
    assert run(PATH[1:], gamma=2, ends=(9,)).steps == (Step((7, 3), 2, 9, FinishReason.STOP),)


def test_a_rejected_end_token_ends_nothing() -> None:
    assert run([5] * 9, gamma=3, length=4, ends=(5,)).tokens == PATH[1:5]


@pytest.mark.parametrize("gamma", range(7))
@pytest.mark.parametrize("length", range(1, 9))
def test_never_more_than_the_asked_number_of_tokens_and_no_wasted_draft(gamma: int, length: int) -> None:
    target, drafter = chain(PATH, 10), Fixed(PATH[1:])
    plan = decoding(length, processor=GreedyProcessor())
    result = collect(speculative_steps([0], drafter, session(target), plan, gamma=gamma))
    assert result.tokens == PATH[1 : length + 1]
    assert result.finish is FinishReason.LENGTH
    assert len(result.steps) == -(-length // (gamma + 1)) == len(target.calls)
    assert all(count <= gamma for count in drafter.asked)


def test_a_length_of_zero_makes_nothing_and_a_negative_one_is_an_error() -> None:
    model = tiny_llama()
    assert autoregressive_generate([1], model, 0) == []
    assert speculative_generate([1], model, model, max_gen_len=0) == ([], 0.0)
    with pytest.raises(ValueError, match="max_gen_len -1"):
        autoregressive_generate([1], model, -1)
    with pytest.raises(ValueError, match="gamma -1"):
        speculative_generate([1], model, model, gamma=-1)


def test_end_ids_outside_the_vocabulary_never_match_and_lists_of_them_all_do() -> None:
    model = tiny_llama()
    free = autoregressive_generate([1, 2, 3], model, 12, eos_tokens_id=[-5, 64, 10**9])
    assert len(free) == 12
    assert free == autoregressive_generate([1, 2, 3], model, 12, eos_tokens_id=None)
    cut = min(free.index(free[4]), free.index(free[7])) + 1
    assert autoregressive_generate([1, 2, 3], model, 12, eos_tokens_id=[free[4], free[7]]) == free[:cut]


@pytest.mark.parametrize("prompt", [[], [64], [-1], [3, 99]])
def test_unusable_prompts_are_refused_in_a_sentence(prompt: list[int]) -> None:
    model = tiny_llama()
    with pytest.raises(UserError, match=r"^The prompt .*\.$|^The prompt .*needed\.$"):
        autoregressive_generate(prompt, model)
    with pytest.raises(UserError):
        ngram_assisted_speculative_generate(prompt, NGramStorage(3, 64), model)


def test_arrays_and_tensors_of_ids_are_as_good_as_lists() -> None:
    import numpy as np
    import torch

    model, ids = tiny_llama(), [3, 9, 4]
    end = autoregressive_generate(ids, model, 9, eos_tokens_id=-1)[5]
    expected = autoregressive_generate(ids, model, 9, eos_tokens_id=end)
    for inputs in (tuple(ids), np.array(ids), torch.tensor(ids), iter(ids)):
        for ends in (np.int64(end), torch.tensor(end), torch.tensor([end, 63]), np.array([end])):
            assert autoregressive_generate(ids, model, 9, eos_tokens_id=ends)[: len(expected)] == expected
        made = speculative_generate(inputs, model, model, max_gen_len=9, eos_tokens_id=np.int64(end))[0]
        assert made == expected and all(type(token) is int for token in made)
    assert (
        ngram_assisted_speculative_generate(torch.tensor(ids), NGramStorage(3, 64), model, max_gen_len=9, eos_tokens_id=(end,))[0]
        == expected
    )
    for inputs in ([ids], "text", torch.tensor([ids, ids]), 5, [1.5]):
        with pytest.raises(UserError, match="flat list of token ids"):
            autoregressive_generate(inputs, model)


def test_generation_stops_at_the_contexts_end_and_a_full_prompt_is_refused() -> None:
    model = tiny_llama(max_position_embeddings=16)
    for gamma in (0, 1, 3, 8):
        made, _ = speculative_generate([1] * 10, model, model, gamma=gamma, max_gen_len=50, eos_tokens_id=-1)
        assert len(made) == 6
    assert len(autoregressive_generate([1] * 15, model, 50, eos_tokens_id=-1)) == 1
    with pytest.raises(UserError, match="16 tokens.*context of 16.*at most 15"):
        autoregressive_generate([1] * 16, model)
    with pytest.raises(UserError, match="at most 256"):
        autoregressive_generate([1] * 300, tiny_bart())


def test_a_drafter_with_a_shorter_context_declines_from_there_on() -> None:
    target, drafter = tiny_llama(seed=0), tiny_llama(seed=0, max_position_embeddings=16)
    plan = Decoding.of(None, 30, end_ids=None, seed=0)
    steps = list(speculative_steps([1] * 6, ModelDrafter(ModelSession(drafter), plan, 64), ModelSession(target), plan, gamma=4))
    assert tokens_of(steps) == autoregressive_generate([1] * 6, target, 30, eos_tokens_id=None)
    lengths = [len(step.drafted) for step in steps]
    assert lengths[0] == 4 and lengths[-10:] == [0] * 10
    assert speculative_generate([1] * 20, drafter, target, max_gen_len=5, eos_tokens_id=-1)[1] == 0.0


def test_a_drafter_that_lacks_an_id_of_the_text_declines() -> None:
    target, drafter = tiny_llama(seed=0), tiny_llama(seed=1, vocab_size=40)
    expected = autoregressive_generate([1, 2, 50], target, 20, eos_tokens_id=-1)
    assert speculative_generate([1, 2, 50], drafter, target, max_gen_len=20, eos_tokens_id=-1) == (expected, 0.0)


def test_first_target_drafts_nothing_in_the_first_round_only() -> None:
    target, plan = chain(PATH, 10), decoding(9, processor=GreedyProcessor())
    steps = list(speculative_steps([0], Fixed(PATH[1:]), session(target), plan, gamma=3, first_target=True))
    assert [len(step.drafted) for step in steps] == [0, 3, 3]


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


def test_pairs_of_two_kinds_are_refused() -> None:
    with pytest.raises(UserError, match="two kinds"):
        speculative_generate([1], tiny_llama(), tiny_t5())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_unusable_logits_are_an_error_with_the_models_name(bad: float) -> None:
    model = chain(PATH, 10)
    model.table[7, :] = bad
    with pytest.raises(UserError, match="toy returned logits"):
        list(autoregressive_steps([0], session(model), decoding(3)))


def test_beams_and_drafters_name_their_model_too() -> None:
    broken, sound = chain(PATH, 10), chain(PATH, 10)
    broken.table[7, :] = float("nan")
    broken.name_or_path = "the broken one"
    with pytest.raises(UserError, match="^the broken one returned logits"):
        list(beam_search_steps([0], session(broken), decoding(3), BeamWidth()))
    with pytest.raises(UserError, match="^the broken one returned logits"):
        list(speculative_steps([0], ModelDrafter(session(broken), decoding(9), 10), session(sound), decoding(9), gamma=3))


def test_arguments_that_are_no_counts_are_refused_in_a_sentence() -> None:
    model = tiny_llama()
    for arguments in ({"gamma": None}, {"gamma": 2.0}, {"max_gen_len": None}, {"seed": -1}, {"seed": 2**32}, {"seed": 3.7}):
        with pytest.raises(UserError, match="out of range"):
            speculative_generate([1], model, model, **arguments)
    for ends in ([[1]], "x", 1.5):
        with pytest.raises(UserError, match="eos_tokens_id"):
            autoregressive_generate([1], model, eos_tokens_id=ends)
    assert autoregressive_generate([1], model, 3, eos_tokens_id=[None, -1]) == autoregressive_generate([1], model, 3, eos_tokens_id=None)


def test_a_processor_of_ones_own_may_return_any_float_format() -> None:
    import torch

    model = tiny_llama()
    made = autoregressive_generate([1], model, 5, lambda logits: torch.softmax(logits, -1).bfloat16(), -1, seed=0)
    assert len(made) == 5


def test_minus_infinity_is_probability_zero() -> None:
    table = chain(PATH, 10).table
    table[:, 3] = float("-inf")
    for seed in range(50):
        assert 3 not in tokens_of(autoregressive_steps([7], session(ToyModel(table)), decoding(8, seed=seed)))


def test_a_seed_repeats_a_call_and_none_draws_one_from_torch() -> None:
    import torch

    from utils.logits_processor import MultinomialProcessor

    model, sampler = tiny_llama(), MultinomialProcessor(1.5)
    runs = [speculative_generate([1, 2], model, model, logits_processor=sampler, eos_tokens_id=-1, seed=s)[0] for s in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]
    torch.manual_seed(3)
    first, second = (autoregressive_generate([1, 2], model, 20, sampler, -1) for _ in range(2))
    torch.manual_seed(3)
    assert autoregressive_generate([1, 2], model, 20, sampler, -1) == first != second
