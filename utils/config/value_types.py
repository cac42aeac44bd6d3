"""Value types of settings: how each type of value is written, checked, parsed and shown.

A value type turns typed text into a value, or raises UserError with the allowed values. It prints nothing and loads
nothing; what the loaded target allows is passed as Limits.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from utils.bounds import NGRAM_ORDER, THREADS, WholeRange
from utils.errors import UserError, check_choice


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded target allows: its context length in tokens and its vocabulary size."""

    context: int = 1_000_000
    vocabulary: int = 1_000_000


class ValueType(Protocol):
    """How one type of value is written, parsed and shown.

    Values are Any, because the settings table mixes value types.
    """

    @property
    def usage(self) -> str:
        """The argument in /help."""

    @property
    def words(self) -> tuple[str, ...]:
        """Completions of the argument."""

    def parse(self, text: str, current: Any, limits: Limits) -> Any:
        """The value that `text` describes. Raises UserError if it is not valid. current: the value to switch from."""

    def show(self, value: Any) -> str:
        """The value as it would be typed."""


# Words that are accepted for on and off.
SWITCH_WORDS = dict.fromkeys(("on", "yes", "true", "1"), True) | dict.fromkeys(("off", "no", "false", "0"), False)


@dataclass(frozen=True, slots=True)
class Toggle:
    """on or off; an empty text switches."""

    usage: str = "[on|off]"
    words: tuple[str, ...] = ("on", "off")

    def parse(self, text: str, current: bool, limits: Limits) -> bool:
        states = SWITCH_WORDS | {"": not current}
        if text.lower() not in states:
            raise UserError(f"'{text}' is neither on nor off; without it, the value is switched.")
        return states[text.lower()]

    def show(self, value: bool) -> str:
        return "on" if value else "off"


@dataclass(frozen=True, slots=True)
class ToggleOrAuto(Toggle):
    """on, off, or auto, which is None; an empty text switches."""

    usage: str = "[on|off|auto]"
    words: tuple[str, ...] = ("on", "off", "auto")

    def parse(self, text: str, current: bool | None, limits: Limits) -> Any:
        if text.lower() == "auto":
            return None
        # auto is on wherever it can be, so a switch turns it off.
        return Toggle().parse(text, current is not False, limits)

    def show(self, value: bool | None) -> str:
        return "auto" if value is None else Toggle().show(value)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]
    what: str

    @property
    def usage(self) -> str:
        return "|".join(self.words)

    def parse(self, text: str, current: str, limits: Limits) -> str:
        return check_choice(text.lower(), self.words, self.what)

    def show(self, value: str) -> str:
        return value


@dataclass(frozen=True, slots=True)
class ToggleOrChoice:
    """on, off, or other words; an empty text switches between on and off."""

    words: tuple[str, ...]

    @property
    def usage(self) -> str:
        return f"[{'|'.join(self.words)}]"

    def parse(self, text: str, current: str, limits: Limits) -> str:
        if not text:
            return "on" if current == "off" else "off"
        word = text.lower()
        if word in SWITCH_WORDS and word not in self.words:
            word = Toggle().show(SWITCH_WORDS[word])
        return check_choice(word, self.words, "level")

    def show(self, value: str) -> str:
        return value


def or_auto(allowed: WholeRange, text: str) -> int:
    """A number in a range, for a setting that also accepts auto. Raises UserError that names both."""
    try:
        return allowed.parse(text)
    except UserError as error:
        raise UserError(f"{str(error).removesuffix('.')}, or auto.") from error


@dataclass(frozen=True, slots=True)
class WholeNumber:
    """A whole number from `low` to `high`, or to the field of Limits that `limit` names."""

    low: int
    high: int | None = None
    limit: str = ""
    usage: str = "N"
    words: tuple[str, ...] = ()

    def parse(self, text: str, current: int, limits: Limits) -> int:
        high = getattr(limits, self.limit) if self.high is None else self.high
        return WholeRange(self.low, high).parse(text)

    def show(self, value: int) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class ThreadCount:
    """A number of CPU threads, or auto, which is 0."""

    usage: str = "N|auto"
    words: tuple[str, ...] = ("auto",)

    def parse(self, text: str, current: int, limits: Limits) -> int:
        return 0 if text.lower() == "auto" else or_auto(THREADS, text)

    def show(self, value: int) -> str:
        return str(value or "auto")


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """A system prompt. None is the default of the chat template, an empty text an empty system prompt."""

    usage: str = "TEXT|none|default"
    words: tuple[str, ...] = ("none", "default")

    def parse(self, text: str, current: str | None, limits: Limits) -> str | None:
        if not text:
            raise UserError(
                "Give a system prompt, 'none' for an empty one, or 'default' for that of the chat template."
            )
        # Case-sensitive and exact, so that a system prompt may begin with one of these words.
        return {"default": None, "none": ""}.get(text, text)

    def show(self, value: str | None) -> str:
        return {None: "default", "": "none"}.get(value, value or "none")


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """A kind of n-gram storage: basic (all orders 2..n) or onelevel (only order n)."""

    kind: str
    order: int

    def __str__(self) -> str:
        return f"{self.kind} {self.order}"


@dataclass(frozen=True, slots=True)
class StorageType:
    """A kind of n-gram storage and its order."""

    usage: str = "basic|onelevel N"
    words: tuple[str, ...] = ("basic", "onelevel")

    def parse(self, text: str, current: StorageSpec, limits: Limits) -> StorageSpec:
        parts = text.split()
        if len(parts) != 2:
            raise UserError(f"Give 'basic N' or 'onelevel N' with an order N from {NGRAM_ORDER}, for example: basic 3.")
        return StorageSpec(check_choice(parts[0].lower(), self.words, "storage"), NGRAM_ORDER.parse(parts[1]))

    def show(self, value: StorageSpec) -> str:
        return str(value)
