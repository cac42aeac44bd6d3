"""The key of a server: read from its environment variable when a request is made, and removed from what comes back.

A server may repeat a key in an error message or in a text, so everything it sends passes through `Secret`.
"""

import json
import os
import re
from base64 import b64encode
from typing import Any
from urllib.parse import quote

from utils.errors import UserError

SHORTEST = 8  # characters; shorter placeholders such as EMPTY are no secrets and may be ordinary words of a text
REMOVED = "[key]"


class Secret:
    """The value of a key. It has no readable form."""

    __slots__ = ("_forms", "_value")

    def __init__(self, variable: str | None) -> None:
        """Raises UserError if the environment variable is not set or if its value cannot be sent."""
        self._value = ""
        if variable is not None:
            self._value = os.environ.get(variable, "").strip()
            if not self._value:
                raise UserError(f"The environment variable {variable}, which should hold the server's key, is not set.")
            if not re.fullmatch(r"[!-~]+", self._value):
                raise UserError(f"The environment variable {variable} has characters that a key cannot have.")
        self._forms = _forms(self._value) if len(self._value) >= SHORTEST else ()

    def __repr__(self) -> str:
        return "Secret()"

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers of a request."""
        return {"Authorization": f"Bearer {self._value}"} if self._value else {}

    def scrub(self, value: Any) -> Any:
        """A text, or JSON values with texts, without the key, also where it is encoded."""
        if not self._forms:
            return value
        if isinstance(value, str):
            for form in self._forms:
                value = value.replace(form, REMOVED)
            return value
        if isinstance(value, list):
            return [self.scrub(part) for part in value]
        if isinstance(value, dict):
            return {self.scrub(name): self.scrub(part) for name, part in value.items()}
        return value

    def held_back(self, text: str) -> int:
        """Number of characters at the end of a growing text that may be the beginning of the key."""
        return max((_overlap(text, form) for form in self._forms), default=0)


def _forms(value: str) -> tuple[str, ...]:
    """A key as it is, and as servers repeat it: in JSON, in an address, in Base64. The longest first."""
    encoded = (b64encode(text.encode()).decode().rstrip("=") for text in (value, f"Bearer {value}"))
    standard = list(encoded)
    of_urls = [text.replace("+", "-").replace("/", "_") for text in standard]
    forms = {value, json.dumps(value)[1:-1], quote(value), quote(value, safe=""), *standard, *of_urls}
    return tuple(sorted(forms, key=len, reverse=True))


def _overlap(text: str, form: str) -> int:
    """Number of characters at the end of a text that are the beginning of a form of the key."""
    longest = min(len(text), len(form) - 1)
    return next((size for size in range(longest, 0, -1) if form.startswith(text[-size:])), 0)


class SecretStream:
    """A text that grows piece by piece, without the key. What may be the beginning of the key is held back."""

    def __init__(self, secret: Secret) -> None:
        self._secret, self._waiting = secret, ""

    def add(self, piece: str) -> str:
        """The text that can be shown after this piece."""
        text = str(self._secret.scrub(self._waiting + piece))
        cut = len(text) - self._secret.held_back(text)
        self._waiting = text[cut:]
        return text[:cut]

    def end(self) -> str:
        """The rest of the text, without most of a key."""
        rest, self._waiting = self._waiting, ""
        return rest if len(rest) < SHORTEST else REMOVED
