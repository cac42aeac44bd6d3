"""Autoregressive decoding, one token per forward pass: the baseline of every comparison and the reference of the
tests.
"""

from collections.abc import Iterator
from typing import Any

from sampling.debug import traced
from utils.decode.decoding import Decoding, token_ids
from utils.decode.generation_rules import OWN_ENDS, EndIds, end_tokens
from utils.decode.model_info import check_model
from utils.decode.model_session import ModelSession
from utils.decode.session import Session
from utils.decode.steps import Step
from utils.logits_processor import LogitsProcessor
from utils.metrics.results import tokens_of


def autoregressive_steps(prompt: list[int], session: Session, decoding: Decoding) -> Iterator[Step]:
    """Yield one Step per new token. Raises UserError for an unusable prompt or unusable logits."""
    context = session.begin(prompt)
    start = len(context)
    limit = decoding.length_limit(session.room(context))
    while len(context) - start < limit:
        probs = decoding.probs(session.feed(context, keep=1), session.name)  # (1, V)
        # Keyed by position, as in every strategy: that makes their texts comparable.
        token = decoding.noise.sample(probs[0], len(context) - start)
        context.append(token)
        finish = decoding.finish_of(token, len(context) - start, limit)
        yield Step(drafted=(), accepted=0, token=token, finish=finish)
        if finish:
            return


def autoregressive_generate(
    inputs: list[int],
    model: Any,
    max_gen_len: int = 40,
    logits_processor: LogitsProcessor | None = None,
    eos_tokens_id: EndIds = OWN_ENDS,
    pad_token_id: int = 0,
    use_cache: bool = True,
    debug: bool = False,
    *,
    seed: int | None = None,
) -> list[int]:
    """Generate with one model. Returns the new token ids, with the end token and without the prompt.

    inputs: flat list of prompt ids. model: causal or encoder-decoder; `inputs` then feed the encoder. eos_tokens_id:
    the id or ids that end the text; "model" for those of the model's generation settings, None for none. pad_token_id:
    the decoder's first id if an encoder-decoder config names none; it ends no text. debug: print every step. Raises
    UserError (a ValueError) for an unusable prompt or unusable logits.
    """
    check_model(model, "model")
    decoding = Decoding.of(logits_processor, max_gen_len, end_ids=end_tokens(eos_tokens_id, model), seed=seed)
    session = ModelSession(model, use_cache=use_cache, rewinds=False, start_token=pad_token_id)
    return tokens_of(traced(autoregressive_steps(token_ids(inputs), session, decoding), enabled=debug))


autoregressive_generate_encoder_decoder = autoregressive_generate
