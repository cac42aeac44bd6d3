"""What drafts for a job: the drafter that was loaded with the pair, whatever it is, and the sessions it needs."""

from sampling.drafting import Drafter, ModelDrafter
from sampling.head_drafter import FreeHead, HeadDrafter, HeadSession
from sampling.verification import Rule
from utils.caching import ModelSession, Session
from utils.models.heads import Grafted
from utils.strategies import Job


def drafter_and_target(job: Job, rule: Rule) -> tuple[Drafter, ModelSession]:
    """The loaded drafter, and the target's session, which keeps the hidden states that the drafter asks for."""
    drafter = job.pair.drafter
    if isinstance(drafter, Grafted):
        target = job.session("target", features=drafter.head.shape.layers)
        return HeadDrafter(HeadSession(drafter), job.decoding, target.vocab_size, shares_noise=rule.shares_noise), target
    target = job.session("target")
    return ModelDrafter(job.session("drafter"), job.decoding, target.vocab_size, shares_noise=rule.shares_noise), target


def free_drafter(job: Job) -> Session:
    """A session in which the loaded drafter writes by itself."""
    drafter = job.pair.drafter
    if isinstance(drafter, Grafted):
        return FreeHead(drafter, job.pair.target, use_cache=job.settings.cache)
    return job.session("drafter", rewinds=False)
