"""The draft-verify loop. Every drafter, verification rule and model kind goes through `speculative_steps`.

It holds no positions, no cache branch, no greedy branch, no text, no clock and no screen: sessions, drafters,
processors and the consumers of Steps own those.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sampling.debug import traced
from sampling.drafters.masked import block_session
from sampling.drafters.model import ModelDrafter
from sampling.verification import REJECTION, Verify, choose_rule
from utils.bounds import WholeRange
from utils.decode.decoding import Decoding, token_ids
from utils.decode.drafts import NO_DRAFT, Draft, Drafter, Verified
from utils.decode.generation_rules import OWN_ENDS, EndIds, end_tokens
from utils.decode.model_info import check_model
from utils.decode.model_session import ModelSession
from utils.decode.session import TargetSession
from utils.decode.steps import FinishReason, Step
from utils.errors import UserError
from utils.logits_processor import LogitsProcessor
from utils.metrics.results import acceptance_of, tokens_of


def speculative_steps(
    prompt: list[int],
    drafter: Drafter,
    target: TargetSession,
    decoding: Decoding,
    *,
    gamma: int,
    first_target: bool = False,
    rule: Verify = REJECTION,
) -> Iterator[Step]:
    """Yield one Step per round of at most `gamma` drafts and one verify pass (Leviathan et al. 2023). Gamma 0 is
    autoregressive decoding. Tokens that the grammar forces come before the drafter's own, and need no verification.

    first_target: the first round drafts nothing. Raises UserError for an unusable prompt, gamma, cache or logits.
    """
    WholeRange(0).check(gamma, "gamma")
    context = target.begin(prompt)
    origin = len(context)
    limit = decoding.length_limit(target.room(context))
    drafter.begin(prompt, context)
    finish: FinishReason | None = None
    while finish is None and (left := limit - (len(context) - origin)) > 0:
        start = len(context)
        drafts_nothing = first_target and start == origin
        new, count = context[origin:], min(gamma, left - 1)  # the target adds one token to the accepted drafts
        forced, draft = ([], NO_DRAFT) if drafts_nothing else _drafts(drafter, decoding, context, new=new, count=count)
        tokens = forced + draft.tokens
        # Row i verifies draft i; the last row predicts the bonus token.
        logits = target.feed(context + tokens, keep=len(tokens) + 1)  # (k+1, V)
        probs = decoding.probs(logits, target.name)  # p, (k+1, V)
        accepted, token = rule(probs[len(forced) :], draft, decoding.noise, start=len(new) + len(forced))
        step = _until_end_token(tokens, len(forced) + accepted, token, decoding.end_ids)
        context.extend(step.tokens)
        finish = decoding.finish_of(context[-1], len(context) - origin, limit)
        # Drops the rejected drafts. The last token is new to the cache and is fed in the next round.
        target.rewind(len(context) - 1)
        drafter.commit(context, Verified(start, logits, probs, target.take_features(), len(forced)))
        places = () if decoding.grammar is None else decoding.grammar.forced_places(new, step.drafted)
        yield replace(step, finish=finish, forced=places)


def _drafts(
    drafter: Drafter, decoding: Decoding, context: list[int], *, new: list[int], count: int
) -> tuple[list[int], Draft]:
    """The tokens that the grammar forces after the `new` tokens of the context, and drafts for what follows, up to the
    first one that is forbidden.
    """
    grammar = decoding.grammar
    if grammar is None:
        return [], drafter.propose(context, count)
    forced = grammar.forced(new, count)
    if forced and forced[-1] in decoding.end_ids:
        return forced, NO_DRAFT
    draft = drafter.propose(context + forced, count - len(forced))
    return forced, replace(draft, tokens=grammar.cut(new + forced, draft.tokens))


def _until_end_token(drafted: list[int], accepted: int, token: int, end_ids: frozenset[int]) -> Step:
    """The round up to its first end token: what follows an accepted one was never part of the text."""
    for index in range(accepted):
        if drafted[index] in end_ids:
            return Step(tuple(drafted[: index + 1]), index + 1, None)
    return Step(tuple(drafted), accepted, token)


def speculative_generate(
    inputs: list[int],
    drafter: Any,
    target: Any,
    tokenizer: Any = None,
    gamma: int = 5,
    logits_processor: LogitsProcessor | None = None,
    max_gen_len: int = 40,
    eos_tokens_id: EndIds = OWN_ENDS,
    pad_token_id: int = 0,
    use_cache: bool = True,
    skip_sample_adjustment: bool = False,
    first_target: bool = True,
    debug: bool = False,
    *,
    seed: int | None = None,
    verify: str = "rejection",
) -> tuple[list[int], float]:
    """Generate with a drafter model. Returns the new token ids (with the end token, without the prompt) and the
    acceptance rate.

    inputs: flat list of prompt ids. drafter, target: two causal or two encoder-decoder models with the same
    vocabulary, except for padding. A PARD model drafts a block in one pass. tokenizer: makes debug output readable.
    gamma: maximum number of drafts per round. eos_tokens_id: as in autoregressive_generate; "model" stands for the
    target's. skip_sample_adjustment: draw corrected tokens from p, which no longer follows the target's distribution.
    first_target: the first round drafts nothing. verify: "rejection", "coupled" (the text of autoregressive_generate
    with the same seed) or "block". The acceptance rate is 0.0 if nothing was drafted. Raises UserError (a ValueError)
    for an unusable prompt, pair, rule, cache, PARD config or logits.
    """
    check_model(drafter, "drafter", "; autoregressive_generate needs no drafter")
    check_model(target, "target")
    if drafter.config.is_encoder_decoder != target.config.is_encoder_decoder:
        raise UserError("Drafter and target must both be decoder-only or both be encoder-decoder models.")
    decoding = Decoding.of(logits_processor, max_gen_len, end_ids=end_tokens(eos_tokens_id, target), seed=seed)
    session = ModelSession(target, use_cache=use_cache, start_token=pad_token_id)
    rule = choose_rule(verify, adjust=not skip_sample_adjustment)
    drafting, block = block_session(ModelSession(drafter, use_cache=use_cache, start_token=pad_token_id), target)
    shares = rule.shares_noise
    model_drafter = ModelDrafter(drafting, decoding, session.vocab_size, shares_noise=shares, block=block)
    rounds = speculative_steps(
        token_ids(inputs), model_drafter, session, decoding, gamma=gamma, first_target=first_target, rule=rule
    )
    steps = list(traced(rounds, enabled=debug, tokenizer=tokenizer))
    return tokens_of(steps), acceptance_of(steps) or 0.0


speculative_generate_encoder_decoder = speculative_generate
