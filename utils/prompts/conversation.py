"""Conversations: the prompts and answers of every strategy so far.

Each strategy continues its own answers, so that its third answer is the same as if it ran alone. Rendering is left to
utils.prompts.chat_template, and the session decides when to keep a turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from utils.errors import ContextOverflow, UserError
from utils.text import count_of

Message = dict[str, str]  # role and content, as in chat templates and records


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and its answer, as text."""

    user: str
    assistant: str


Turns = tuple[Turn, ...]


@dataclass(slots=True)
class Conversations:
    """The conversations of strategies with a finished turn, by strategy name."""

    by_name: dict[str, Turns] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of turns of the longest conversation."""
        return max(map(len, self.by_name.values()), default=0)

    def history(self, name: str, baseline: str) -> Turns:
        """The turns that a strategy continues: its own, or the baseline's if these extend its own."""
        own, theirs = self.by_name.get(name, ()), self.by_name.get(baseline, ())
        return theirs if theirs[: len(own)] == own else own

    def forget(self) -> None:
        """Drop all turns."""
        self.by_name.clear()


def to_messages(turns: Sequence[Turn]) -> list[Message]:
    """The turns as alternating user and assistant messages."""
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in (("user", turn.user), ("assistant", turn.assistant))
    ]


def turns_from_messages(messages: Sequence[Message]) -> Turns:
    """The inverse of `to_messages`."""
    contents = [message["content"] for message in messages]
    return tuple(map(Turn, contents[::2], contents[1::2]))


def diverging_turn(ours: Turns, theirs: Turns) -> int:
    """The number, from 1, of the first turn before which two different conversations differ."""
    shared = next(
        (index for index, (own, other) in enumerate(zip(ours, theirs, strict=False)) if own != other),
        min(len(ours), len(theirs)),
    )
    # Turn shared + 1 itself differs, after an equal history. The next one is the first with a different history.
    return shared + 2


def format_turns(count: int) -> str:
    """A number of turns in words."""
    return count_of(count, "turn")


def with_reset_hint(error: Exception, turns: Turns) -> Exception:
    """The error itself. If earlier turns made a prompt too long, the message recommends /turns new."""
    if turns and isinstance(error, ContextOverflow):
        return UserError(f"{error} /turns new forgets the conversation.")
    return error
