"""The file of a user's own pairs and settings (TOML), read at start; flags override what it says.

It is read without importing torch: what a setting may be is told by utils.config.settings, when it is applied.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from utils.bounds import QUANTIZATIONS
from utils.errors import UserError, one_of
from utils.pairs.known_pairs import PAIRS, PairSpec
from utils.pairs.request import PARTS, checked

FLAGS = tuple(name for name in PARTS if name not in ("target", "drafter"))
ENTRIES = ("pair", "pairs", "settings", *FLAGS)


@dataclass(frozen=True, slots=True)
class Config:
    """pair: the one to begin with. flags: of the command line. settings: as typed, by command. pairs: all known ones."""

    pair: str | None = None
    flags: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    pairs: dict[str, PairSpec] = field(default_factory=lambda: dict(PAIRS))


def config_file() -> Path:
    """Where it is looked for."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "speculative-decoding" / "config.toml"


def read_config(given: Path | None) -> Config:
    """What the given file says, or the usual one where there is one. Raises UserError for a file that cannot be read or says nonsense."""
    path = given or config_file()
    if given is None and not path.is_file():
        return Config()
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"The config file {path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}."
        ) from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"The config file {path} is no valid TOML: {error}.") from error
    try:
        return _understood(told)
    except UserError as error:
        raise UserError(f"The config file {path}: {error}") from error


def _understood(told: dict[str, Any]) -> Config:
    for name in told:
        one_of(name, ENTRIES, "the entry")
    pairs = PAIRS | {name: _pair(name, entries) for name, entries in _table(told.get("pairs", {}), "pairs").items()}
    pair = told.get("pair")
    if pair is not None:
        one_of(_text(pair, "pair"), tuple(pairs), "pair")
    flags = {name: checked(name, _text(told[name], name)) for name in FLAGS if name in told}
    settings = {
        name: _text(value, f"settings.{name}") for name, value in _table(told.get("settings", {}), "settings").items()
    }
    return Config(pair, flags, settings, pairs)


def _pair(name: str, entries: Any) -> PairSpec:
    known = tuple(entry.name for entry in fields(PairSpec))
    words = {key: _text(value, f"pairs.{name}.{key}") for key, value in _table(entries, f"pairs.{name}").items()}
    for key in words:
        one_of(key, known, f"in pairs.{name} the entry")
    if not words.get("target"):
        raise UserError(f'pairs.{name} needs a target, for example target = "Qwen/Qwen3-4B".')
    one_of(words.get("cuda_quantize", "none"), QUANTIZATIONS, f"in pairs.{name} the cuda_quantize")
    return PairSpec(**{"drafter": None, "summary": "from the config file"} | words)  # type: ignore[arg-type]


def _table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{name} must be a table: write [{name}] and its entries below.")
    return value


def _text(value: Any, name: str) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, str | int | float):
        raise UserError(f"{name} must be a text, a number, true or false.")
    return str(value)
