"""The command line and the user's config file (TOML) with pairs, settings and default flags, which flags override.

Nothing heavy is imported, so that --help is instant. Settings stay as typed; their values are checked when they are
applied.
"""

import argparse
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, TypeVar

from utils import __version__
from utils.bounds import DTYPES, ENGINE_WEIGHTS, GATE_REPEATS, QUANTIZATIONS, SEED, TOLERANCE, check_device
from utils.config.settings import Setting, Settings, flag_settings, known_settings
from utils.config.value_types import Limits
from utils.errors import UserError, check_choice, naming
from utils.files import read_text, user_folder
from utils.pairs.request import OPTIONS as FLAGS
from utils.pairs.request import PAIRS, PUBLISHED, PairSpec, check_field
from utils.servers.address import OPTIONS, ServerAddress, checked, parse_server_flag, server_address
from utils.text import visible

ENTRIES = ("pair", "pairs", "servers", "settings", *FLAGS)
Value = TypeVar("Value")
WITH_C = 'a setting is given with -c, as in -c "/{} {}"'


@dataclass(frozen=True, slots=True)
class Config:
    """The contents of `file`.

    `pair` is the pair to start with, and `pairs` are all known ones. `flags` are parsed values, `settings` values as
    typed.
    """

    file: Path | None = None
    pair: str | None = None
    flags: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    pairs: dict[str, PairSpec] = field(default_factory=lambda: dict(PAIRS))
    servers: tuple[ServerAddress, ...] = ()


def config_file() -> Path:
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
    except (ValueError, RecursionError) as error:
        raise UserError(f"The config file {path} is not valid TOML: {error}.") from error
    with naming(f"The config file {path}"):
        return replace(_parse(entries), file=path)


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
    return PairSpec(entries["target"], entries.get("drafter"), entries.get("summary", "from the config file"))


def _server(name: str, value: object) -> ServerAddress:
    entries = _texts(value, f"servers.{name}", known=("url", *OPTIONS))
    if "url" not in entries:
        raise UserError(f'servers.{name} needs an address: url = "http://127.0.0.1:8000".')
    with naming(f"servers.{name}"):
        return server_address(name, **entries)


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


class Parser(argparse.ArgumentParser):
    """Reports wrong usage in one line. argparse would print the usage of every flag first."""

    def error(self, message: str) -> NoReturn:
        # Values can come from a file, so control characters must not reach the terminal.
        sentence = message if message.endswith("?") else message.rstrip(".") + "."
        self.exit(2, f"{self.prog}: {visible(sentence)} --help lists the flags.\n")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags, with defaults from the config file. argparse exits with status 2 if either is invalid."""
    parser = _parser()
    # Parsed twice: --config selects the file whose values become defaults, and flags must override these.
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(_unknown_words(unknown, sys.argv[1:] if argv is None else argv, parser))
    try:
        config = read_config(arguments.config)
        if arguments.pair:
            # Not argparse `choices`, because the config file can define more pairs.
            check_choice(arguments.pair, tuple(config.pairs), "pair")
    except UserError as error:
        parser.error(str(error))
    parser.set_defaults(**config.flags)
    arguments = parser.parse_args(argv)
    arguments.config = config
    try:
        given = [parse_server_flag(text, number) for number, text in enumerate(arguments.server, start=1)]
        # Flags replace servers of the same name in the config file.
        names = [address.name for address in given]
        arguments.servers = checked([*(one for one in config.servers if one.name not in names), *given])
    except UserError as error:
        parser.error(f"--server: {error}")
    arguments.servers_only = bool(given) and not (arguments.pair or arguments.target or arguments.drafter)
    if arguments.verdict is not None:
        arguments.lines = [*arguments.lines, f"/verdict {arguments.verdict}".rstrip()]
    if arguments.gate is not None:
        tolerance = "" if arguments.tolerance is None else f" {arguments.tolerance:g}%"
        repeats = "" if arguments.repeats is None else f" x{arguments.repeats}"
        arguments.lines = [*arguments.lines, f"/gate {arguments.gate}{tolerance}{repeats}"]
    elif arguments.tolerance is not None or arguments.repeats is not None:
        parser.error("--tolerance and --repeats belong to --gate FILE")
    if arguments.pair and (arguments.target or arguments.drafter):
        parser.error("--pair names both models: leave out --target and --drafter, or leave out --pair")
    return arguments


def _unknown_words(unknown: Sequence[str], argv: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """What is wrong with words that are not flags, and how to write what was probably meant."""
    flag, equals, value = next((word for word in unknown if word.startswith("-")), "").partition("=")
    if not flag:
        return f'only one prompt can be given; put it into quotation marks: "... {" ".join(unknown)}"'
    if not equals:
        value = dict(pairwise(argv)).get(flag, "VALUE")
    name = flag.lstrip("-").replace("-", "_").lower()
    if name in known_settings():  # settings are often mistaken for flags
        return f"there is no flag {flag}; {WITH_C.format(known_settings()[name].name, value)}"
    flags = [option for action in parser._actions for option in action.option_strings]
    nearest = get_close_matches(flag, flags, n=1, cutoff=0.7)
    hint = f"the nearest is {nearest[0]}; " if nearest else ""
    return f"there is no flag {flag}; {hint}{WITH_C.format('gamma', 3)}"


def flag_type(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """A parser that raises UserError as an argparse `type`, which would otherwise replace its message."""

    def parse_flag(text: str) -> Value:
        try:
            return parse(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error

    return parse_flag


device_flag, seed_flag = flag_type(check_device), flag_type(SEED.parse)
tolerance_flag = flag_type(lambda text: TOLERANCE.parse(text.removesuffix("%")))
repeats_flag = flag_type(GATE_REPEATS.parse)


def _parser() -> argparse.ArgumentParser:
    pairs = "; ".join(f"{name}: {pair.summary}" for name, pair in PAIRS.items() if name not in PUBLISHED)
    parser = Parser(
        prog="infer.py",
        allow_abbrev=False,  # --prompt would be accepted as --prompts
        description="Compare speculative decoding with other decoding strategies: speed, acceptance, equal text.",
        epilog=f"Pairs: {pairs}; published drafters (/pair list names them); and those of the config file",
    )
    _add_models(parser)
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="run this prompt and exit, after the lines of -c")
    add("-c", dest="lines", action="append", default=[], metavar="LINE", help="run this line and exit; repeatable")
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="run the prompts of a file: one per line, or JSON lines with 'prompt'",
    )
    add(
        "--verdict",
        nargs="?",
        const="",
        metavar="FILE",
        help="answer whether speculative decoding helps, on the prompts of a file or on built-in ones, and exit",
    )
    add("--gate", metavar="FILE", help="run the records of a --json file again; exit status 1 if worse, 3 if unclear")
    add("--tolerance", type=tolerance_flag, metavar="P%", help="loss that --gate allows (default: 5%%)")
    add("--repeats", type=repeats_flag, metavar="N", help="most runs of each record by --gate (default: 5)")
    add(
        "--server",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="an inference server that answers prompts, too; repeatable; no model is loaded without --target, "
        "--drafter or --pair",
    )
    add("--json", type=Path, metavar="FILE", help="append a JSON record of each generation to this file")
    add("--no-color", action="store_true", help="plain text output")
    add("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def _parsed(setting: Setting, text: str) -> object:
    return setting.value_type.parse(text, setting.default, Limits())


def _add_models(parser: argparse.ArgumentParser) -> None:
    """Flags that choose the models, how their weights are stored and how they are computed."""
    add = parser.add_argument
    add("--target", metavar="ID|FOLDER|FILE.gguf", help="target model: hub id, local folder or GGUF file")
    add(
        "--drafter",
        metavar="ID|FOLDER|head|mtp|layers:K",
        help="drafter: a model, a head, the MTP layers in the target's files, or the first K layers of the target",
    )
    add("--pair", metavar="NAME", help=f"a known target and drafter: {', '.join(PAIRS)} (default: embedded)")
    add("--config", type=Path, metavar="FILE", help=f"TOML file with pairs and settings (default: {config_file()})")
    add("--device", type=device_flag, default="auto", metavar="auto|cpu|cuda|cuda:N|mps", help="default: auto")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="default: auto")
    add("--quantize", choices=QUANTIZATIONS, default="none", help="quantization of the target (default: none)")
    add("--drafter-quantize", choices=QUANTIZATIONS, default="none", help="quantization of the drafter (default: none)")
    add(
        "--engine-weights",
        choices=ENGINE_WEIGHTS,
        default="float32",
        help="format of the linear weights on a CPU; gguf: the blocks of the target's GGUF file (default: float32)",
    )
    for setting in flag_settings():
        add(
            f"--{setting.name}",
            type=flag_type(partial(_parsed, setting)),
            metavar=setting.value_type.usage,
            help=f"{setting.summary} (default: {setting.show(Settings())})",
        )
