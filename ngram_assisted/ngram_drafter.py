"""N-gram assisted speculative decoding (NASD): a storage as a Drafter, filled from the prompt, the text and the target's own runners-up.

The loop and the exact rule for one-hot drafts are sampling's. Here: what to draft from the storage, and what to enter after a round.
Relatives: prompt lookup decoding; ANPD (arXiv 2404.08698).
"""

from collections.abc import Iterable
from typing import Any

from ngram_assisted.ngram_storage import NGramStorage
from sampling.adaptive_gamma import DraftLength, Mark
from sampling.debug import traced
from sampling.drafters.model import Draft, Verified, agreed
from sampling.speculative import speculative_steps
from sampling.verification import choose_rule
from utils.bounds import MAX_FILLER
from utils.decode.decoding import Decoding, token_ids
from utils.decode.model_session import ModelSession
from utils.decode.noise import Domain, Noise
from utils.errors import UserError
from utils.logits_processor import LogitsProcessor, top_tokens
from utils.metrics.results import acceptance_of, tokens_of


class NGramDrafter:
    """Drafts the storage's most frequent followers, one after the other.

    storage: filled in `begin` from the prompt, never reset here. filler_top_k: at each new position the generated token and the rest of
    the target's top k are entered; 1 enters only what was generated. stop_if_unknown: end a draft at an unknown context; otherwise
    unknown positions get ids drawn from the seed. vocab_size: the target's, where it is not the storage's; ids that only
    one of them has are neither drafted nor entered. length: drafts no more than pay; without it as many as it is asked for.
    """

    def __init__(
        self,
        storage: NGramStorage,
        noise: Noise,
        *,
        filler_top_k: int = 3,
        stop_if_unknown: bool = True,
        vocab_size: int | None = None,
        length: DraftLength | None = None,
    ) -> None:
        if not 1 <= filler_top_k <= MAX_FILLER:
            raise UserError(f"filler_top_k {filler_top_k} is out of range: 1 to {MAX_FILLER}.")
        self._storage, self._noise = storage, noise
        self._filler_top_k, self._stop_if_unknown = filler_top_k, stop_if_unknown
        self._vocab_size = min(storage.vocab_size, storage.vocab_size if vocab_size is None else vocab_size)
        self._length = length
        self._sent: list[tuple[int, int]] = []  # the round's drafts and the lengths of the contexts that proposed them
        self._runners_up: list[list[int]] = []  # entered at each new position besides its token
        self._origin = 0
        self._reach = storage.n - 1  # how far back a context matters

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._origin, self._runners_up = len(context), []
        self._storage.initialize(prompt)

    def propose(self, context: list[int], count: int) -> Draft:
        found = self._found(context, count)
        if self._length is not None:
            found = found[: self._length.best(_marks(found))]
        self._sent = found
        return Draft([token for token, _ in found], matched=[size for _, size in found], runners_up=self._runners_up)

    def _found(self, context: list[int], count: int) -> list[tuple[int, int]]:
        """At most `count` drafts, each with the length of the context that proposed it; 0 where it was drawn from the seed."""
        start = len(context) - self._origin
        window = context[-self._reach :]
        drafts: list[tuple[int, int]] = []
        for position in range(start, start + count):
            token, size = self._storage.look_up(window) or (self._vocab_size, 0)
            if token >= self._vocab_size:
                if self._stop_if_unknown:
                    break
                token, size = int(self._noise.uniform(Domain.FILL, position, start) * self._vocab_size), 0
            drafts.append((token, size))
            window = [*window, token][-self._reach :]
        return drafts

    def commit(self, context: list[int], verified: Verified) -> None:
        if self._length is not None:
            self._length.learn(
                _marks(self._sent), agreed([token for token, _ in self._sent], context[verified.start :])
            )
        for row, index in enumerate(range(verified.start, len(context))):
            best = top_tokens(verified.logits[row], self._filler_top_k) if self._filler_top_k > 1 else []
            self._runners_up.append([token for token in best if token != context[index] and token < self._vocab_size])
            said = [context[index]] if context[index] < self._vocab_size else []
            self._storage.update(context[max(0, index - self._reach) : index], said + self._runners_up[-1])


def _marks(found: list[tuple[int, int]]) -> list[Mark]:
    return [("size", size) for _, size in found]


def ngram_assisted_speculative_generate(
    inputs: list[int],
    ngramstorage: NGramStorage,
    target: Any,
    tokenizer: Any = None,
    gamma: int = 5,
    filler_top_k: int = 3,
    logits_processor: LogitsProcessor | None = None,
    max_gen_len: int = 40,
    eos_tokens_id: int | Iterable[int] | None = 1,
    pad_token_id: int = 0,
    use_cache: bool = True,
    first_target: bool = True,
    stop_if_unknown: bool = False,
    debug: bool = False,
    *,
    seed: int | None = None,
    verify: str = "rejection",
) -> tuple[list[int], float]:
    """New token ids (end token included, prompt left out) and the acceptance rate, 0.0 where nothing was drafted.

    inputs: flat list of prompt ids, entered into `ngramstorage` by its initialize(); it is never reset here. target: causal or
    encoder-decoder model. tokenizer: only for readable text with debug=True. first_target: the first round drafts nothing.
    verify: as in speculative_generate; drafts without a law are judged alike, and the text is plain decoding's own, under every rule.
    Raises UserError (a ValueError) for an unusable prompt, argument, rule, cache or logits.
    """
    decoding = Decoding.of(logits_processor, max_gen_len, end_ids=eos_tokens_id, seed=seed)
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
