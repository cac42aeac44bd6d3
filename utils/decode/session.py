"""Protocols of a model in use: what the decoders, the draft-verify loop and the drift measurements require of a
session.
"""

from typing import Protocol, Self

from torch import Tensor


class RewindableSession(Protocol):
    """What every decoder requires."""

    name: str

    def begin(self, prompt: list[int]) -> list[int]: ...

    def room(self, context: list[int]) -> int | None: ...

    def feed(self, context: list[int], keep: int) -> Tensor: ...

    def rewind(self, length: int) -> None: ...


class Session(RewindableSession, Protocol):
    """What token-by-token decoding requires."""

    vocab_size: int
    context_length: int | None


class TargetSession(RewindableSession, Protocol):
    """What the draft-verify loop requires of the target."""

    def take_features(self) -> Tensor | None: ...


class ForkableSession(Session, Protocol):
    """A session that can be copied in the middle of a run."""

    def fork(self) -> Self: ...
