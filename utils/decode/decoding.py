"""Decoding: the parameters of one run in one frozen value.

What tokens are drawn from (processor), with which noise (seed), and when a run ends (end ids, maximum length). Models
and drafters are arguments of the decoders; commands and settings are unknown here.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import index
from typing import Self

from torch import Tensor

from utils.bounds import WholeRange
from utils.decode.grammar import Grammar
from utils.decode.noise import Noise, resolve_seed
from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.logits_processor import GreedyProcessor, InvalidLogits, LogitsProcessor, one_thread


@dataclass(frozen=True, slots=True)
class Decoding:
    """What to draw from, with which noise, and when to stop.

    `processor` maps logits (..., V) to probabilities (..., V). `max_new` is the maximum number of new tokens. `end_ids`
    end the text. The session of the target has the same `grammar`, if any.
    """

    processor: LogitsProcessor
    max_new: int
    end_ids: frozenset[int]
    noise: Noise
    grammar: Grammar | None = None

    @classmethod
    def of(
        cls, processor: LogitsProcessor | None, max_new: int, *, end_ids: int | Iterable[int] | None, seed: int | None
    ) -> Self:
        """From the arguments of the library functions. Raises UserError for a negative length."""
        WholeRange(0).check(max_new, "max_gen_len")
        chosen = GreedyProcessor() if processor is None else processor
        return cls(chosen, max_new, _end_ids(end_ids), Noise(resolve_seed(seed)))

    def probs(self, logits: Tensor, name: str) -> Tensor:
        """The processed distribution (..., V). Raises UserError, with the model's name, if the logits are not
        usable.
        """
        with naming(name), one_thread():
            return self.processor(logits)

    def length_limit(self, room: int | None) -> int:
        """The maximum number of new tokens if the model's context has room for `room` more."""
        return self.max_new if room is None else min(self.max_new, room)

    def finish_of(self, token: int, made: int, limit: int) -> FinishReason | None:
        """Why a run with `made` new tokens, the last one `token`, ends here, or None if it continues."""
        # Before the length: an end token in the last allowed position is a stop.
        if token in self.end_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if made >= limit else None


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the model's name into errors about unusable logits that are raised inside."""
    try:
        yield
    except InvalidLogits as error:
        # A processor does not know whose logits it receives; its message begins with "The model".
        raise UserError(str(error).replace("The model", name, 1)) from error


def token_ids(inputs: Iterable[int]) -> list[int]:
    """Plain ints from a list, a one-dimensional array or a tensor of ids. Raises UserError for anything else."""
    try:
        # Not int(): that would truncate floats and parse strings.
        return [index(token) for token in inputs]
    except TypeError as error:
        raise UserError("The prompt must be a flat list of token ids, such as tokenizer(text).input_ids.") from error


def _end_ids(ids: int | Iterable[int | None] | None) -> frozenset[int]:
    if ids is None:
        return frozenset()
    with suppress(TypeError):  # tensors of several ids have __index__, too
        return frozenset({index(ids)})  # type: ignore[arg-type]
    try:
        return frozenset(index(token) for token in ids if token is not None)  # type: ignore[union-attr]
    except TypeError as error:
        raise UserError(f"eos_tokens_id {ids!r} is not a token id or a list of token ids.") from error
