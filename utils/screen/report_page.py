"""The report of a session: its measurements, models, machine and settings, as one HTML page.

The page has no scripts or external content, and is readable in light and dark and on paper. All text is escaped. The
content security policy allows one style sheet, by its hash, and nothing else.
"""

from base64 import b64encode
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from typing import Any

from utils.comparison.charts import Chart, acceptance_chart
from utils.comparison.reports import shortened
from utils.comparison.run_texts import TextPiece
from utils.comparison.session_state import MAX_RESULTS, ShownResult
from utils.comparison.speed_claims import NO_GAIN_SENTENCE
from utils.config.setting_table import as_json
from utils.config.settings import Settings
from utils.errors import UserError
from utils.screen.plots import svg_chart
from utils.text import byte_size, count_of, visible

Record = Mapping[str, Any]
ANSWERS = ("verdict", "race")  # reports whose sentences are the answer, the best one first
LEGEND = "Marked text consists of accepted drafts. Everything else was computed by the target itself."
NOTHING = "there is no result to export yet: send a prompt first."
ONE_RUN = "One run of each strategy. /race repeats them."
SERVERS = ("server", "URL", "model", "kind", "prompt sent as", "tokens counted by", "baseline")
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


def report_page(results: Collection[ShownResult], date: str) -> str:
    """The whole page as HTML. Raises UserError if nothing was measured."""
    kept = [result for result in results if result.records]  # without results that have no finished run
    if not kept:
        raise UserError(NOTHING)
    models = kept[-1].records[0]["models"]
    names = f"{models['target']} + {models['drafter'] or 'no drafter'}" if models["target"] else "Servers"
    return html_page(f"{names}: speculative decoding", _elements(kept, date))


def _elements(kept: Sequence[ShownResult], date: str) -> Iterator[str]:
    """Everything below the title."""
    every = [_setup(result.records[0]) for result in kept]
    setups = [setup for index, setup in enumerate(every) if setup not in every[:index]]
    program = kept[-1].records[0]["versions"]["program"]
    yield paragraph(f"{count_of(len(kept), 'result')} of one session, {date}, program version {program}.")
    if len(kept) == MAX_RESULTS:
        yield paragraph("Earlier results of the session are not part of this page.")
    yield from _answer(kept)
    for index, setup in enumerate(setups):
        yield heading("Setup" if len(setups) == 1 else f"Setup {index + 1}")
        yield table(setup_rows(setup))
    for number, (result, setup) in enumerate(zip(kept, every, strict=True), start=1):
        place = "" if len(setups) == 1 else f", setup {setups.index(setup) + 1}"
        yield from _report(number, result, place) if result.report else _prompt(number, result, place)
    yield heading("All settings of the last result")
    yield table([(name, _typed(value)) for name, value in kept[-1].records[0]["settings"].items()])


def _answer(kept: Sequence[ShownResult]) -> Iterator[str]:
    """The sentences of the last /verdict, or of the last /race."""
    reports = {result.report.name: (result.report, result.records[0]) for result in kept if result.report}
    if found := next((reports[name] for name in ANSWERS if name in reports), None):
        report, record = found
        yield heading("Answer")
        yield paragraph(report.headline + ("" if record["finished"] else " (interrupted)"))
        # The first sentence of /verdict is the answer, and the others explain it; /race has one for each strategy.
        strong = 1 if record["record"] == ANSWERS[0] else len(record["conclusion"])
        yield from (paragraph(line, strong=index < strong) for index, line in enumerate(record["conclusion"]))


def _setup(record: Record) -> dict[str, Any]:
    setup = {part: record[part] for part in ("models", "engine", "machine", "versions")}
    # New measurements of the engines change their figures a little, but not the setup.
    return setup | {"engine": {name: value for name, value in setup["engine"].items() if name != "table"}}


def setup_rows(setup: Record) -> list[tuple[str, str]]:
    """(name, value) of the models, the machine, the engine and the versions."""
    models, machine = setup["models"], setup["machine"]
    drafter = {name.removeprefix("drafter_"): value for name, value in models.items() if name.startswith("drafter_")}
    cores = f"{machine.get('cores') or '?'} cores, {machine.get('threads') or '?'} hardware threads"
    return [
        ("target", _model(models["target"], models) if models["target"] else "none"),
        ("drafter", _model(models["drafter"], drafter) if models["drafter"] else "none"),
        ("processor", f"{machine.get('cpu', 'unknown')}, {cores}"),
        ("GPU", ", ".join(machine.get("gpus") or ()) or "none"),
        ("memory", byte_size(machine["memory"]) if machine.get("memory") else "unknown"),
        ("system", str(machine.get("system", "unknown"))),
        *(_engine(setup["engine"]) if setup["engine"] else ()),
        ("versions", ", ".join(f"{name} {number}" for name, number in setup["versions"].items())),
    ]


def _engine(engine: Record) -> list[tuple[str, str]]:
    tested = "bit-identical" if engine.get("verified") else f"not bit-identical ({engine.get('reason')})"
    text = f"{engine['kind']}, {engine['weights']} weights, {count_of(engine['threads'], 'thread')}; {tested}"
    if (other := engine.get("faster_baseline")) is None:
        return [("engine", text)]
    elsewhere = f"{other['factor']:.2f}x as fast in {other['name']} (estimate)"
    return [("engine", text), ("target-only elsewhere", elsewhere)]


def _model(name: str, facts: Record) -> str:
    quantized = "" if facts.get("quantize") in (None, "none") else f", {facts['quantize']}"
    size = "" if facts.get("memory") is None else f", {byte_size(facts['memory'])}"
    return f"{name} ({facts.get('dtype')}{quantized}, on {facts.get('device')}{size})"


def _report(number: int, result: ShownResult, place: str) -> Iterator[str]:
    report, record = result.report, result.records[0]
    assert report is not None
    yield heading(f"{number}. {report.headline}")
    stopped = "" if record["finished"] else " It was interrupted; these are the finished parts."
    yield paragraph(f"{_changed(record)}{place}.{stopped}")
    rows = [finding.cells for finding in result.findings if finding.cells]
    if report.transposed:
        rows = list(zip(report.headings, *rows, strict=True))
    yield table(rows, () if report.transposed else report.headings)
    for further in report.tables(result.findings):
        yield paragraph(further.title)
        yield table(further.rows, further.headings)
        if further.note:
            yield paragraph(further.note)
    yield from map(_figure, report.charts(result.findings))
    yield from (paragraph(line) for line in record["conclusion"])
    if attachment := report.attachment(result.findings):
        yield verbatim([TextPiece(attachment, False)])


def _prompt(number: int, result: ShownResult, place: str) -> Iterator[str]:
    records, first = result.records, result.records[0]
    yield heading(f"{number}. Prompt: {shortened(first['prompt'])}")
    turn = f" Turn {first['turn'] + 1} of a conversation." if first.get("turn") else ""
    yield paragraph(f"{_changed(first)}{place}.{turn}")
    yield verbatim([TextPiece(first["prompt"], False)])
    servers = [row for row in records if row["server"]]
    if servers:
        yield table([_server(row) for row in servers], SERVERS)
    rows = list(zip(*result.cells.values(), strict=True))
    yield table(rows, [heading.replace("/\n", "/").replace("\n", " ") for heading in result.cells])
    noise = (f"{row[0]}: {NO_GAIN_SENTENCE}, so its speed-up is noise." for row in rows if "noise" in row)
    yield paragraph(" ".join([ONE_RUN, *noise]))
    yield from (paragraph(f"{row['strategy']}: {row['acceptance_note']}") for row in servers if row["acceptance_note"])
    yield from map(_figure, acceptance_chart(records))
    yield from (paragraph(_times(row)) for row in records if row["draft_seconds"] is not None)
    if any(row["accepted"] for row in records if not row["server"]):
        yield paragraph(LEGEND)
    yield from _texts(records, result)


def _times(row: Record) -> str:
    """What a strategy spent its time on."""
    drafting, verifying = row["draft_seconds"], row["verify_seconds"]
    other = max(0.0, row["seconds"] - drafting - verifying)
    return f"{row['strategy']}: {drafting:.3f} s drafting, {verifying:.3f} s verifying, {other:.3f} s for the rest."


def _texts(records: Sequence[Record], result: ShownResult) -> Iterator[str]:
    """The text of each run. A text without marks that repeats an earlier one is not shown again."""
    seen: dict[tuple[int, ...] | str, str] = {}
    for row in records:
        name, own = row["strategy"], row["text"] if row["server"] else tuple(row["token_ids"])
        tokens = "" if row["new_tokens"] is None else f"{count_of(row['new_tokens'], 'token')}, "
        yield heading(f"{name}: {tokens}{_finish(row)}", 3)
        if row["divergence"]:
            position, cause = row["first_difference"] + 1, row["divergence"]["cause"]
            yield paragraph(f"It differs from the target's text at token {position}: {cause}.")
        if own in seen and (row["server"] or not row["accepted"]):
            yield paragraph(f"The same text as {seen[own]}.")
        else:
            yield verbatim(result.texts[name])
        seen.setdefault(own, name)


def _finish(row: Record) -> str:
    endings = {"stop": "complete", "length": f"cut at {count_of(row['settings']['length'], 'token')} (/length)"}
    return endings.get(row["finish"]) or str(row["finish"])


def _server(row: Record) -> list[str]:
    server = row["server"]
    values = (server[name] for name in ("name", "url", "model", "kind", "prompt_form"))
    return [*map(str, values), row["tokens_counted_by"], row["baseline"] or "-"]


def _changed(record: Record) -> str:
    """The settings that differ from their defaults. Costs are measured, so they are left out."""
    defaults = as_json(Settings())
    changed = {name: value for name, value in record["settings"].items() if value != defaults.get(name)}
    changed.pop("costs", None)
    shown = ", ".join(f"{name} {_typed(value)}" for name, value in changed.items())
    return f"Settings: {shown}; the others have their defaults" if shown else "Default settings"


def _typed(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


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


def table(rows: Iterable[Sequence[str]], headings: Sequence[str] = ()) -> str:
    """Rows under headings. Without headings, the first column has the labels of the others."""
    head = "".join(f'<th scope="col">{_text(heading)}</th>' for heading in headings)
    thead = f"<thead><tr>{head}</tr></thead>\n" if head else ""
    body = "\n".join(
        f'<tr><th scope="row">{_text(first)}</th>{"".join(f"<td>{_text(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return f'<div class="wide"><table>\n{thead}<tbody>\n{body}\n</tbody>\n</table></div>'


def verbatim(pieces: Iterable[TextPiece]) -> str:
    """A text exactly as it is. Pieces from accepted drafts are marked."""
    # A newline directly after <pre> would be dropped, so there is always one.
    return f"<pre>\n{''.join(map(_piece, pieces))}</pre>"


def _piece(piece: TextPiece) -> str:
    return f"<mark>{_text(piece.text)}</mark>" if piece.accepted else _text(piece.text)


def _figure(chart: Chart) -> str:
    return f"<figure>{svg_chart(chart)}</figure>"
