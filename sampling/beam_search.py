"""Beam search with length penalty, cached. Yields the Steps of the best beam once it is known.

Scores are summed log-probabilities divided by ((min_length + length) / (min_length + 1)) ** alpha (Wu et al. 2016,
arXiv 1609.08144). Live beams are the rows of one session; those that ended take no place from them. The search stops as
that of transformers does by default (early_stopping=False), and the best beam that ever ended is the result.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from sampling.debug import traced
from utils.bounds import RealRange, WholeRange
from utils.decode.decoding import Decoding, naming, token_ids
from utils.decode.generation_rules import OWN_ENDS, EndIds, end_tokens
from utils.decode.model_info import check_model
from utils.decode.model_session import ModelSession
from utils.decode.steps import FinishReason, Step
from utils.logits_processor import max_logits, stable_topk
from utils.metrics.results import tokens_of

MAX_PENALTY = 100.0  # bound of min_length and of the exponent alpha


@dataclass(frozen=True, slots=True)
class Beam:
    """New tokens so far, their summed log-probability, the session row they came from, and why the beam ended."""

    tokens: tuple[int, ...] = ()
    log_prob: float = 0.0
    row: int = 0
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class BeamWidth:
    """num_beams kept, top_k continuations of each; min_length and alpha of the length penalty."""

    num_beams: int = 4
    top_k: int = 3
    min_length: float = 5.0
    alpha: float = 1.2

    def __post_init__(self) -> None:
        WholeRange(1).check(self.num_beams, "num_beams")
        WholeRange(1).check(self.top_k, "top_k")
        for name, value in (("min_length", self.min_length), ("alpha", self.alpha)):
            RealRange(name, 0, MAX_PENALTY).check(value)

    def score(self, beam: Beam) -> float:
        penalty: float = ((self.min_length + len(beam.tokens)) / (self.min_length + 1)) ** self.alpha
        return beam.log_prob / penalty

    def best(self, beams: Iterable[Beam]) -> list[Beam]:
        """The num_beams beams with the highest scores, highest first."""
        return sorted(beams, key=self.score, reverse=True)[: self.num_beams]

    def may_improve(self, live: list[Beam], ended: list[Beam]) -> bool:
        """Whether the best live beam has a higher score than the worst of num_beams that ended."""
        return len(ended) < self.num_beams or self.score(live[0]) > self.score(ended[-1])


def beam_search_steps(prompt: list[int], session: ModelSession, decoding: Decoding, width: BeamWidth) -> Iterator[Step]:
    """Yield one Step per token of the best beam. The first carries the forward passes of the whole search. The
    processor is not used.

    Raises UserError for an unusable prompt or unusable logits.
    """
    context = session.begin(prompt)
    limit = decoding.length_limit(session.room(context))
    if limit < 1:
        return
    beams, forwards = [Beam()], 0  # live ones only, the best first
    ended: list[Beam] = []  # the best of those that were among the num_beams best when they ended
    best: Beam | None = None  # of all that ever ended
    while beams and width.may_improve(beams, ended):
        # Reorder the rows of the cache like the surviving beams. Before the first pass it has no rows.
        if forwards:
            session.select([beam.row for beam in beams])
        logits = session.feed_rows([[*context, *beam.tokens] for beam in beams], keep=1)  # (B, 1, V)
        forwards += 1
        grown: list[Beam] = []
        for row, beam in enumerate(beams):
            with naming(session.name):
                grown.extend(
                    _continuations(beam, row, logits[row, 0], decoding=decoding, top_k=width.top_k, limit=limit)
                )
        just_ended = [beam for beam in grown if beam.finish is not None]
        best = max([best, *just_ended] if best else just_ended, key=width.score, default=None)
        ended = width.best([*ended, *(beam for beam in width.best(grown) if beam.finish is not None)])
        beams = width.best(beam for beam in grown if beam.finish is None)
    assert best is not None
    yield from _steps_of(best, forwards)


def _continuations(
    beam: Beam, row: int, logits: torch.Tensor, *, decoding: Decoding, top_k: int, limit: int
) -> Iterator[Beam]:
    max_logits(logits)  # raises InvalidLogits for NaN and infinity
    # MPS has no float64.
    log_probs = torch.log_softmax(logits.double() if logits.device.type != "mps" else logits, dim=-1)
    values, ids = stable_topk(log_probs, min(top_k, len(log_probs)))
    for value, token in zip(values.tolist(), ids.tolist(), strict=True):
        if value == -inf:  # fewer than top_k ids are allowed
            return
        tokens = (*beam.tokens, token)
        yield Beam(tokens, beam.log_prob + value, row, decoding.finish_of(token, len(tokens), limit))


def _steps_of(beam: Beam, forwards: int) -> Iterator[Step]:
    last = len(beam.tokens) - 1
    for index, token in enumerate(beam.tokens):
        yield Step((), 0, token, beam.finish if index == last else None, forwards=0 if index else forwards)


def beam_search_generate(
    inputs: list[int],
    model: Any,
    max_gen_len: int = 40,
    num_beams: int = 4,
    top_k: int = 3,
    min_length: float = 5.0,
    alpha: float = 1.2,
    eos_tokens_id: EndIds = OWN_ENDS,
    pad_token_id: int = 0,
    debug: bool = False,
    tokenizer: Any = None,
    *,
    seed: int | None = None,
) -> list[int]:
    """Generate by beam search. Returns the best beam's new token ids, with the end token and without the prompt.

    inputs: flat list of prompt ids. eos_tokens_id, pad_token_id: as in autoregressive_generate. seed: unused, accepted
    so that the decoders are interchangeable. Raises UserError (a ValueError) for arguments out of range.
    """
    check_model(model, "model")
    end_ids = end_tokens(eos_tokens_id, model)
    decoding = Decoding.of(None, max_gen_len, end_ids=end_ids, seed=0 if seed is None else seed)
    session = ModelSession(model, rewinds=False, start_token=pad_token_id)
    width = BeamWidth(num_beams, top_k, min_length, alpha)
    return tokens_of(
        traced(beam_search_steps(token_ids(inputs), session, decoding, width), enabled=debug, tokenizer=tokenizer)
    )
