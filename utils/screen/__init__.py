"""Everything that is drawn. This module shows a line while Python imports torch, so it imports nothing heavy itself."""

import os
import sys

IMPORTING = "importing torch and transformers ..."
CLEAR_LINE = "\r\x1b[K"


def show_importing(text: str = IMPORTING) -> None:
    """Show a text, if both streams are a terminal whose line can be cleared."""
    streams = (sys.stdin, sys.stdout)
    if all(stream is not None and stream.isatty() for stream in streams) and os.environ.get("TERM") != "dumb":
        sys.stdout.write(text)
        sys.stdout.flush()
