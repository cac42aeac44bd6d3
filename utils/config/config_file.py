"""The user's config file (TOML) with pairs, settings and default flags. It is read at start, and flags override it.

No torch is imported. Settings stay as typed; utils.config.settings checks their values when they are applied.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from utils.bounds import QUANTIZATIONS
from utils.errors import UserError, check_choice
from utils.files import read_text, user_folder
from utils.pairs.request import OPTIONS as FLAGS
from utils.pairs.request import PAIRS, PairSpec, check_field
from utils.servers.address import OPTIONS, ServerAddress, server_of

ENTRIES = ("pair", "pairs", "servers", "settings", *FLAGS)


@dataclass(frozen=True, slots=True)
class Config:
    """The contents of `file`.

    `pair` is the pair to start with, and `pairs` are all known ones. `flags` are parsed values, `settings` values as
    typed. `servers` receive every prompt.
    """

    file: Path | None = None
    pair: str | None = None
    flags: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    pairs: dict[str, PairSpec] = field(default_factory=lambda: dict(PAIRS))
    servers: tuple[ServerAddress, ...] = ()


def config_file() -> Path:
    """The default location of the config file."""
    return user_folder("config") / "config.toml"


def read_config(path: Path | None) -> Config:
    """The config in `path`, or in the default file if that exists.

    Raises UserError if the file cannot be read, is not valid TOML or has invalid entries.
    """
    if path is None:
        path = config_file()
        if not path.is_file():
            return Config()
    text = read_text(path, "The config file")
    try:
        entries = tomllib.loads(text)
    # Deeply nested arrays exceed the recursion limit of tomllib, and int() refuses numbers of thousands of digits.
    except (ValueError, RecursionError) as error:  # a TOMLDecodeError is a ValueError
        raise UserError(f"The config file {path} is not valid TOML: {error}.") from error
    try:
        return replace(_parse(entries), file=path)
    except UserError as error:
        raise UserError(f"The config file {path}: {error}") from error


def _parse(entries: Mapping[str, object]) -> Config:
    for name in entries:
        check_choice(name, ENTRIES, "the entry")
    pairs = PAIRS | {name: _pair(name, value) for name, value in _table(entries.get("pairs", {}), "pairs").items()}
    pair = None if "pair" not in entries else check_choice(_text(entries["pair"], "pair"), tuple(pairs), "pair")
    flags = {name: check_field(name, _text(entries[name], name)) for name in FLAGS if name in entries}
    servers = [_server(name, value) for name, value in _table(entries.get("servers", {}), "servers").items()]
    settings = _texts(entries.get("settings", {}), "settings")
    return Config(pair=pair, flags=flags, settings=settings, pairs=pairs, servers=tuple(servers))


def _pair(name: str, value: object) -> PairSpec:
    entries = _texts(value, f"pairs.{name}", known=tuple(entry.name for entry in fields(PairSpec)))
    if not entries.get("target"):
        raise UserError(f'pairs.{name} needs a target, for example target = "Qwen/Qwen3-4B".')
    return PairSpec(
        entries["target"],
        entries.get("drafter"),
        entries.get("summary", "from the config file"),
        check_choice(entries.get("cuda_quantize", "none"), QUANTIZATIONS, f"in pairs.{name} the cuda_quantize"),
    )


def _server(name: str, value: object) -> ServerAddress:
    entries = _texts(value, f"servers.{name}", known=("url", *OPTIONS))
    if "url" not in entries:
        raise UserError(f'servers.{name} needs an address: url = "http://127.0.0.1:8000".')
    try:
        return server_of(name, entries)
    except UserError as error:
        raise UserError(f"servers.{name}: {error}") from error


def _texts(value: object, name: str, known: tuple[str, ...] = ()) -> dict[str, str]:
    """The entries of a table as texts. `known` are the allowed ones, if not any."""
    entries = {key: _text(text, f"{name}.{key}") for key, text in _table(value, name).items()}
    for key in entries if known else ():
        check_choice(key, known, f"in {name} the entry")
    return entries


def _table(value: object, name: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise UserError(f"{name} must be a table: write [{name}] and its entries below.")
    return value


def _text(value: object, name: str) -> str:
    # Before the numbers, because bool is a subclass of int. A toggle is typed as on or off.
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, str | int | float):
        raise UserError(f"{name} must be a text, a number, true or false.")
    if isinstance(value, int) and abs(value) >= 1 << 64:
        raise UserError(f"{name} is a number of more than 64 bits, which no entry allows.")
    return str(value)
