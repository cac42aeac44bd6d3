"""How often a round makes the host wait for the device, counted on the CPU by tensors that watch what leaves them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import tiny_llama
from torch import Tensor

from sampling import verification
from sampling.drafters.model import ModelDrafter
from sampling.speculative import speculative_steps
from sampling.verification import choose_rule
from utils import logits_processor
from utils.decode import noise
from utils.decode.decoding import Decoding
from utils.decode.layer_cut import first_layers
from utils.decode.model_session import ModelSession
from utils.logits_processor import GreedyProcessor, LogitsProcessor, MultinomialProcessor

WAITS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero"}
LENGTH = 12


class Watched(Tensor):
    """A tensor whose results are watched as well, until they are on the host."""

    count = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in WAITS:
            return super().__torch_function__(func, types, args, kwargs or {})
        Watched.count += 1
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(Tensor) if isinstance(result, Tensor) else result


class WatchedSession(ModelSession):
    """Its logits are as on a GPU."""

    def feed(self, context: list[int], keep: int) -> Tensor:
        return super().feed(context, keep).as_subclass(Watched)


def rounds(processor: LogitsProcessor, rule_name: str, session: Callable[[Any], ModelSession]) -> list[Any]:
    model = tiny_llama(num_hidden_layers=2)
    rule, decoding = choose_rule(rule_name), Decoding.of(processor, LENGTH, end_ids=frozenset(), seed=3)
    drafter = ModelDrafter(session(first_layers(model, 1)), decoding, 64, shares_noise=rule.shares_noise)
    return list(speculative_steps([5, 6, 7], drafter, session(model), decoding, gamma=4, rule=rule))


@pytest.mark.parametrize("rule", ["rejection", "coupled", "block"])
@pytest.mark.parametrize("processor", [GreedyProcessor(), MultinomialProcessor(1.0)])
def test_a_round_waits_twice_for_a_draft(
    processor: LogitsProcessor, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wait shows whether logits are finite, the other one brings the token; a rule needs few more."""
    expected = rounds(processor, rule, ModelSession)
    monkeypatch.setattr(logits_processor, "_is_numpy", lambda rows: type(rows) is Tensor)
    monkeypatch.setattr(verification, "_is_on_host", lambda probs: type(probs) is Tensor)
    monkeypatch.setattr(noise, "_is_drawn", lambda rows: type(rows) is Watched and rows.dtype == torch.float64)
    Watched.count = 0
    steps = rounds(processor, rule, WatchedSession)
    assert steps == expected
    drafts, verified = sum(len(step.drafted) for step in steps), sum(len(step.tokens) for step in steps)
    extra = {"coupled": verified, "rejection": 3 * len(steps), "block": 6 * len(steps)}[rule]
    assert 2 * drafts < Watched.count <= 2 * drafts + len(steps) + extra
