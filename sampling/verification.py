"""Verification rules: how many drafts stand, and which token the target adds. Pure functions of the laws, the draft and the noise.

Symbols as in Leviathan et al. 2023 (arXiv 2211.17192): p is the target's law, q the drafter's, gamma the number of drafts. Neither models
nor caches are known here. Each rule returns (accepted, token): drafts 0..accepted-1 stand and `token` follows them. Every token that is
drawn from p itself is drawn with the target's noise at its position, whatever the rule.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from sampling.drafters.model import Draft
from utils.bounds import RULES as NAMES
from utils.decode.noise import Domain, Noise
from utils.errors import UserError, one_of

Judge = Callable[..., tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Rule:
    """How drafts are judged.

    judge: what is done with drafts that have a law of their own. shares_noise: drafters draw with the target's own noise, so that the two
    agree as often as one noise can make them; such drafts need no law. Drafts without a law are judged alike under every rule.
    """

    name: str
    judge: Judge
    shares_noise: bool = False

    def __call__(self, law: Tensor, draft: Draft, noise: Noise, *, start: int) -> tuple[int, int]:
        """Judge k drafts by the target's law (k+1, V); `start` is the round's first position among the run's new tokens."""
        judge = verify_one_hot if draft.probs is None else self.judge
        return judge(law, draft, noise, start=start)


def verify_one_hot(law: Tensor, draft: Draft, noise: Noise, *, start: int) -> tuple[int, int]:
    """Draw x ~ p with the target's noise, emit it always, and go on while it equals the draft.

    The text is plain decoding's own at the same seed, token for token, whatever was drafted and however. For drafts that have no law of
    their own (n-grams) nothing is lost by it; for drafts that were drawn with the same noise it is the coupling of Daliri, Musco and
    Suresh (2024, arXiv 2408.07978), where they match with probability sum_j 1 / sum_i max(p_i / p_j, q_i / q_j).
    """
    tokens = noise.samples(law, start)
    for index, wanted in enumerate(draft.tokens):
        token = next(tokens)
        if token != wanted:
            return index, token
    return len(draft.tokens), next(tokens)


def verify_rejection(law: Tensor, draft: Draft, noise: Noise, *, start: int, adjust: bool = True) -> tuple[int, int]:
    """Speculative sampling (Leviathan et al. 2023; Chen et al. 2023, arXiv 2302.01318).

    Accept x ~ q with probability min(1, p(x)/q(x)); at the first rejection draw from norm(max(0, p - q)); if all stand, draw a bonus
    token from p. adjust: False draws the corrected token from p (a faster, biased variant).
    """
    assert draft.probs is not None
    for index, (p, q) in enumerate(zip(_chosen(law, draft.tokens), _chosen(draft.probs, draft.tokens), strict=True)):
        position = start + index
        if noise.uniform(Domain.ACCEPT, position, start) * q >= p:
            residual = _residual(law[index], draft.probs[index]) if adjust else law[index]
            return index, _corrected(residual, law[index], noise, position=position, start=start)
    return len(draft.tokens), noise.sample(law[-1], start + len(draft.tokens))


def verify_block(law: Tensor, draft: Draft, noise: Noise, *, start: int) -> tuple[int, int]:
    """Block verification (Sun et al. 2024, arXiv 2403.10444): drafts are judged together, and on average at least as many stand.

    r_i = min(1, r_(i-1) p(x_i)/q(x_i)) with r_0 = 1 is how much of the first i drafts the target wants. The longest i stands for which
    u_i <= h_i, where h_i = M_i / (M_i + 1 - r_i), M_i is the mass of max(0, r_i p - q) behind them, and h_gamma = r_gamma. The next
    token is drawn from that residual, and behind all gamma drafts from p.
    """
    assert draft.probs is not None
    wanted: list[float] = [1]  # r_0
    for p, q in zip(_chosen(law, draft.tokens), _chosen(draft.probs, draft.tokens), strict=True):
        wanted.append(min(1, wanted[-1] * p / q))
    count = len(draft.tokens)
    if not count or noise.uniform(Domain.ACCEPT, start + count - 1, start) <= wanted[count]:
        return count, noise.sample(law[-1], start + count)
    for accepted in range(count - 1, -1, -1):
        residual = _residual(law[accepted] * wanted[accepted], draft.probs[accepted])
        if not accepted or _stands(
            residual, wanted[accepted], noise.uniform(Domain.ACCEPT, start + accepted - 1, start)
        ):
            break
    return accepted, _corrected(residual, law[accepted], noise, position=start + accepted, start=start)


def _stands(residual: Tensor, wanted: float, uniform: float) -> bool:
    """Whether u <= h = M / (M + 1 - r), which is 1 where r is 1."""
    if wanted == 1:
        return True
    mass = residual.sum().item()
    return bool(uniform <= mass / (mass + 1 - wanted))


def _chosen(law: Tensor, tokens: list[int]) -> list[float]:
    """The probability of each token in its own row; one transfer for all."""
    return law[range(len(tokens)), tokens].tolist()


def _residual(p: Tensor, q: Tensor) -> Tensor:
    return (p - q.to(p.device)).clamp(min=0)


def _corrected(residual: Tensor, p: Tensor, noise: Noise, *, position: int, start: int) -> int:
    # Only rounding can reject where nothing of p is left over q; p itself is then the residual's limit.
    if residual is p or not residual.any():
        return noise.sample(p, position)
    return noise.pick(residual, Domain.RESIDUAL, position, start)


RULES = {
    rule.name: rule
    for rule in (
        Rule("rejection", verify_rejection),
        Rule("coupled", verify_one_hot, shares_noise=True),
        Rule("block", verify_block),
    )
}
assert tuple(RULES) == NAMES
REJECTION = RULES["rejection"]


def choose_rule(name: str, *, adjust: bool = True) -> Rule:
    """The rule of this name. Raises UserError for an unknown one, and where a rule that never adjusts is asked not to."""
    rule = RULES[one_of(name, NAMES, "verification rule")]
    if adjust:
        return rule
    if rule is not REJECTION:
        raise UserError(f"skip_sample_adjustment belongs to verify='rejection'; leave it out with verify='{name}'.")
    return replace(rule, judge=partial(verify_rejection, adjust=False))
