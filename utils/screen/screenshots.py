"""Pictures of what the screen showed, in its colours: HTML and SVG that need nothing from elsewhere."""

import re
from collections.abc import Callable
from io import StringIO
from typing import Any

from rich.console import Console
from rich.text import Text

from utils.screen.renderer import Renderer

WIDTH = 110
# Whatever the terminal is like.
SAME_ANYWHERE: dict[str, Any] = {
    "width": WIDTH,
    "height": 50,
    "force_terminal": True,
    "no_color": False,
    "highlight": False,
}
TITLE = "speculative decoding, side by side"


def picture(show: Callable[[Renderer], None], form: str) -> str:
    """What `show` puts on a screen of its own, as "html" or "svg"."""
    drawn = StringIO()
    console = Console(file=drawn, color_system="standard", markup=False, emoji=False, **SAME_ANYWHERE)
    show(Renderer(console, console, colour=True))
    page = Console(file=StringIO(), record=True, color_system="truecolor", **SAME_ANYWHERE)
    page.print(Text.from_ansi(drawn.getvalue()))
    if form == "html":
        return page.export_html(inline_styles=True)
    # The viewer's own fonts: the two that rich names would be fetched from a network.
    return re.sub(r"@font-face \{.*?\}", "", page.export_svg(title=TITLE), count=2, flags=re.DOTALL)
