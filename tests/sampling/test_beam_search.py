"""Beam search against a reference with lists and uncached forward passes, and the same scoring formula."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny import SHALLOW, next_logits, tiny_llama, tiny_mamba

from sampling import autoregressive_generate, beam_search_generate
from utils.errors import UserError

BUILDERS = SHALLOW | {"mamba": partial(tiny_mamba, num_hidden_layers=1)}


def log_probs(model: Any, prompt: list[int], made: list[int]) -> torch.Tensor:
    return next_logits(model, prompt, made).double().log_softmax(-1)


def reference(
    model: Any, prompt: list[int], *, length: int, beams: int, top_k: int, min_length: float, alpha: float, end: int
) -> list[int]:
    def score(beam: tuple[list[int], float]) -> float:
        return beam[1] / ((min_length + len(beam[0])) / (min_length + 1)) ** alpha

    kept: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    leading: list[float] = []  # scores of the ended beams that decide when to stop
    while kept and not (len(leading) == beams and score(kept[0]) <= leading[-1]):
        grown = []
        for tokens, total in kept:
            best = log_probs(model, prompt, tokens).topk(top_k)
            grown += [
                ([*tokens, int(token)], total + float(value))
                for value, token in zip(best.values, best.indices, strict=True)
            ]
        grown.sort(key=score, reverse=True)
        final = [end in tokens or len(tokens) >= length for tokens, _ in grown]
        ended += [beam for beam, over in zip(grown, final, strict=True) if over]
        leading += [score(beam) for beam, over in zip(grown[:beams], final, strict=False) if over]
        leading = sorted(leading, reverse=True)[:beams]
        kept = [beam for beam, over in zip(grown, final, strict=True) if not over][:beams]
    return max(ended, key=score)[0]


@pytest.mark.parametrize(
    ("kind", "beams", "top_k", "alpha"),
    [
        pytest.param(kind, *search, marks=pytest.mark.full if (row + column) % 2 else ())
        for row, kind in enumerate(BUILDERS)
        for column, search in enumerate([(1, 1, 1.2), (3, 2, 0.0), (4, 3, 1.2), (6, 5, 2.0)])
    ],
)
def test_beams_equal_the_reference(kind: str, beams: int, top_k: int, alpha: float) -> None:
    prompt = [5, 9, 2, 11]
    model = BUILDERS[kind]()
    end = autoregressive_generate(prompt, model, 4, eos_tokens_id=-1)[-1]
    for ending in (-1, end):
        expected = reference(model, prompt, length=6, beams=beams, top_k=top_k, min_length=5.0, alpha=alpha, end=ending)
        made = beam_search_generate(prompt, model, 6, beams, top_k, 5.0, alpha, ending)
        assert made == expected


@pytest.mark.parametrize("alpha", [1.5, *(pytest.param(alpha, marks=pytest.mark.full) for alpha in (1.0, 2.0))])
def test_the_score_is_at_least_that_of_generate(alpha: float) -> None:
    """With early_stopping=False, and as many continuations as transformers takes."""
    prompt, beams, length = [5, 9, 2, 11], 3, 12
    for seed in range(2):
        model = tiny_llama(seed=seed, initializer_range=0.2, num_hidden_layers=1)
        for end in autoregressive_generate(prompt, model, 6, eos_tokens_id=-1)[1::2]:
            theirs = model.generate(
                torch.tensor([prompt]),
                num_beams=beams,
                do_sample=False,
                max_new_tokens=length,
                length_penalty=alpha,
                eos_token_id=end,
                early_stopping=False,
            )[0].tolist()[len(prompt) :]
            theirs = theirs[: theirs.index(end) + 1] if end in theirs else theirs
            ours = beam_search_generate(prompt, model, length, beams, 2 * beams, 0.0, alpha, end)
            scores = []
            for text in (ours, theirs):
                likelihoods = (log_probs(model, prompt, text[:index])[token] for index, token in enumerate(text))
                scores.append(float(sum(likelihoods)) / len(text) ** alpha)
            assert scores[0] >= scores[1] - 1e-9, (seed, end)


def test_a_search_stops_once_the_live_beams_are_worse_than_those_that_ended() -> None:
    """Without a reward for length the first ends of likely beams settle it."""
    model, widths = tiny_llama(), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    end = autoregressive_generate([5, 9], model, 1, eos_tokens_id=-1)[0]
    widths.clear()
    assert beam_search_generate([5, 9], model, 200, 1, 2, 0.0, 0.0, end) == [end] and len(widths) == 1


def test_one_beam_is_greedy_and_more_beams_are_at_least_as_likely() -> None:
    prompt = [5, 9, 2, 11]
    for seed in range(3):
        model = tiny_llama(seed=seed, num_hidden_layers=1)
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
