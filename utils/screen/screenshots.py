"""Pictures of what the screen shows, in colour: self-contained HTML and SVG."""

import re
from collections.abc import Callable
from io import StringIO
from typing import Any

from rich.console import Console
from rich.text import Text

from utils.screen.renderer import Renderer

WIDTH = 110
# The same for every terminal.
CONSOLE_OPTIONS: dict[str, Any] = {
    "width": WIDTH,
    "height": 50,
    "force_terminal": True,
    "no_color": False,
    "highlight": False,
}
TITLE = "speculative decoding, side by side"


def picture(show: Callable[[Renderer], None], form: str) -> str:
    """What `show` draws, as "html" or "svg"."""
    # In two steps: streamed text is written past rich, so a recording console would miss it. Its escape sequences are
    # captured and read back.
    captured = StringIO()
    console = Console(file=captured, color_system="standard", markup=False, emoji=False, **CONSOLE_OPTIONS)
    show(Renderer(console, console, colour=True))
    page = Console(file=StringIO(), record=True, color_system="truecolor", **CONSOLE_OPTIONS)
    page.print(Text.from_ansi(captured.getvalue()))
    if form == "html":
        return page.export_html(inline_styles=True)
    # rich refers to two fonts on the web; without them the viewer uses its own.
    return re.sub(r"@font-face \{.*?\}", "", page.export_svg(title=TITLE), count=2, flags=re.DOTALL)
