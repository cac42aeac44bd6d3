"""Everything that is drawn. This module shows a line while Python imports torch, so it imports nothing heavy itself."""

import os
import sys

IMPORTING = "importing torch and transformers ..."
CLEAR_LINE = "\r\x1b[K"


def show_importing() -> None:
    """Show the line, if both streams are a terminal that can clear it."""
    if _is_possible():
        sys.stdout.write(IMPORTING)
        sys.stdout.flush()


def clear_importing() -> None:
    """Remove the line."""
    if _is_possible():
        sys.stdout.write(CLEAR_LINE)
        sys.stdout.flush()


def _is_possible() -> bool:
    streams = (sys.stdin, sys.stdout)
    return all(stream is not None and stream.isatty() for stream in streams) and os.environ.get("TERM") != "dumb"
