"""A report as one HTML page without scripts or external content, readable in light and dark and on paper.

All text is escaped. The content security policy allows one style sheet, by its hash, and nothing else.
"""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape
from typing import NamedTuple

from utils.comparison.charts import Chart
from utils.comparison.run_texts import TextPiece
from utils.screen.svg_charts import svg_chart
from utils.text import visible

STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --muted: #59636e; --page: #ffffff; --line: #d1d9e0;
  --block: #f6f8fa; --accepted: #b7efc5; --edge: #1a7f37; --strong: #ddf4ff; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --muted: #9198a1; --page: #0d1117; --line: #3d444d;
  --block: #161b22; --accepted: #12532a; --edge: #3fb950; --strong: #0c2d4d; } }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-top: 1px solid var(--line); padding-top: 0.8rem; }
h3 { font-size: 1rem; margin-bottom: 0.3rem; }
p { margin: 0.4rem 0; }
.strong { background: var(--strong); padding: 0.4rem 0.8rem; border-radius: 6px; }
pre { margin: 0.4rem 0; padding: 0.6rem 0.8rem; border-radius: 6px; background: var(--block); white-space: pre-wrap;
  font: 0.9rem/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
mark { background: var(--accepted); color: inherit; border-bottom: 1px solid var(--edge); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 0.6rem 0; font-size: 0.87rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.6rem 0.25rem 0; text-align: left; vertical-align: top; overflow-wrap: normal;
  border-bottom: 1px solid var(--line); }
thead th { color: var(--muted); }
figure { margin: 0.8rem 0; }
svg { max-width: 100%; height: auto; }
@media print { body { max-width: none; font-size: 11pt; }
  mark, .strong, pre { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .wide { overflow: visible; } h1, h2, h3 { break-after: avoid; } figure, tr { break-inside: avoid; } }
"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'sha256-{digest}'; \
base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


class Cell(NamedTuple):
    """A cell of a table. `exact` is the figure with all its digits, if it was rounded."""

    text: str
    exact: str = ""


def html_page(title: str, elements: Iterable[str]) -> str:
    """A page of these elements, with its title as the first heading."""
    digest = b64encode(sha256(STYLE.encode()).digest()).decode()
    body = "\n".join([heading(title, 1), *elements])
    return PAGE.format(digest=digest, title=_text(title), style=STYLE, body=body)


def _text(text: str) -> str:
    # `visible` also removes characters that a document must not contain.
    return escape(visible(text), quote=True)


def heading(text: str, level: int = 2) -> str:
    """A heading. Level 1 is the title of the page."""
    return f"<h{level}>{_text(text)}</h{level}>"


def paragraph(text: str, *, strong: bool = False) -> str:
    """One or more sentences. `strong` marks the answer of the page."""
    return f'<p class="strong">{_text(text)}</p>' if strong else f"<p>{_text(text)}</p>"


def table(rows: Iterable[Sequence[Cell]], headings: Sequence[str] = ()) -> str:
    """Rows under headings. Without headings, the first column has the labels of the others."""
    head = "".join(f'<th scope="col">{_text(heading)}</th>' for heading in headings)
    body = "\n".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    thead = f"<thead><tr>{head}</tr></thead>\n" if head else ""
    return f'<div class="wide"><table>\n{thead}<tbody>\n{body}\n</tbody>\n</table></div>'


def _cells(row: Sequence[Cell]) -> str:
    first, *rest = row
    exact = (f' title="{_text(cell.exact)}"' if cell.exact else "" for cell in rest)
    return f'<th scope="row">{_text(first.text)}</th>' + "".join(
        f"<td{title}>{_text(cell.text)}</td>" for title, cell in zip(exact, rest, strict=True)
    )


def verbatim(pieces: Iterable[TextPiece]) -> str:
    """A text exactly as it is. Pieces from accepted drafts are marked."""
    # A newline directly after <pre> would be dropped, so there is always one.
    return f"<pre>\n{''.join(map(_piece, pieces))}</pre>"


def _piece(piece: TextPiece) -> str:
    return f"<mark>{_text(piece.text)}</mark>" if piece.accepted else _text(piece.text)


def figure(chart: Chart) -> str:
    """A chart."""
    return f"<figure>{svg_chart(chart)}</figure>"
