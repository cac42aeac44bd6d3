"""Beam search against a reference with lists and uncached forward passes, and the same scoring formula."""

from typing import Any

import pytest
import torch
from tiny import next_logits, tiny_bart, tiny_llama, tiny_mamba, tiny_sliding, tiny_t5

from sampling import autoregressive_generate, beam_search_generate
from utils.errors import UserError

BUILDERS = {"llama": tiny_llama, "sliding": tiny_sliding, "t5": tiny_t5, "bart": tiny_bart, "mamba": tiny_mamba}


def log_probs(model: Any, prompt: list[int], made: list[int]) -> torch.Tensor:
    return next_logits(model, prompt, made).double().log_softmax(-1)


def reference(
    model: Any, prompt: list[int], *, length: int, beams: int, top_k: int, min_length: float, alpha: float, end: int
) -> list[int]:
    def score(beam: tuple[list[int], float]) -> float:
        return beam[1] / ((min_length + len(beam[0])) / (min_length + 1)) ** alpha

    kept: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    while any(len(tokens) < length and end not in tokens for tokens, _ in kept):
        grown = [beam for beam in kept if end in beam[0]]
        for tokens, total in kept:
            if end not in tokens:
                row = log_probs(model, prompt, tokens)
                best = row.topk(top_k)
                grown += [
                    ([*tokens, int(token)], total + float(value))
                    for value, token in zip(best.values, best.indices, strict=True)
                ]
        ended += [beam for beam in grown if end in beam[0] or len(beam[0]) >= length]
        kept = sorted(grown, key=score, reverse=True)[:beams]
    return max(ended, key=score)[0]


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize(("beams", "top_k", "alpha"), [(1, 1, 1.2), (3, 2, 0.0), (4, 3, 1.2), (6, 5, 2.0)])
def test_beams_equal_the_reference(kind: str, beams: int, top_k: int, alpha: float) -> None:
    prompt = [5, 9, 2, 11]
    for seed in range(2):
        model = BUILDERS[kind](seed=seed)
        end = autoregressive_generate(prompt, model, 6, eos_tokens_id=-1)[-1]
        for ending in (-1, end):
            expected = reference(
                model, prompt, length=9, beams=beams, top_k=top_k, min_length=5.0, alpha=alpha, end=ending
            )
            made = beam_search_generate(prompt, model, 9, beams, top_k, 5.0, alpha, ending)
            assert made == expected


def test_one_beam_is_greedy_and_more_beams_are_at_least_as_likely() -> None:
    prompt = [5, 9, 2, 11]
    for seed in range(5):
        model = tiny_llama(seed=seed)
        greedy = autoregressive_generate(prompt, model, 8, eos_tokens_id=-1)
        assert beam_search_generate(prompt, model, 8, 1, 1, eos_tokens_id=-1) == greedy
        wide = beam_search_generate(prompt, model, 8, 8, 8, alpha=0.0, eos_tokens_id=-1)
        likelihood = [
            sum(float(log_probs(model, prompt, text[:i])[text[i]]) for i in range(8)) for text in (greedy, wide)
        ]
        assert likelihood[1] >= likelihood[0] - 1e-9


def test_arguments_out_of_range_are_refused() -> None:
    for arguments in (
        {"num_beams": 0},
        {"top_k": 0},
        {"top_k": 1.5},
        {"min_length": -1.0},
        {"alpha": 1e6},
        {"alpha": float("nan")},
    ):
        with pytest.raises(UserError):
            beam_search_generate([1], tiny_llama(), **arguments)
    assert beam_search_generate([1], tiny_llama(), 0) == []
