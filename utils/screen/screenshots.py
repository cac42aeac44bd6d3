"""Pictures of what the screen shows, in colour: self-contained SVG.

Every word is placed at its own column, so that the picture is the same in all viewers: they differ in how they treat
blanks and the width of a text, and their fixed-width fonts differ in width.
"""

from collections.abc import Callable, Iterator
from html import escape
from io import StringIO
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME as THEME
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
CELL, LINE, SIZE = 8.43, 19.0, 14  # of the text: width of a column, height of a line, font size
LEFT, TOP = 12.0, 44.0
FONTS = "'DejaVu Sans Mono', 'Liberation Mono', Menlo, Consolas, monospace"
DOTS = ("#ff5f57", "#febc2e", "#28c840")
RULES = "─-"  # runs of these become lines
MIN_RULE = 4
PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" \
height="{height:g}" font-family="{fonts}" font-size="{size}">
<rect width="{width:g}" height="{height:g}" rx="8" fill="{background}"/>
{dots}
<text x="{middle:g}" y="22" text-anchor="middle" fill="{foreground}">{title}</text>
{body}
</svg>
"""


class Word(NamedTuple):
    """A piece of a line without blanks. column: where it begins."""

    text: str
    column: int
    style: Style


def picture(show: Callable[[Renderer], None]) -> str:
    """What `show` draws, as SVG."""
    # In two steps: streamed text is written past rich, so its escape sequences are captured and read back.
    captured = StringIO()
    console = Console(file=captured, color_system="standard", markup=False, emoji=False, **CONSOLE_OPTIONS)
    show(Renderer(console, console, colour=True))
    page = Console(file=StringIO(), color_system="truecolor", **CONSOLE_OPTIONS)
    lines = page.render_lines(Text.from_ansi(captured.getvalue()), pad=False)
    width, height = 2 * LEFT + CELL * WIDTH, TOP + LINE * len(lines) + 12
    words = (_drawn(word, TOP + LINE * (row + 0.75)) for row, line in enumerate(lines) for word in line_words(line))
    return PICTURE.format(
        width=round(width),
        height=round(height),
        fonts=FONTS,
        size=SIZE,
        background=THEME.background_color.hex,
        foreground=THEME.foreground_color.hex,
        middle=round(width / 2),
        title=escape(TITLE),
        dots="".join(f'<circle cx="{20 + 20 * place}" cy="18" r="6" fill="{dot}"/>' for place, dot in enumerate(DOTS)),
        body="\n".join(words),
    )


def line_words(line: list[Segment]) -> Iterator[Word]:
    """The words of a line at their columns. A wide character is a word of its own."""
    column = 0
    for segment in line:
        style, word = segment.style or Style.null(), ""
        for character in f"{segment.text} ":
            # A blank ends the last word of a segment.
            width = cell_len(character)
            if word and (character.isspace() or width > 1 or cell_len(word[-1]) > 1 or _breaks(word[-1], character)):
                yield Word(word, column - cell_len(word), style)
                word = ""
            word += "" if character.isspace() else character
            column += width
        column -= 1  # the blank that was added


def _breaks(last: str, character: str) -> bool:
    """Whether one of two neighbours belongs to a rule and the other one does not."""
    return last != character and (last in RULES or character in RULES)


def _drawn(word: Word, y: float) -> str:
    x, style = LEFT + CELL * word.column, word.style
    colour = _colour(style)
    if len(word.text) >= MIN_RULE and set(word.text) <= set(RULES):
        length = CELL * len(word.text)
        return f'<path d="M{x:.1f} {y - 4.5:.1f}h{length:.1f}" stroke="{colour}" stroke-width="1.2"/>'
    bold = ' font-weight="bold"' if style.bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}"{bold}>{escape(word.text)}</text>'


def _colour(style: Style) -> str:
    front = THEME.foreground_color if style.color is None else style.color.get_truecolor(THEME)
    if not style.dim:
        return front.hex
    back = THEME.background_color
    return "#" + "".join(f"{(ours + theirs) // 2:02x}" for ours, theirs in zip(front, back, strict=True))
