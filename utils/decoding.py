"""Decoding: what every decoder needs to know about one run, in one frozen value.

It says what to draw from (processor), with which noise (seed), and when to stop (end ids, most new tokens). Models and drafts are the
decoders' own arguments; commands and settings are not known here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from utils.errors import UserError
from utils.events import FinishReason
from utils.logits_processor import GreedyProcessor, LogitsProcessor, UnusableLogits
from utils.seeding import Noise, resolve_seed


@dataclass(frozen=True, slots=True)
class Decoding:
    """processor: logits (..., V) to a law (..., V). max_new: most new tokens. end_ids: ids that end the text, themselves included."""

    processor: LogitsProcessor
    max_new: int
    end_ids: frozenset[int]
    noise: Noise

    @classmethod
    def of(cls, processor: LogitsProcessor | None, max_new: int, *, end_ids: int | Iterable[int] | None, seed: int | None) -> "Decoding":
        """From the loose arguments of the library functions. Raises UserError for a negative length."""
        if max_new < 0:
            raise UserError(f"max_gen_len {max_new} is out of range: 0 or more.")
        ends = () if end_ids is None else (end_ids,) if isinstance(end_ids, int) else end_ids
        chosen = GreedyProcessor() if processor is None else processor
        return cls(processor=chosen, max_new=max_new, end_ids=frozenset(ends), noise=Noise(resolve_seed(seed)))

    def law(self, logits: Tensor, name: str) -> Tensor:
        """The processed law (..., V) of a model's logits (..., V). Raises UserError, naming the model, for logits that are not usable."""
        try:
            return self.processor(logits)
        except UnusableLogits as error:
            raise UserError(str(error).replace("The model", name, 1)) from error

    def length_limit(self, room: int | None) -> int:
        """The most new tokens a run may make where the model's context has this much room."""
        return self.max_new if room is None else min(self.max_new, room)

    def finish_of(self, token: int, made: int, limit: int) -> FinishReason | None:
        """Why a run that has `made` new tokens, the last one `token`, ends here; None where it goes on."""
        if token in self.end_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if made >= limit else None
