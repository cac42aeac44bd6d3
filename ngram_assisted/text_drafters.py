"""Drafters of text seen before: n-grams (NASD), and prompt lookup or suffix decoding, depending on the index.

LongestMatch is prompt lookup (Saxena 2023, "Prompt Lookup Decoding"), SuffixAutomaton suffix decoding (Oliaro et al.
2024, arXiv 2411.04975). NASD fills its storage from the prompt, the text and the target's own runners-up. Related: ANPD
(Ou et al. 2024, arXiv 2404.08698).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ngram_assisted.ngram_storage import NGramStorage
from sampling.debug import traced
from sampling.drafters.adaptive_gamma import AdaptiveGamma, Bucket
from sampling.speculative import speculative_steps
from sampling.verification import choose_rule
from utils.bounds import FILLER_TOP_K
from utils.decode.decoding import Decoding, token_ids
from utils.decode.drafts import Draft, DraftEvidence, Verified
from utils.decode.generation_rules import OWN_ENDS, EndIds, end_tokens
from utils.decode.model_info import check_model
from utils.decode.model_session import ModelSession
from utils.decode.noise import Domain, Noise
from utils.decode.steps import matching_prefix
from utils.logits_processor import LogitsProcessor, top_tokens
from utils.metrics.results import acceptance_of, tokens_of

RECENT = 256  # earlier occurrences that are compared, the most recent ones
LONGEST = 64  # matches are not compared beyond this length


class Match(NamedTuple):
    """A token, and how many tokens of context it was found by; 0 if it was drawn from the seed."""

    token: int
    length: int


def buckets_of(matches: Sequence[Match]) -> list[Bucket]:
    """The buckets of adaptive gamma: drafts found by longer matches are accepted more often."""
    return [("match", match.length) for match in matches]


class TextDrafter(ABC):
    """Drafts that are found by matches in earlier text. `adaptive` chooses how many; without it, as many as requested.
    `observed` adds the lengths of the matches.
    """

    def __init__(self, adaptive: AdaptiveGamma | None, *, observed: bool) -> None:
        self._adaptive, self._observed = adaptive, observed
        self._round: list[Match] = []
        self._known = 0  # tokens of the context that are entered

    @abstractmethod
    def _enter(self, context: list[int], verified: Verified | None = None) -> None:
        """Enter the tokens of the context that are new. Those without a verify pass are forced by a grammar."""

    @abstractmethod
    def _matches(self, context: list[int], count: int) -> list[Match]:
        """At most `count` drafts."""

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._known = len(context)
        if self._adaptive is not None:
            self._adaptive.begin(prompt, context)

    def propose(self, context: list[int], count: int) -> Draft:
        self._enter(context)
        matches = self._matches(context, count)
        if self._adaptive is not None:
            self._adaptive.follow(context)
            matches = matches[: self._adaptive.best(buckets_of(matches))]
        self._round = matches
        evidence = DraftEvidence(match_lengths=[match.length for match in matches]) if self._observed else None
        return Draft([match.token for match in matches], evidence=evidence)

    def commit(self, context: list[int], verified: Verified) -> None:
        if self._adaptive is not None:
            accepted = matching_prefix([match.token for match in self._round], context[verified.drafted_from :])
            self._adaptive.learn(buckets_of(self._round), accepted)
        self._round = []
        self._enter(context, verified)


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

    def _enter(self, context: list[int], verified: Verified | None = None) -> None:
        for index in range(self._known, len(context)):
            # Row i of the logits predicts the token at start + i. A grammar that forces a token leaves no runners-up.
            row = None if verified is None or self._filler_top_k == 1 else verified.logits[index - verified.start]
            top = [] if row is None else top_tokens(row, self._filler_top_k)
            runners_up = [token for token in top if token != context[index] and token < self._vocab_size]
            generated = [context[index]] if context[index] < self._vocab_size else []
            # The generated token goes first: among equal counts the token seen first is drafted.
            self._storage.update(context[max(0, index - self._reach) : index], generated + runners_up)
        self._known = len(context)


class MatchIndex(ABC):
    """A growing text that proposes how it may continue."""

    def __init__(self) -> None:
        self._separators = 0

    def separate(self) -> None:
        """What follows is a different text: no match may span both."""
        self._separators += 1
        self._add(-self._separators)  # unique, so that nothing matches across it

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._add(token)

    @abstractmethod
    def _add(self, token: int) -> None:
        """Append a token, or a separator, which is negative."""

    @abstractmethod
    def drafts(self, count: int) -> list[Match]:
        """At most `count` tokens that may follow."""


class MatchDrafter(TextDrafter):
    """Drafts what an index of earlier text predicts.

    `index` receives the prompt and every new token, and is never reset here. Matches of fewer than `shortest` tokens
    draft nothing.
    """

    def __init__(
        self,
        index: MatchIndex,
        *,
        shortest: int = 1,
        adaptive: AdaptiveGamma | None = None,
        observed: bool = False,
    ) -> None:
        super().__init__(adaptive, observed=observed)
        self._index, self._shortest = index, shortest

    def begin(self, prompt: list[int], context: list[int]) -> None:
        super().begin(prompt, context)
        self._index.separate()
        self._index.extend(prompt)
        if context != prompt:  # the prompt went to an encoder
            self._index.separate()
            self._index.extend(context)

    def _matches(self, context: list[int], count: int) -> list[Match]:
        matches = self._index.drafts(count)
        return matches if matches and matches[0].length >= self._shortest else []

    def _enter(self, context: list[int], verified: Verified | None = None) -> None:
        self._index.extend(context[self._known :])
        self._known = len(context)


class LongestMatch(MatchIndex):
    """Indexes the positions after every pair of tokens, and compares backwards from there.

    Matches have at least `min_length` tokens. Among matches of equal length the most recent one wins.
    """

    def __init__(self, min_length: int = 2) -> None:
        super().__init__()
        self._min_length = min_length
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # last tokens -> positions where they ended

    def _add(self, token: int) -> None:
        if token >= 0 and len(self._text) >= self._min_length:
            # Entered once the next token is known, so that the end of the text does not match itself.
            self._ends.setdefault(self._key(), []).append(len(self._text))
        self._text.append(token)

    def _key(self) -> tuple[int, ...]:
        return tuple(self._text[-self._min_length :])

    def drafts(self, count: int) -> list[Match]:
        text, longest, best = self._text, 0, 0
        if len(text) < self._min_length:
            return []
        for end in reversed(self._ends.get(self._key(), [])[-RECENT:]):
            length = self._min_length
            while length < min(end, LONGEST) and text[end - length - 1] == text[-length - 1]:
                length += 1
            if length > longest:  # ties stay with the most recent one, which came first
                longest, best = length, end
        drafts: list[Match] = []
        for token in text[best : best + count] if longest else []:
            if token < 0:  # the earlier text ended here
                break
            # Each draft lengthens the match that the next one is found by.
            drafts.append(Match(token, longest + len(drafts)))
        return drafts


class SuffixAutomaton(MatchIndex):
    """The smallest automaton of all substrings (Blumer et al. 1985), built token by token. Each state counts its
    occurrences.

    Adding a token takes amortised constant time, plus one step for every state whose strings end there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next: list[dict[int, int]] = [{}]  # transitions by token; state 0 is the empty string
        self._link = [-1]  # suffix link: the longest suffix that is in another state
        self._length = [0]  # of the longest string of the state
        self._count = [0]
        self._latest = [0]  # position where the state's strings ended last: breaks ties
        self._last = 0
        self.size = 0  # tokens, separators included

    def _add(self, token: int) -> None:
        self.size += 1
        new = self._new_state({}, self._length[self._last] + 1, 0, 0)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = 0 if state < 0 else self._suffix_state(state, token)
        self._last = new
        while new > 0:  # every suffix occurs once more
            self._count[new] += 1
            self._latest[new] = self.size
            new = self._link[new]

    def _suffix_state(self, state: int, token: int) -> int:
        """The state of the longest suffix that occurred before, split off if the state also holds longer strings."""
        child = self._next[state][token]
        if self._length[child] == self._length[state] + 1:
            return child
        # The clone takes the child's shorter strings, which from now on occur more often than the longer ones.
        clone = self._new_state(dict(self._next[child]), self._length[state] + 1, self._count[child], self._link[child])
        self._latest[clone] = self._latest[child]
        self._link[child] = clone
        while state >= 0 and self._next[state].get(token) == child:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _new_state(self, transitions: dict[int, int], length: int, count: int, link: int) -> int:
        self._next.append(transitions)
        self._length.append(length)
        self._count.append(count)
        self._link.append(link)
        self._latest.append(0)
        return len(self._next) - 1

    def drafts(self, count: int) -> list[Match]:
        state = self._link[self._last] if self._last else 0  # the longest suffix that occurred before
        drafts: list[Match] = []
        length = self._length[state] if state > 0 else 0
        while len(drafts) < count and state > 0:
            token, state = self._most_frequent(state)
            if token < 0:
                break
            drafts.append(Match(token, length))
            length += 1
        return drafts

    def _most_frequent(self, state: int) -> tuple[int, int]:
        """The most frequent next token, the latest among equals, and the state after it. -1 if only separators
        follow.
        """
        candidates = (
            (self._count[child], self._latest[child], token, child)
            for token, child in self._next[state].items()
            if token >= 0
        )
        return max(candidates, default=(0, 0, -1, 0))[2:]


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
