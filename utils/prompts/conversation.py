"""Conversations: what every strategy was asked and has answered so far, by its name.

Each goes on with its own words, so that what a strategy says in its third answer is what one would have got from it alone. How a
conversation becomes prompt ids is utils.prompts.chat_template's business; when a turn is kept, the workbench's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from utils.errors import NoRoom, UserError

Message = dict[str, str]  # role and content, as chat templates and records have it


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and its answer, as text."""

    user: str
    assistant: str


Turns = tuple[Turn, ...]


@dataclass(slots=True)
class Conversations:
    """One for each strategy that has finished a turn."""

    by_name: dict[str, Turns] = field(default_factory=dict)

    def __len__(self) -> int:
        """Turns of the longest."""
        return max(map(len, self.by_name.values()), default=0)

    def of(self, name: str, baseline: str) -> Turns:
        """What a strategy goes on from: its own, or where that only begins the baseline's (it has joined later), the baseline's."""
        own, theirs = self.by_name.get(name, ()), self.by_name.get(baseline, ())
        return theirs if theirs[: len(own)] == own else own

    def forget(self) -> None:
        """Begin anew."""
        self.by_name.clear()


def messages_of(turns: Sequence[Turn]) -> list[Message]:
    """User and assistant in turns."""
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in (("user", turn.user), ("assistant", turn.assistant))
    ]


def turns_of(messages: Sequence[Message]) -> Turns:
    """The turns that `messages_of` has told."""
    contents = [message["content"] for message in messages]
    return tuple(map(Turn, contents[::2], contents[1::2]))


def own_since(ours: Turns, theirs: Turns) -> int:
    """The first turn, counted from 1, before which two different conversations had no longer the same words."""
    shared = next(
        (place for place, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
        min(len(ours), len(theirs)),
    )
    return shared + 2


def counted(turns: int) -> str:
    """A number of turns in words."""
    return f"{turns} turn{'' if turns == 1 else 's'}"


def advised(error: Exception, turns: Turns) -> Exception:
    """The same error; where earlier turns have made a prompt too long, with what to do about them."""
    return UserError(f"{error} /reset forgets the conversation.") if turns and isinstance(error, NoRoom) else error
