"""`make bench`: our decoders against transformers' own and llama.cpp on this machine, with interleaved runs.

It ends with a table of bars, and writes a JSON file with all figures. arms.py has our arms, peers.py the
others, probes.py single figures, bars.py the bars.
"""

import os

FOUND = dict(os.environ)  # what a user of the peers would run them with
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported; as infer.py does
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

import report
from bars import bars
from measurement import Bench, load

from utils.bounds import ENGINE_WEIGHTS, ENGINES
from utils.metrics.intervals import Interval
from utils.screen.renderer import Renderer, make_renderer

PARTS = ("texts", "long", "verify", "perplexity", "memory")


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark that the flags describe."""
    flags = flags_of(argv)
    screen = make_renderer(interactive=False)
    loaded = load(flags, screen, FOUND)
    try:
        result = Bench(flags, screen, loaded).measure()
    finally:
        loaded.close()
    finish(result, flags, screen)


def finish(result: dict[str, Any], flags: argparse.Namespace, screen: Renderer) -> None:
    """Show the results and write them."""
    rows = bars(result)
    report.show(screen, result, rows)
    result["bars"] = [bar.figures() for bar in rows]
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / "bench.json").write_text(json.dumps(result, indent=1, default=_plain) + "\n", encoding="utf-8")
    if flags.append:
        report.append(result, rows)
    screen.result(f"written to {flags.out / 'bench.json'}")


def flags_of(argv: list[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--prompts", type=Path, default=HERE / "prompts.jsonl", help="JSON lines with 'prompt' and 'task'")
    add("--tokens", type=int, default=32, help="maximum number of new tokens (default: 32)")
    add("--repeats", type=int, default=1, help="runs of every arm on every prompt (default: 1)")
    add("--drafter", default="head", help="drafter of our arms, and of generate if it is a model (default: head)")
    add("--engine", choices=ENGINES, default="auto", help="of our arms (default: auto)")
    add("--engine-weights", choices=ENGINE_WEIGHTS, default="float32", help="of our arms (default: float32)")
    add("--skip", action="append", default=[], metavar="ARM", help="leave out an arm, e.g. 'generate, assistant'")
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: everything)")
    add("--append", action="store_true", help="append the results to the table in tests/benchmarks/README.md")
    add("--out", type=Path, default=Path(".bench"), help="folder of bench.json (default: .bench)")
    return parser.parse_args(argv)


def _plain(value: Any) -> Any:
    """An interval as JSON, without infinity."""
    assert isinstance(value, Interval)
    return {"estimate": value.estimate, "interval": [value.low, value.high] if value.is_bounded else None}


if __name__ == "__main__":
    main()
