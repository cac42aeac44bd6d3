"""Verification rules: how many drafts are accepted, and which token the target adds.

Pure functions of the target's distribution p, the draft and the noise; neither models nor caches are known here.
Symbols as in Leviathan et al. 2023 (arXiv 2211.17192). Each rule returns (accepted, token). Bonus tokens, and all
tokens of `verify_one_hot`, are drawn with the target's noise at their position.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from utils.bounds import RULES as NAMES
from utils.decode.drafts import Draft
from utils.decode.noise import Domain, Noise
from utils.errors import UserError, check_choice
from utils.logits_processor import one_thread

Verify = Callable[..., tuple[int, int]]  # (p (k+1, V), draft, noise, start=) -> (accepted, token)


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the table of rules.

    `verify` is for drafts that have a distribution q. Drafts without one are verified by `verify_one_hot` under every
    rule. With `shares_noise`, drafters draw with the target's own noise, so that both agree as often as possible; such
    drafts need no q.
    """

    name: str
    verify: Verify
    shares_noise: bool = False

    @one_thread()
    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, *, start: int) -> tuple[int, int]:
        """Verify k drafts by the target's distribution (k+1, V). `start` is the round's first position among new
        tokens.
        """
        verify = verify_one_hot if draft.probs is None else self.verify
        return verify(probs, draft, noise, start=start)


def verify_one_hot(probs: Tensor, draft: Draft, noise: Noise, *, start: int) -> tuple[int, int]:
    """Draw x ~ p with the target's noise, emit it, and continue while it equals the draft.

    The text is that of autoregressive decoding with the same seed, token for token, whatever was drafted. For one-hot
    drafts (n-grams) this accepts as often as any rule can. For drafts drawn with the same noise it is the coupling of
    Daliri, Musco and Suresh 2024 (arXiv 2408.07978): they match with probability sum_j 1 / sum_i max(p_i / p_j, q_i /
    q_j).
    """
    tokens = noise.samples(probs, start)
    for index, drafted in enumerate(draft.tokens):
        token = next(tokens)
        if token != drafted:
            return index, token
    return len(draft.tokens), next(tokens)


def verify_rejection(probs: Tensor, draft: Draft, noise: Noise, *, start: int, adjust: bool = True) -> tuple[int, int]:
    """Speculative sampling (Leviathan et al. 2023; Chen et al. 2023, arXiv 2302.01318).

    Accept x ~ q with probability min(1, p(x)/q(x)). At the first rejection draw from norm(max(0, p - q)). If all are
    accepted, draw a bonus token from p. Without `adjust`, the corrected token is drawn from p (faster, but biased).
    """
    assert draft.probs is not None
    for index, (p, q) in enumerate(zip(_of(probs, draft.tokens), _of(draft.probs, draft.tokens), strict=True)):
        position = start + index
        # Rejected with probability 1 - min(1, p/q), written without a division.
        if noise.uniform(Domain.ACCEPT, position, start) * q >= p:
            weights = residual_of(probs[index], draft.probs[index]) if adjust else probs[index]
            return index, _corrected(weights, probs[index], noise, position=position, start=start)
    return len(draft.tokens), noise.sample(probs[-1], start + len(draft.tokens))


def verify_block(probs: Tensor, draft: Draft, noise: Noise, *, start: int) -> tuple[int, int]:
    """Block verification (Sun et al. 2024, arXiv 2403.10444): drafts are verified jointly, and at least as many are
    accepted on average.

    r_i = min(1, r_(i-1) p(x_i)/q(x_i)), r_0 = 1. The longest prefix i is accepted for which u_i <= h_i, where h_i =
    M_i / (M_i + 1 - r_i), M_i is the mass of max(0, r_i p - q) after it, and h_gamma = r_gamma. The next token is
    drawn from that residual, and after all gamma drafts from p.
    """
    assert draft.probs is not None
    ratios: list[float] = [1]  # r_0, r_1, ...
    for p, q in zip(_of(probs, draft.tokens), _of(draft.probs, draft.tokens), strict=True):
        ratios.append(min(1, ratios[-1] * p / q))
    count = len(draft.tokens)
    # From the longest prefix down, as the largest i wins. h_gamma = r_gamma needs no residual.
    if not count or noise.uniform(Domain.ACCEPT, start + count - 1, start) <= ratios[count]:
        return count, noise.sample(probs[-1], start + count)
    for accepted in range(count - 1, -1, -1):
        weights = residual_of(probs[accepted] * ratios[accepted], draft.probs[accepted])  # max(0, r_i p - q)
        if not accepted:  # the empty prefix needs no test
            break
        if _accepts(weights, ratios[accepted], noise.uniform(Domain.ACCEPT, start + accepted - 1, start)):
            break
    return accepted, _corrected(weights, probs[accepted], noise, position=start + accepted, start=start)


def _accepts(residual: Tensor, ratio: float, uniform: float) -> bool:
    """Whether u <= h = M / (M + 1 - r), which is 1 if r is 1."""
    if ratio == 1:
        return True
    mass = residual.sum().item()
    return bool(uniform <= mass / (mass + 1 - ratio))


def _of(probs: Tensor, tokens: list[int]) -> list[float]:
    """The probability of each token in its own row, in one transfer."""
    # Only these k numbers leave the device, not k rows of V. Nor are their indices uploaded.
    if tokens and not _is_on_host(probs):
        chosen = torch.stack([probs[index, token] for index, token in enumerate(tokens)])
    else:
        chosen = probs[range(len(tokens)), tokens]
    numbers: list[float] = chosen.tolist()
    return numbers


def _is_on_host(probs: Tensor) -> bool:
    return probs.device.type == "cpu"


def residual_of(p: Tensor, q: Tensor) -> Tensor:
    return (p - q.to(p.device)).clamp(min=0)  # rows of q cross devices only after a rejection


def _corrected(residual: Tensor, p: Tensor, noise: Noise, *, position: int, start: int) -> int:
    if residual is p:
        return noise.sample(p, position)
    residual = residual.cpu()  # at once, because each question to a GPU makes the host wait
    # Only rounding can reject a draft when p nowhere exceeds q; the residual's limit is then p itself.
    if not residual.any():
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
# The names are repeated in utils.bounds, because the flags must not import torch.
assert tuple(RULES) == NAMES
REJECTION = RULES["rejection"]


def choose_rule(name: str, *, adjust: bool = True) -> Rule:
    """The rule of this name. Raises UserError for an unknown name, or if `adjust` is False for a rule that never
    adjusts.
    """
    rule = RULES[check_choice(name, NAMES, "verification rule")]
    if adjust:
        return rule
    if rule is not REJECTION:
        raise UserError(f"skip_sample_adjustment requires verify='rejection'; leave it out with verify='{name}'.")
    return replace(rule, verify=partial(verify_rejection, adjust=False))
