"""The command line: flags and their checks, without any heavy import, so that --help answers at once."""

import argparse
import re
from pathlib import Path

from utils.bounds import DEVICE_PATTERN, DTYPES, ENGINE_WEIGHTS, ENGINES, MAX_SEED, MAX_THREADS, QUANTIZATIONS
from utils.config.config_file import config_file, read_config
from utils.errors import UserError, one_of
from utils.pairs.known_pairs import PAIRS
from utils.version import VERSION


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags, and what the config file says where they are silent; argparse leaves with status 2 where they are wrong."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        arguments.config = config = read_config(arguments.config)
        if arguments.pair:
            one_of(arguments.pair, tuple(config.pairs), "pair")
    except UserError as error:
        parser.error(str(error))
    parser.set_defaults(**config.flags)
    arguments = parser.parse_args(argv)
    arguments.config = config
    if arguments.pair and (arguments.target or arguments.drafter):
        parser.error("--pair names both models; leave out --target and --drafter, or leave out --pair")
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infer.py",
        description="Does speculative decoding help, with which settings, and is the text really the target's own?",
        epilog="Pairs: "
        + "; ".join(f"{name}: {pair.summary}" for name, pair in PAIRS.items())
        + "; and those of the config file",
    )
    parser.add_argument(
        "--target", metavar="ID|FOLDER|FILE.gguf", help="target model: hub id, local folder or GGUF file"
    )
    parser.add_argument(
        "--drafter", metavar="ID|FOLDER|head|layers:K", help="drafter model or head, or the target's own first K layers"
    )
    parser.add_argument(
        "--pair", metavar="NAME", help=f"a known target and drafter: {', '.join(PAIRS)} (default: embedded)"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"pairs and settings in TOML (default: {config_file()}, if there)"
    )
    parser.add_argument(
        "--device", type=_device, default="auto", metavar="auto|cpu|cuda|cuda:N|mps", help="default: auto"
    )
    parser.add_argument(
        "--drafter-device", type=_device, metavar="DEVICE", help="of the drafter's weights (default: the target's)"
    )
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="default: auto")
    parser.add_argument("--quantize", choices=QUANTIZATIONS, help="the target's weights (default: the pair's)")
    parser.add_argument("--drafter-quantize", choices=QUANTIZATIONS, help="the drafter's weights (default: the pair's)")
    parser.add_argument("--engine", choices=ENGINES, help="how the models are computed (default: auto)")
    parser.add_argument(
        "--engine-weights",
        choices=ENGINE_WEIGHTS,
        default="float32",
        help="int8: one byte per weight, on a CPU (default: float32)",
    )
    parser.add_argument(
        "--threads", type=_threads, metavar="N|auto", help="CPU threads (default: auto, as many as help)"
    )
    parser.add_argument("--seed", type=_seed, metavar="N", help="seed of every run (default: 42)")
    parser.add_argument(
        "-c", dest="lines", action="append", default=[], metavar="LINE", help="run a line and leave; repeatable"
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="run a file of prompts, a line each, or JSON lines with 'prompt'"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON record per generation")
    parser.add_argument("--no-color", action="store_true", help="plain text")
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    return parser


def _device(text: str) -> str:
    if not re.fullmatch(f"auto|{DEVICE_PATTERN}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a device; choose auto, cpu, cuda, cuda:N or mps")
    return text


def _seed(text: str) -> int:
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII) or int(text) > MAX_SEED:
        raise argparse.ArgumentTypeError(f"'{text}' is not a seed; choose a whole number from 0 to {MAX_SEED}")
    return int(text)


def _threads(text: str) -> int:
    if text == "auto":
        return 0
    if not re.fullmatch(r"\d{1,4}", text, re.ASCII) or not 1 <= int(text) <= MAX_THREADS:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of threads; choose 1 to {MAX_THREADS}, or auto")
    return int(text)
