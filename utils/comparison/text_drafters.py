"""The drafters that go by what was said, by the words of /drafter_kind, and the chain of such a one and a model."""

from ngram_assisted.match_drafter import MatchDrafter
from ngram_assisted.ngram_drafter import NGramDrafter
from ngram_assisted.prompt_lookup import LongestMatch, SuffixAutomaton
from sampling.adaptive_gamma import Tempo
from sampling.drafters.chain import ChainDrafter
from sampling.drafters.model import Drafter
from sampling.verification import Rule
from utils.bounds import LOADED
from utils.comparison.model_drafters import draft_length, loaded_drafter
from utils.comparison.strategies import DrafterKind, Job
from utils.decode.model_session import ModelSession


def storage_drafter(job: Job, rule: Rule) -> tuple[Drafter, ModelSession]:
    """NASD: the session's n-gram storage, filled from the target's runners-up too."""
    target, fill = job.session("target"), job.settings.top_k_filler
    length = draft_length(job, "ngram")
    return NGramDrafter(
        job.storage, job.decoding.noise, filler_top_k=fill, vocab_size=target.vocab_size, length=length
    ), target


def _suffixes(job: Job, tempo: Tempo | None = None) -> MatchDrafter:
    texts = job.kept.texts
    if job.drafter not in texts or texts[job.drafter].size > job.settings.ngram_limit:
        texts[job.drafter] = SuffixAutomaton()
    return MatchDrafter(texts[job.drafter], length=draft_length(job, "suffix", tempo))


def _lookup(job: Job, rule: Rule) -> tuple[Drafter, ModelSession]:
    """Prompt lookup looks at this prompt and its answer alone."""
    return MatchDrafter(LongestMatch(), length=draft_length(job, "lookup")), job.session("target")


def _suffix(job: Job, rule: Rule) -> tuple[Drafter, ModelSession]:
    return _suffixes(job), job.session("target")


def _chain(job: Job, rule: Rule) -> tuple[Drafter, ModelSession]:
    tempo = Tempo()
    second, target = loaded_drafter(job, rule, tempo)
    return ChainDrafter(_suffixes(job, tempo), second, kinds=("suffix", job.pair.drafter_kind)), target


MATCH_KINDS = (
    DrafterKind("lookup", _lookup, own_law=False),
    DrafterKind("suffix", _suffix, own_law=False),
    DrafterKind("chain", _chain, own_law=True, loads=True, parts=("suffix", LOADED)),
)
