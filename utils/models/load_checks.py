"""What a model that was read must pass before it is used: whole, of numbers, causal, and one that runs as the decoders will run it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from utils.decode.logit_drift import Spread, most_rounding
from utils.decode.model_session import ModelSession, context_length, vocabulary_size
from utils.errors import UserError
from utils.models.load_errors import first_line, is_out_of_memory

WINDOW = 2  # drafts


def check_complete(model: PreTrainedModel, outcome: dict[str, Any], name: str) -> None:
    """transformers fills what a checkpoint lacks with random numbers and goes on."""
    missing = sorted(outcome["missing_keys"])
    head = model.get_output_embeddings()
    if missing and all(dict(model.named_parameters()).get(key) is getattr(head, "weight", None) for key in missing):
        raise UserError(
            f"'{name}' has no head that says tokens ({missing[0]} is missing): give a model that was made to write text."
        )
    if missing:
        raise UserError(f"'{name}' lacks {len(missing)} of its weights ({missing[0]}, ...): fetch or copy it again.")


def check_numbers(model: PreTrainedModel, name: str) -> None:
    """A weight that is no number makes every law one that is none, at the first token that meets it."""
    for part, weight in model.named_parameters():
        own = weight.to_local() if isinstance(weight, DTensor) else weight  # of a spread one this process's part
        if (
            own.is_floating_point()
            and own.numel()
            and not own.is_meta
            and not torch.isfinite(torch.stack(own.detach().aminmax())).all()
        ):
            raise UserError(
                f"'{name}' holds weights that are no numbers (NaN or infinite, in {part}): fetch or copy it again."
            )


def check_causal(model: PreTrainedModel, name: str) -> None:
    """Encoders such as BERT load as text models too, and look at what comes later."""
    if model.config.is_encoder_decoder:
        return
    texts = torch.tensor([[1, 2, 3, 1], [1, 2, 3, 2]], device=model.device) % vocabulary_size(model)
    with torch.no_grad():
        logits, others = model(input_ids=texts, use_cache=False).logits[:, :-1]
    if Spread.of([logits, others]).difference > most_rounding(logits):
        raise UserError(
            f"'{name}' looks at what comes later, so it cannot write text: give a causal or an encoder-decoder model."
        )


def check_runs(model: PreTrainedModel, name: str) -> None:
    """A prompt, a step and a window behind it, taken back: what is wrong with a configuration often shows only here.

    A cache that does not serve is left to the strategies, which can do without.
    """
    bound = context_length(model)
    if bound is not None and bound < 2:
        raise UserError(f"'{name}' has a context of {bound} token: there is no room for an answer.")
    try:
        session = ModelSession(model)
        context = session.begin([1 % vocabulary_size(model)])
        session.feed(context, keep=1)
        room = session.room(context)
        drafts = [0] * (WINDOW if room is None else min(WINDOW, room - 1))
        session.feed([*context, *drafts], keep=len(drafts) + 1)
        session.rewind(len(context))
    except UserError:
        return
    except Exception as error:  # whatever a model's own code throws
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"'{name}' was read but does not run as decoders need it ({first_line(error)}): take another model."
        ) from error
