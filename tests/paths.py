"""Folders that tests read from."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "tests" / "benchmarks"
