"""The seam between a model session and an engine: a forward pass in place of the model's own, and the kind of pass.

An engine sets `model.forward` on the instance to an EngineForward, so that every caller of `model(...)` uses it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from utils.bounds import MAX_GAMMA

MAX_WIDTH = MAX_GAMMA + 1  # rows of the widest verify pass
PREFILL_CHUNK = 512  # rows of a prompt that are computed at once: more need more memory and are hardly faster

SESSION_ARGUMENTS = frozenset(
    {"input_ids", "past_key_values", "use_cache", "logits_to_keep", "output_hidden_states", "return_dict"}
)

_prefill: ContextVar[bool] = ContextVar("prefill", default=False)


class EngineForward(ABC):
    """What an engine sets as `model.forward`. It takes the arguments of a transformers decoder's forward.

    features: hidden states of the last pass (B, T, F), side by side in the order of `feature_pass`. None if the pass
    was not marked, or if transformers computed it.
    """

    features: Tensor | None

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return an output with logits, past_key_values and, if requested, hidden_states."""

    @abstractmethod
    def new_cache(self) -> Any:
        """Return an empty cache for one run, with the methods of transformers' DynamicCache that sessions use. None
        stands for the cache that the model would have without the engine.
        """

    @abstractmethod
    def for_cut(self, cut: Any) -> "EngineForward":
        """Return the forward pass of a model that is made of the first layers of the engine's model."""

    def narrow(self, outputs: int) -> None:
        """Return only the first `outputs` logits from now on, if that saves time."""
        return

    def prepare(self, first: int, last: int) -> None:
        """Do what passes between these positions would do when they first run, if that takes long."""
        return


class CompiledEntries(Protocol):
    """What an engine computes in place of the modules of a drafter that adds entries for hidden states."""

    def __call__(self, states: Tensor, tokens: Tensor, first: int, cache: Any) -> tuple[Tensor, Tensor]:
        """Add entries at positions from `first`: from the states (T, H) before them and the tokens (T,) that follow
        these. Returns the last state (1, H) and its logits (1, V') over the draft vocabulary.
        """
        ...

    def fused(self, features: Tensor, fuse: Callable[[Tensor], Tensor]) -> Tensor:
        """Return fuse(features) of features (T, F)."""
        return fuse(features)

    def new_cache(self) -> Any:
        """Return an empty cache for one run, or None for that of the modules."""

    def prepare(self, first: int, last: int) -> None:
        """Do what entries between these positions would do when they are first added, if that takes long."""
        return


def is_plain_call(arguments: Mapping[str, Any]) -> bool:
    """Whether a forward pass is called as by a session: engines leave all other calls to transformers."""
    given = {name for name, value in arguments.items() if value is not None}
    return (
        given <= SESSION_ARGUMENTS
        and arguments.get("return_dict") is not False
        and isinstance(arguments.get("logits_to_keep", 0), int)  # not chosen positions
        and not torch.is_grad_enabled()
    )


def engine_forward(model: Any) -> EngineForward | None:
    """The engine's forward pass of a model, or None if the model computes its own."""
    forward = vars(model).get("forward")
    return forward if isinstance(forward, EngineForward) else None


@torch.no_grad()
def prepare_run(models: Iterable[Any], first: int, last: int) -> None:
    """Prepare models for a run between these positions, so that no first use is timed."""
    for model in filter(None, models):
        # A drafter that reads hidden states has entries instead of a forward pass.
        for own in (engine_forward(model), getattr(model, "compiled", None)):
            if own is not None:
                own.prepare(first, last)


@contextmanager
def _within(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Give a variable a value in this block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def prefill_pass(marked: bool) -> AbstractContextManager[None]:
    """Mark the passes in this block as prefills: their logits are not read, an engine need not compute them, and their
    rows need not have the bits of single decode steps.

    Texts stay exact, because every strategy prefills the same prompt by the same operations.
    """
    return _within(_prefill, marked)


def in_prefill() -> bool:
    """Whether the current pass is marked as a prefill."""
    return _prefill.get()


_features: ContextVar[tuple[int, ...]] = ContextVar("features", default=())


def feature_pass(layers: tuple[int, ...]) -> AbstractContextManager[None]:
    """Mark the passes in this block: of their hidden states only those of these layers are read, numbered as in
    transformers, and layers + 1 for the input of the final norm. An engine returns them as its `features`.
    """
    return _within(_features, layers)


def read_features() -> tuple[int, ...]:
    """The layers of `feature_pass`. Empty if the current pass is not marked."""
    return _features.get()


ReadingReport = Callable[[int, int], None]  # receives the number of read tokens of a prompt, and the number of all
_reading: ContextVar[ReadingReport | None] = ContextVar("reading", default=None)


def reported_reading(report: ReadingReport) -> AbstractContextManager[None]:
    """Report the progress of reading long prompts in this block, for any model."""
    return _within(_reading, report)


def report_reading(done: int, total: int) -> None:
    """Call the report of `reported_reading`, if there is one."""
    if (report := _reading.get()) is not None:
        report(done, total)
