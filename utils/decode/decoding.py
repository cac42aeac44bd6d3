"""Decoding: what every decoder needs to know about one run, in one frozen value.

It says what to draw from (processor), with which noise (seed), and when to stop (end ids, most new tokens). Models and drafts are the
decoders' own arguments; commands and settings are not known here.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex

from torch import Tensor

from utils.decode.noise import Noise, resolve_seed
from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.logits_processor import GreedyProcessor, LogitsProcessor, UnusableLogits


@dataclass(frozen=True, slots=True)
class Decoding:
    """processor: logits (..., V) to a law (..., V). max_new: most new tokens. end_ids: ids that end the text, themselves included."""

    processor: LogitsProcessor
    max_new: int
    end_ids: frozenset[int]
    noise: Noise

    @classmethod
    def of(
        cls, processor: LogitsProcessor | None, max_new: int, *, end_ids: int | Iterable[int] | None, seed: int | None
    ) -> "Decoding":
        """From the loose arguments of the library functions. Raises UserError for a negative length."""
        check_count("max_gen_len", max_new)
        chosen = GreedyProcessor() if processor is None else processor
        return cls(chosen, max_new, _end_ids(end_ids), Noise(resolve_seed(seed)))

    def law(self, logits: Tensor, name: str) -> Tensor:
        """The processed law (..., V) of a model's logits (..., V). Raises UserError, naming the model, for logits that are not usable."""
        with named(name):
            return self.processor(logits)

    def length_limit(self, room: int | None) -> int:
        """The most new tokens a run may make where the model's context has this much room."""
        return self.max_new if room is None else min(self.max_new, room)

    def finish_of(self, token: int, made: int, limit: int) -> FinishReason | None:
        """Why a run that has `made` new tokens, the last one `token`, ends here; None where it goes on."""
        if token in self.end_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if made >= limit else None


@contextmanager
def named(name: str) -> Iterator[None]:
    """Let what is said about unusable logits inside name the model."""
    try:
        yield
    except UnusableLogits as error:
        raise UserError(str(error).replace("The model", name, 1)) from error


def check_count(name: str, value: int, low: int = 0) -> None:
    """Raise UserError unless `value` is a whole number of at least `low`."""
    if not isinstance(value, SupportsIndex) or index(value) < low:
        raise UserError(f"{name} {value} is out of range: a whole number of at least {low}.")


def token_ids(inputs: Iterable[int]) -> list[int]:
    """Plain ints from a flat sequence of ids: a list, a one-dimensional array or tensor. Raises UserError for anything else."""
    try:
        return [index(token) for token in inputs]
    except TypeError as error:
        raise UserError(
            "The prompt must be a flat list of token ids, such as tokenizer(text).input_ids gives."
        ) from error


def _end_ids(ids: int | Iterable[int | None] | None) -> frozenset[int]:
    try:
        return frozenset({index(ids)})  # type: ignore[arg-type]
    except TypeError:
        pass
    try:
        return frozenset(index(token) for token in (() if ids is None else ids) if token is not None)  # type: ignore[union-attr]
    except TypeError as error:
        raise UserError(f"eos_tokens_id {ids!r} is no token id and no list of them.") from error
