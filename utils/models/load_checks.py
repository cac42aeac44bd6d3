"""Checks that a loaded model must pass: complete, finite, causal, and able to run as the decoders will run it.

Each function raises UserError if its check fails.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from utils.decode.logit_drift import LogitDrift, max_rounding
from utils.decode.model_info import context_length, vocabulary_size
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.models.load_errors import first_line, is_out_of_memory
from utils.text import count_of

DRAFTS = 2  # in the verify pass of `check_runs`


def check_complete(model: PreTrainedModel, loading_info: dict[str, Any], name: str) -> None:
    """Reject missing weights, which transformers would replace by random numbers."""
    missing = sorted(loading_info["missing_keys"])
    head = model.get_output_embeddings()
    # A base model lacks nothing but its head, which would be random.
    if missing and all(dict(model.named_parameters()).get(key) is getattr(head, "weight", None) for key in missing):
        raise UserError(f"'{name}' has no output head ({missing[0]} is missing): use a text generation model.")
    if missing:
        raise UserError(f"'{name}' lacks {len(missing)} of its weights ({missing[0]}, ...): fetch or copy it again.")


def check_finite(model: torch.nn.Module, name: str) -> None:
    """Reject NaN and infinite weights, which would make every distribution NaN at the first token that uses them."""
    for part, weight in model.named_parameters():
        if not weight.is_floating_point() or not weight.numel() or weight.is_meta:
            continue
        # NaN and infinity propagate to the extremes, so no mask as large as the weight is needed.
        if not torch.isfinite(torch.stack(weight.detach().aminmax())).all():
            raise UserError(f"'{name}' holds NaN or infinite weights (in {part}): fetch or copy it again.")


def check_causal(model: PreTrainedModel, name: str) -> None:
    """Reject encoders such as BERT, which load as text models but attend to later tokens."""
    if model.config.is_encoder_decoder:
        return
    # (2, 4): only the last token differs, so a causal model computes equal logits before it.
    texts = torch.tensor([[1, 2, 3, 1], [1, 2, 3, 2]], device=model.device) % vocabulary_size(model)
    with torch.no_grad():
        logits, others = model(input_ids=texts, use_cache=False).logits[:, :-1]
    if LogitDrift.of([logits, others]).difference > max_rounding(logits):
        raise UserError(
            f"'{name}' attends to later tokens, so it cannot generate text: use a causal or an encoder-decoder model."
        )


def check_limits(model: PreTrainedModel, name: str) -> None:
    """Reject a config with a sliding window or a context with which nothing can be generated."""
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    if window is not None and not (isinstance(window, int) and window > 0):
        raise UserError(f"'{name}' has a sliding window of {window} tokens: correct or delete it in its config.json.")
    limit = context_length(model)
    if limit is not None and limit < 2:
        raise UserError(f"'{name}' has a context of {count_of(limit, 'token')}, which leaves no room for an answer.")


def check_runs(model: PreTrainedModel, name: str) -> None:
    """Run a prompt, a decode step, a verify pass and a rewind, because many configuration errors show only here.

    A cache that cannot be used is not an error here, because the strategies can do without.
    """
    check_limits(model, name)
    try:
        session = ModelSession(model)
        context = session.begin([1 % vocabulary_size(model)])
        session.feed(context, keep=1)
        room = session.room(context)
        drafts = [0] * (DRAFTS if room is None else min(DRAFTS, room - 1))
        session.feed([*context, *drafts], keep=len(drafts) + 1)
        session.rewind(len(context))
    except UserError:
        return
    except Exception as error:  # anything that a model's own code raises
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"'{name}' was loaded but does not run as a decoder ({first_line(error)}): use a different model."
        ) from error
