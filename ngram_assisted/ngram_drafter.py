"""N-gram assisted speculative decoding (NASD): an n-gram storage as a drafter.

The storage is filled from the prompt, the text and the target's own runners-up. The draft-verify loop and the
verification rule for one-hot drafts are those of `sampling`. Related: prompt lookup decoding; ANPD (Ou et al. 2024,
arXiv 2404.08698).
"""

from typing import Any

from ngram_assisted.match_drafter import Match, TextDrafter
from ngram_assisted.ngram_storage import NGramStorage
from sampling.debug import traced
from sampling.drafters.adaptive_gamma import AdaptiveGamma
from sampling.speculative import speculative_steps
from sampling.verification import choose_rule
from utils.bounds import FILLER_TOP_K
from utils.decode.decoding import Decoding, token_ids
from utils.decode.drafts import Verified
from utils.decode.generation_rules import OWN_ENDS, EndIds, end_tokens
from utils.decode.model_info import check_model
from utils.decode.model_session import ModelSession
from utils.decode.noise import Domain, Noise
from utils.logits_processor import LogitsProcessor, top_tokens
from utils.metrics.results import acceptance_of, tokens_of


class NGramDrafter(TextDrafter):
    """Drafts the storage's most frequent next tokens, one after the other.

    `storage` is filled in `begin` from the prompt and never reset here. At each new position the generated token and
    the rest of the target's top `filler_top_k` are entered; with 1 only the generated token. `stop_if_unknown` ends a
    draft at an unknown context; otherwise ids are drawn from the seed. `vocab_size` is the target's, if it differs from
    the storage's; ids that only one of them has are neither drafted nor entered.
    """

    def __init__(
        self,
        storage: NGramStorage,
        noise: Noise,
        *,
        filler_top_k: int = 3,
        stop_if_unknown: bool = True,
        vocab_size: int | None = None,
        adaptive: AdaptiveGamma | None = None,
        observed: bool = False,
    ) -> None:
        super().__init__(adaptive, observed=observed)
        FILLER_TOP_K.check(filler_top_k, "filler_top_k")
        self._storage, self._noise = storage, noise
        self._filler_top_k, self._stop_if_unknown = filler_top_k, stop_if_unknown
        self._vocab_size = min(storage.vocab_size, storage.vocab_size if vocab_size is None else vocab_size)
        self._origin = 0  # context length at which the new tokens begin
        self._reach = storage.n - 1  # tokens of context that matter

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._origin = len(context)
        self._storage.initialize(prompt)
        super().begin(prompt, context)

    def _matches(self, context: list[int], count: int) -> list[Match]:
        start = len(context) - self._origin
        known = context[-self._reach :]
        drafts: list[Match] = []
        for position in range(start, start + count):
            # vocab_size stands for no token; ids that only the storage has are handled like it.
            token, length = self._storage.look_up(known) or (self._vocab_size, 0)
            if token >= self._vocab_size:
                if self._stop_if_unknown:
                    break
                token, length = int(self._noise.uniform(Domain.FILL, position, start) * self._vocab_size), 0
            drafts.append(Match(token, length))
            known = [*known, token][-self._reach :]
        return drafts

    def commit(self, context: list[int], verified: Verified) -> None:
        super().commit(context, verified)
        # Row i of the logits predicts the token at start + i, whether it was a draft or added.
        for row, index in enumerate(range(verified.start, len(context))):
            top = top_tokens(verified.logits[row], self._filler_top_k) if self._filler_top_k > 1 else []
            runners_up = [token for token in top if token != context[index] and token < self._vocab_size]
            generated = [context[index]] if context[index] < self._vocab_size else []
            # The generated token goes first: among equal counts the token seen first is drafted.
            self._storage.update(context[max(0, index - self._reach) : index], generated + runners_up)


def ngram_assisted_speculative_generate(
    inputs: list[int],
    ngramstorage: NGramStorage,
    target: Any,
    tokenizer: Any = None,
    gamma: int = 5,
    filler_top_k: int = 3,
    logits_processor: LogitsProcessor | None = None,
    max_gen_len: int = 40,
    eos_tokens_id: EndIds = OWN_ENDS,
    pad_token_id: int = 0,
    use_cache: bool = True,
    first_target: bool = True,
    stop_if_unknown: bool = False,
    debug: bool = False,
    *,
    seed: int | None = None,
    verify: str = "rejection",
) -> tuple[list[int], float]:
    """Generate with an n-gram storage as drafter. Returns the new token ids (with the end token, without the prompt)
    and the acceptance rate.

    inputs: flat list of prompt ids, entered into `ngramstorage` by its initialize(); the storage is never reset here.
    target: causal or encoder-decoder model. tokenizer: makes debug output readable. eos_tokens_id: as in
    autoregressive_generate; "model" stands for the target's. first_target: the first round drafts nothing. verify: as
    in speculative_generate; one-hot drafts are verified alike under every rule, and the text is that of autoregressive
    decoding. The acceptance rate is 0.0 if nothing was drafted. Raises UserError (a ValueError) for an unusable
    prompt, argument, rule, cache or logits.
    """
    check_model(target, "target")
    decoding = Decoding.of(logits_processor, max_gen_len, end_ids=end_tokens(eos_tokens_id, target), seed=seed)
    session = ModelSession(target, use_cache=use_cache, start_token=pad_token_id)
    drafter = NGramDrafter(
        ngramstorage,
        decoding.noise,
        filler_top_k=filler_top_k,
        stop_if_unknown=stop_if_unknown,
        vocab_size=session.vocab_size,
    )
    rule = choose_rule(verify)
    rounds = speculative_steps(
        token_ids(inputs), drafter, session, decoding, gamma=gamma, first_target=first_target, rule=rule
    )
    steps = list(traced(rounds, enabled=debug, tokenizer=tokenizer))
    return tokens_of(steps), acceptance_of(steps) or 0.0
