"""The drafters that are models, by the words of /drafter_kind: what each needs, and how long it takes."""

from dataclasses import replace
from functools import partial
from itertools import islice
from statistics import median

from sampling.adaptive_gamma import DraftLength, Tempo
from sampling.drafters.cross_tokenizer import TranslatedDrafter, Translation
from sampling.drafters.head import FreeHead, HeadDrafter, HeadSession
from sampling.drafters.model import Drafter, ModelDrafter
from sampling.speculative import speculative_steps
from sampling.verification import RULES, Rule
from utils.bounds import LOADED
from utils.comparison.strategies import DrafterKind, Job
from utils.decode.layer_cut import first_layers
from utils.decode.model_session import ModelSession, Session
from utils.errors import UserError
from utils.metrics.costs import Costs
from utils.metrics.stopwatch import Stopwatch
from utils.models.draft_head import Grafted

TIMED_DRAFTS, TIMED_ROUNDS = 3, 9  # drafts of a usual round


def loaded_drafter(job: Job, rule: Rule, tempo: Tempo | None = None) -> tuple[Drafter, ModelSession]:
    """The loaded drafter, and the target's session, which keeps the hidden states that the drafter asks for."""
    drafter = job.pair.drafter
    length = draft_length(job, job.pair.drafter_kind, tempo)
    if isinstance(drafter, Grafted):
        target = job.session("target", features=drafter.head.shape.layers)
        head, read = HeadSession(drafter), target.take_features()
        return HeadDrafter(
            head, job.decoding, target.vocab_size, shares_noise=rule.shares_noise, length=length, read=read
        ), target
    target = job.session("target")
    if job.pair.drafter_tokenizer is not None:
        translation = Translation(job.pair.tokenizer, job.pair.drafter_tokenizer)
        opened = partial(ModelSession, drafter, use_cache=job.settings.cache)
        return TranslatedDrafter(opened, translation, target.vocab_size, length=length), target
    session = job.session("drafter")
    return ModelDrafter(session, job.decoding, target.vocab_size, shares_noise=rule.shares_noise, length=length), target


def cut_drafter(job: Job, rule: Rule) -> tuple[Drafter, ModelSession]:
    """The target's own first layers, cut once and kept."""
    if job.drafter == job.pair.drafter_kind:
        return loaded_drafter(job, rule)
    models = job.kept.models
    if job.drafter not in models:
        models[job.drafter] = first_layers(job.pair.target, int(job.drafter.partition(":")[2]))
    target, session = job.session("target"), ModelSession(models[job.drafter], use_cache=job.settings.cache)
    length = draft_length(job, job.drafter)
    return ModelDrafter(session, job.decoding, target.vocab_size, shares_noise=rule.shares_noise, length=length), target


MODEL_KINDS = (
    DrafterKind(f"{LOADED}|model|head", loaded_drafter, own_law=True, loads=True),
    DrafterKind(r"layers:\d+", cut_drafter, own_law=True),
)


def draft_length(job: Job, kind: str | None, tempo: Tempo | None = None) -> DraftLength | None:
    """What chooses the number of drafts of this kind of drafter; None where the settings fix it. tempo: that of a run shared by several."""
    if job.settings.gamma is not None:
        return None
    costs = job.settings.costs or Costs()
    return DraftLength(costs, costs.step(kind), tempo)


def free_drafter(job: Job) -> Session:
    """A session in which the loaded drafter writes by itself."""
    drafter = job.pair.drafter
    if isinstance(drafter, Grafted):
        return FreeHead(drafter, job.pair.target, use_cache=job.settings.cache)
    if job.pair.drafter_tokenizer is not None:
        raise UserError(
            "The drafter cannot run alone: its tokenizer is not the target's, so its answer could not be compared."
        )
    return job.session("drafter", rewinds=False)


def draft_seconds(job: Job, kind: DrafterKind) -> float:
    """Seconds of one draft that is worked out by this kind of drafter, in the middle one of a few rounds; 0 where it drafts nothing."""
    rule = RULES[job.settings.verify]
    watch = Stopwatch()
    drafter, target = replace(job, stopwatch=watch).watched(*kind.make(job, rule))
    endless = replace(job.decoding, end_ids=frozenset())
    rounds = speculative_steps(job.prompt, drafter, target, endless, gamma=TIMED_DRAFTS, rule=rule)
    laps = [watch.read(0) for _ in islice(rounds, TIMED_ROUNDS)]
    return median([lap.drafting / lap.drafts for lap in laps if lap.drafts] or [0.0])
