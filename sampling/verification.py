"""Verification rules: how many drafts stand, and which token the target adds. Pure functions of the laws, the draft and the noise.

Symbols as in Leviathan et al. 2023 (arXiv 2211.17192): p is the target's law, q the drafter's, gamma the number of drafts. Neither models
nor caches are known here. Each rule returns (accepted, token): drafts 0..accepted-1 stand and `token` follows them.
"""

from torch import Tensor

from sampling.drafting import Draft
from utils.seeding import Domain, Noise


def verify(law: Tensor, draft: Draft, noise: Noise, *, start: int, adjust: bool = True) -> tuple[int, int]:
    """Judge a draft of k tokens by the target's law (k+1, V); `start` is the round's first position among the run's new tokens.

    adjust: draw a corrected token from the residual, as exactness demands; False draws it from p (a faster, biased variant).
    """
    if draft.probs is None:
        return verify_one_hot(law, draft.tokens, noise, start=start)
    return verify_rejection(law, draft, noise, start=start, adjust=adjust)


def verify_one_hot(law: Tensor, drafted: list[int], noise: Noise, *, start: int) -> tuple[int, int]:
    """Drafts without a law of their own: draw x ~ p, emit it always, and go on while it equals the draft. Exact for any draft."""
    tokens = noise.samples(law, start)
    for index, wanted in enumerate(drafted):
        token = next(tokens)
        if token != wanted:
            return index, token
    return len(drafted), next(tokens)


def verify_rejection(law: Tensor, draft: Draft, noise: Noise, *, start: int, adjust: bool = True) -> tuple[int, int]:
    """Speculative sampling (Leviathan et al. 2023; Chen et al. 2023, arXiv 2302.01318).

    Accept x ~ q with probability min(1, p(x)/q(x)); at the first rejection draw from norm(max(0, p - q)); if all stand, draw a bonus
    token from p.
    """
    assert draft.probs is not None
    for index, (p, q) in enumerate(zip(_chosen(law, draft.tokens), _chosen(draft.probs, draft.tokens), strict=True)):
        position = start + index
        if noise.uniform(Domain.ACCEPT, position, start) * q >= p:
            weights = _residual(law[index], draft.probs[index]) if adjust else law[index]
            return index, noise.pick(weights, Domain.RESIDUAL, position, start)
    return len(draft.tokens), noise.sample(law[-1], start + len(draft.tokens))


def _chosen(law: Tensor, tokens: list[int]) -> list[float]:
    """The probability of each token in its own row; one transfer for all."""
    return law[range(len(tokens)), tokens].tolist()


def _residual(p: Tensor, q: Tensor) -> Tensor:
    residual = (p - q.to(p.device)).clamp(min=0)
    # Only rounding can reject where p and q are the same law; p itself is then the residual's limit.
    return residual if bool(residual.any()) else p
