"""A chart as an SVG element inside an HTML page: no styles, ids or links, and in the colour of the page's text.

matplotlib writes style attributes, which a strict content security policy forbids, and references by id, which clash
with those of other charts of the page.
"""

from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from utils.comparison.charts import Chart
from utils.screen.figures import transparent_svg
from utils.text import visible

SVG, LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
DROPPED = ("id", "style", "clip-path", "version", LINK)  # nothing is drawn outside of the axes, so no clips are needed
BLACK, PAGE_COLOUR = "#000000", "currentColor"


def inline_svg(chart: Chart) -> str:
    """The SVG element of a chart."""
    source = ElementTree.fromstring(transparent_svg(chart))
    symbols = {f"#{part.get('id')}": part for defs in source.iter(f"{SVG}defs") for part in defs.iter(f"{SVG}path")}
    root = _plain(source, symbols)
    # Lines of matplotlib have round joins by a style sheet.
    root.attrib |= {"role": "img", "aria-label": visible(chart.title), "fill": PAGE_COLOUR, "stroke-linejoin": "round"}
    return ElementTree.tostring(root, encoding="unicode")


def _plain(source: Element, symbols: dict[str, Element]) -> Element:
    """A copy without namespaces, and with attributes instead of styles."""
    if source.tag == f"{SVG}use":
        return _used(source, symbols[source.attrib[LINK]])
    made = Element(source.tag.removeprefix(SVG), _attributes(source))
    made.text = source.text
    made.extend(_plain(part, symbols) for part in source if part.tag not in (f"{SVG}defs", f"{SVG}metadata"))
    return made


def _used(use: Element, symbol: Element) -> Element:
    """A symbol, drawn where it is used."""
    attributes = _attributes(use) | _attributes(symbol)
    place = f"translate({attributes.pop('x', '0')} {attributes.pop('y', '0')})"
    return Element("path", attributes | {"transform": place})


def _attributes(source: Element) -> dict[str, str]:
    kept = {name: value for name, value in source.attrib.items() if name not in DROPPED}
    styles = (style.split(":", 1) for style in source.get("style", "").split(";") if ":" in style)
    kept |= {name.strip(): value.strip() for name, value in styles}
    return {name: PAGE_COLOUR if value == BLACK else value for name, value in kept.items()}
