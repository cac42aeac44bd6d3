"""The same logits computed one token at a time, and in verify passes of random widths with wrong drafts."""

from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedModel

from utils.decode.model_session import ModelSession


def stepwise_logits(model: PreTrainedModel, context: list[int]) -> Tensor:
    """Return the logits (T, V) of a context (T tokens), one forward pass per token."""
    session = ModelSession(model, rewinds=False)
    return torch.cat([session.feed(context[: end + 1], keep=1) for end in range(len(context))])


def assert_bits_of_single_steps(model: PreTrainedModel, context: list[int], random: Random) -> None:
    """Feed a context in random widths, sometimes followed by wrong drafts that are rewound, and compare every logit."""
    alone = stepwise_logits(model, context)
    session, known = ModelSession(model), 0
    while known < len(context):
        width, wrong = random.randint(1, min(40, len(context) - known)), random.randint(0, 3)
        drafts = [random.randrange(90) for _ in range(wrong)]
        logits = session.feed([*context[: known + width], *drafts], keep=width + wrong)
        known += width
        assert torch.equal(logits[:width], alone[known - width : known])
        session.rewind(known)
