"""What a session computes: only what its cache lacks, and an encoder once. Which recurrent states are refused."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import Restless
from tiny import DECODER, build, tiny_llama, tiny_mamba, tiny_t5
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Lfm2Config, Lfm2ForCausalLM

from ngram_assisted import NGramDrafter, NGramStorage, ngram_assisted_speculative_generate
from sampling import (
    autoregressive_generate,
    speculative_generate,
    speculative_steps,
)
from utils.decode import model_info
from utils.decode.decoding import Decoding
from utils.decode.engine_forward import PREFILL_CHUNK, reported_reading
from utils.decode.model_session import ModelSession
from utils.decode.recurrent import CacheSupport
from utils.errors import UserError


def test_each_feed_computes_only_what_the_cache_lacks() -> None:
    """One prefill, then one row per decode step and at most gamma + 1 rows per round."""
    widths: list[tuple[int, int]] = []
    model = tiny_llama()
    model.register_forward_hook(
        lambda module, args, kwargs, output: widths.append((kwargs["input_ids"].shape[1], output.logits.shape[1])),
        with_kwargs=True,
    )
    autoregressive_generate([1] * 9, model, 5, eos_tokens_id=-1)
    assert widths == [(9, 1), (1, 1), (1, 1), (1, 1), (1, 1)]
    widths.clear()
    plan = Decoding.of(None, 12, end_ids=None, seed=0)
    drafter = NGramDrafter(NGramStorage(2, 64), plan.noise, stop_if_unknown=False)
    list(speculative_steps([1] * 9, drafter, ModelSession(model), plan, gamma=3))
    assert widths[0] == (12, 4)
    assert all(rows == kept <= 4 for rows, kept in widths[1:])


class HeadProducts(TorchDispatchMode):
    """The names of the operations that multiply with an output head of so many tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.names = tokens, set[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.shape[-1:] == (self.tokens,) and "mm" in function.__name__:
            self.names.add(function.__name__)
        return out


def test_a_prompt_in_16_bits_does_not_copy_the_weight_of_the_head() -> None:
    """Called without a session, PyTorch multiplies batches, and copies the weight for that."""
    model, context = tiny_llama(vocab_size=96).bfloat16().requires_grad_(False), [*range(1, 31)]
    with HeadProducts(96) as called:
        expected = model(torch.tensor([context]), logits_to_keep=2).logits[0]
    with HeadProducts(96) as fed:
        logits = ModelSession(model).feed(context, keep=2)
    assert (called.names, fed.names) == ({"bmm.default"}, {"mm.default"})
    assert torch.allclose(logits, expected, atol=0.05)


def test_a_long_prompt_is_read_in_chunks_and_its_progress_is_reported() -> None:
    model = tiny_llama(max_position_embeddings=4 * PREFILL_CHUNK).double()
    widths: list[int] = []
    model.register_forward_hook(
        lambda _, args, kwargs, output: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    prompt = torch.randint(64, (2 * PREFILL_CHUNK + 9,)).tolist()
    seen: list[tuple[int, int]] = []
    with reported_reading(lambda *progress: seen.append(progress)):
        logits = ModelSession(model).feed(prompt, keep=2)
    assert widths == [PREFILL_CHUNK, PREFILL_CHUNK, 7, 2]
    end = len(prompt) - 2
    assert seen == [(PREFILL_CHUNK, end), (2 * PREFILL_CHUNK, end), (end, end)]
    torch.testing.assert_close(logits, model(input_ids=torch.tensor([prompt])).logits[0, -2:], rtol=1e-9, atol=1e-9)


def test_a_prompt_whose_keys_and_values_do_not_fit_is_refused_with_the_tokens_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(num_attention_heads=8, head_dim=128, num_hidden_layers=32)
    config.get_text_config = lambda decoder: config
    model = SimpleNamespace(config=config, device=torch.device("cpu"))
    per_token = 1.5 * 2 * 4 * 32 * 8 * 128
    monkeypatch.setattr(model_info, "available_memory", lambda: int(1000 * per_token))
    model_info.check_memory([model], 1000, remedy="")
    with pytest.raises(UserError, match=r"4000 tokens.* 1000\D.*use a shorter prompt"):
        model_info.check_memory([model], 4000, remedy="use a shorter prompt")


def test_an_encoder_runs_once() -> None:
    model, calls = tiny_t5(), []
    model.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    autoregressive_generate([1, 2, 3], model, 6, eos_tokens_id=-1)
    assert len(calls) == 1


def test_an_unusable_recurrent_cache_is_refused_with_the_remedy() -> None:
    model = tiny_mamba()
    with pytest.raises(UserError, match="use_cache=False"):
        speculative_generate([1, 2], model, model)
    with pytest.raises(UserError):
        ngram_assisted_speculative_generate([1, 2], NGramStorage(2, 64), model)
    expected = autoregressive_generate([1, 2], model, 6, eos_tokens_id=-1)
    assert speculative_generate([1, 2], model, model, max_gen_len=6, eos_tokens_id=-1, use_cache=False)[0] == expected


def tiny_hybrid(seed: int = 0) -> Any:
    """One layer with attention and one with a recurrent state."""
    return build(
        Lfm2ForCausalLM,
        Lfm2Config(**DECODER | {"layer_types": ["full_attention", "conv"], "block_multiple_of": 8}),
        seed,
    )


def test_only_accepted_tokens_are_computed_again_after_a_rewind_of_a_recurrent_state() -> None:
    """With a drafter that is always rejected: the token that was fed before the drafts."""
    widths: dict[str, list[int]] = {"target": [], "drafter": []}
    models = {"target": tiny_hybrid(), "drafter": tiny_hybrid(5)}
    for name, model in models.items():

        def record_width(*call: Any, name: str = name) -> None:
            widths[name].append(call[2]["input_ids"].shape[1])

        model.register_forward_hook(record_width, with_kwargs=True)
    ModelSession(models["target"]), ModelSession(models["drafter"])
    for calls in widths.values():
        calls.clear()  # of the test of the cache, once per model
    speculative_generate([1] * 9, models["drafter"], models["target"], gamma=3, max_gen_len=30, eos_tokens_id=-1)
    assert widths["target"][:5] == [9, 4, 1, 4, 1] and max(widths["target"][1:]) == 4
    assert widths["drafter"][0] == 10 and set(widths["drafter"][1:]) == {1}


def test_a_fork_rewinds_independently() -> None:
    model, prompt = tiny_hybrid(), [3, 1, 4, 1, 5]
    session = ModelSession(model)
    session.feed([*prompt, 9, 2], keep=3)
    twin = session.fork()
    twin.rewind(5)
    twin.feed([*prompt, 8, 6, 7], keep=2)  # 8 was accepted
    for one, text in ((session, [*prompt, 9, 2, 4]), (twin, [*prompt, 8, 6, 7, 1])):
        whole = ModelSession(model, use_cache=False).feed(text, keep=1)
        assert torch.allclose(one.feed(text, keep=1), whole, atol=1e-4)


@pytest.mark.parametrize(("move", "support"), [(0.01, CacheSupport.STEPS), (1.0, CacheSupport.NOTHING)])
def test_a_recurrent_state_with_different_logits_is_refused(move: float, support: CacheSupport) -> None:
    with pytest.raises(UserError, match=re.escape(support.value.format("").strip())):
        ModelSession(Restless(tiny_hybrid(), by_rows=move))
    assert ModelSession(tiny_hybrid()).feed([1, 2], keep=1).shape == (1, 64)
