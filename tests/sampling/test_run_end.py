"""Where a text ends: at end tokens and lengths inside accepted drafts, and at the end of the context."""

import pytest
from tiny import tiny_bart, tiny_llama
from toys import PATH, chain, decoding, session

from sampling import (
    ModelDrafter,
    autoregressive_generate,
    speculative_generate,
    speculative_steps,
)
from utils.decode.decoding import Decoding
from utils.decode.drafts import Draft, Verified
from utils.decode.model_session import ModelSession
from utils.decode.steps import FinishReason, Step
from utils.errors import UserError
from utils.logits_processor import GreedyProcessor
from utils.metrics.results import Generation, collect, tokens_of


class Fixed:
    """A drafter that proposes a fixed text by position."""

    def __init__(self, text: list[int]) -> None:
        self._text, self._origin = text, 0
        self.counts: list[int] = []

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._origin = len(context)

    def propose(self, context: list[int], count: int) -> Draft:
        self.counts.append(count)
        start = len(context) - self._origin
        return Draft(self._text[start : start + count])

    def commit(self, context: list[int], verified: Verified) -> None:
        """Nothing to learn."""


def run(drafts: list[int], *, gamma: int, length: int = 9, ends: tuple[int, ...] = ()) -> Generation:
    target = chain(PATH, 10)
    plan = decoding(length, processor=GreedyProcessor(), ends=ends)
    return collect(speculative_steps([0], Fixed(drafts), session(target), plan, gamma=gamma))


@pytest.mark.parametrize("gamma", range(7))
@pytest.mark.parametrize("position", range(1, 9))
def test_the_text_ends_with_its_first_end_token(gamma: int, position: int) -> None:
    result = run(PATH[1:], gamma=gamma, ends=(PATH[position],))
    assert result.tokens == PATH[1 : position + 1]
    assert result.finish is FinishReason.STOP
    assert result.acceptance_rate in (1.0, None)


def test_drafts_after_an_accepted_end_token_are_not_counted() -> None:
    result = run(PATH[1:], gamma=6, ends=(PATH[3],))
    assert result.steps == (Step((7, 3, 9), 3, None, FinishReason.STOP),)
    assert (result.drafted, result.accepted) == (3, 3)


def test_an_end_token_may_be_the_corrected_or_the_bonus_token() -> None:
    assert run([7, 5, 5, 5], gamma=3, ends=(3,)).steps == (Step((7, 5, 5), 1, 3, FinishReason.STOP),)
    assert run(PATH[1:], gamma=2, ends=(9,)).steps == (Step((7, 3), 2, 9, FinishReason.STOP),)


def test_a_rejected_end_token_does_not_end_the_text() -> None:
    assert run([5] * 9, gamma=3, length=4, ends=(5,)).tokens == PATH[1:5]


@pytest.mark.parametrize("gamma", range(7))
@pytest.mark.parametrize("length", range(1, 9))
def test_the_length_is_exact_and_no_draft_is_wasted(gamma: int, length: int) -> None:
    target, drafter = chain(PATH, 10), Fixed(PATH[1:])
    plan = decoding(length, processor=GreedyProcessor())
    result = collect(speculative_steps([0], drafter, session(target), plan, gamma=gamma))
    assert result.tokens == PATH[1 : length + 1]
    assert result.finish is FinishReason.LENGTH
    assert len(result.steps) == -(-length // (gamma + 1)) == len(target.calls)
    assert all(count <= gamma for count in drafter.counts)


def test_a_length_of_zero_gives_no_tokens_and_a_negative_one_is_an_error() -> None:
    model = tiny_llama()
    assert autoregressive_generate([1], model, 0) == []
    assert speculative_generate([1], model, model, max_gen_len=0) == ([], 0.0)
    with pytest.raises(ValueError, match="max_gen_len -1"):
        autoregressive_generate([1], model, -1)
    with pytest.raises(ValueError, match="gamma -1"):
        speculative_generate([1], model, model, gamma=-1)


def test_every_end_id_of_a_list_ends_the_text_and_ids_outside_the_vocabulary_never_do() -> None:
    model = tiny_llama()
    free = autoregressive_generate([1, 2, 3], model, 12, eos_tokens_id=[-5, 64, 10**9])
    assert len(free) == 12
    assert free == autoregressive_generate([1, 2, 3], model, 12, eos_tokens_id=None)
    cut = min(free.index(free[4]), free.index(free[7])) + 1
    assert autoregressive_generate([1, 2, 3], model, 12, eos_tokens_id=[free[4], free[7]]) == free[:cut]


def test_generation_stops_at_the_end_of_the_context_and_a_full_prompt_is_refused() -> None:
    model = tiny_llama(max_position_embeddings=16)
    for gamma in (0, 1, 3, 8):
        made, _ = speculative_generate([1] * 10, model, model, gamma=gamma, max_gen_len=50, eos_tokens_id=-1)
        assert len(made) == 6
    assert len(autoregressive_generate([1] * 15, model, 50, eos_tokens_id=-1)) == 1
    with pytest.raises(UserError, match=r"\b16\b.*\b16\b.*\b15\b"):
        autoregressive_generate([1] * 16, model)
    with pytest.raises(UserError, match=r"\b256\b"):
        autoregressive_generate([1] * 300, tiny_bart())


def test_a_drafter_declines_once_its_shorter_context_is_full() -> None:
    target, drafter = tiny_llama(seed=0), tiny_llama(seed=0, max_position_embeddings=16)
    plan = Decoding.of(None, 30, end_ids=None, seed=0)
    steps = list(
        speculative_steps([1] * 6, ModelDrafter(ModelSession(drafter), plan, 64), ModelSession(target), plan, gamma=4)
    )
    assert tokens_of(steps) == autoregressive_generate([1] * 6, target, 30, eos_tokens_id=None)
    lengths = [len(step.drafted) for step in steps]
    assert lengths[0] == 4 and lengths[-10:] == [0] * 10
    assert speculative_generate([1] * 20, drafter, target, max_gen_len=5, eos_tokens_id=-1)[1] == 0.0


def test_a_drafter_declines_if_the_text_has_an_id_outside_its_vocabulary() -> None:
    target, drafter = tiny_llama(seed=0), tiny_llama(seed=1, vocab_size=40)
    expected = autoregressive_generate([1, 2, 50], target, 20, eos_tokens_id=-1)
    assert speculative_generate([1, 2, 50], drafter, target, max_gen_len=20, eos_tokens_id=-1) == (expected, 0.0)


def test_first_target_drafts_nothing_in_the_first_round_only() -> None:
    target, plan = chain(PATH, 10), decoding(9, processor=GreedyProcessor())
    steps = list(speculative_steps([0], Fixed(PATH[1:]), session(target), plan, gamma=3, first_target=True))
    assert [len(step.drafted) for step in steps] == [0, 3, 3]
