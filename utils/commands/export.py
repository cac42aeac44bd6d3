"""/export: a report of the session as a page, or the last result as a picture of the screen, plots or records."""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial

from utils.commands.outcomes import Outcome, Reply
from utils.commands.paths import output_in, write_output
from utils.commands.registry import Command, CommandContext, Page
from utils.comparison.charts import Chart, caption, prompt_charts
from utils.comparison.session_state import ShownResult
from utils.errors import UserError
from utils.screen.figures import png_plot, svg_plot
from utils.screen.html_page import html_page
from utils.screen.markdown_page import markdown_page
from utils.screen.report_blocks import Block
from utils.screen.report_page import NOTHING, report_blocks
from utils.screen.run_view import show_prompt_runs, show_report
from utils.screen.screenshots import picture

Exporter = Callable[[ShownResult, CommandContext], str | bytes]
PAGES = ("html", "md")  # forms of the whole session; the others are of the last result


def _export(argument: str, context: CommandContext) -> Outcome:
    file = output_in(argument, "/export report.html")
    form = next((form for form in EXPORTERS if file.path.name.lower().endswith(f".{form}")), "")
    if not form:
        endings = ", ".join(f".{name}" for name in EXPORTERS)
        raise UserError(f"'{file.path}' does not end in one of {endings}; write for example report.html.")
    state = context.harness.state
    shown = state.shown
    if shown is None or not (shown.records or form in PAGES):
        raise UserError(NOTHING)
    content = EXPORTERS[form](shown, context)
    # Model output can hold lone surrogates, which strict UTF-8 refuses.
    write_output(file, content if isinstance(content, bytes) else content.encode("utf-8", errors="replace"))
    what = f"/{shown.report.name}" if shown.report else "the runs of the last prompt"
    if form in PAGES:
        what = "a report of the session"
    return [Reply(f"{what} written to {file.path}")]


def _page(write: Callable[[Iterable[Block]], str], _: ShownResult, context: CommandContext) -> str:
    return write(report_blocks(context.harness.state.results, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"))


def _picture(shown: ShownResult, context: CommandContext) -> str:
    if report := shown.report:
        return picture(lambda renderer: show_report(renderer, report, shown.findings))
    state = context.harness.state
    return picture(lambda renderer: show_prompt_runs(renderer, state.last, shown.causes, state.last_servers))


def _plot(draw: Callable[[Sequence[Chart], str], str | bytes], shown: ShownResult, _: CommandContext) -> str | bytes:
    charts = shown.report.charts(shown.findings) if shown.report else prompt_charts(shown.records)
    if not charts:
        raise UserError("the last result has no plot: run /whatif, /race or /why first, or export .svg or .html.")
    return draw(charts, caption(shown.records[0]))


def _records(shown: ShownResult, context: CommandContext) -> str:
    """JSON lines, as --json writes them."""
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in shown.records)


EXPORTERS: dict[str, Exporter] = {
    "html": partial(_page, html_page),
    "md": partial(_page, markdown_page),
    "plot.svg": partial(_plot, svg_plot),
    "svg": _picture,
    "png": partial(_plot, png_plot),
    "json": _records,
}
EXPORT = Command(
    "export",
    "FILE",
    "a report of the session, or a picture",
    _export,
    group="results",
    rank=3,
    page=Page(
        "Write what the session has measured, or the last result, to a file. The ending of its name decides.",
        ("> /export report.html", "a report of the session written to report.html"),
        (
            "/export FILE.html        a page with all results of the session, texts and plots",
            "/export FILE.md          the same for GitHub",
            "/export FILE.svg         the last result in colours, as on the screen",
            "/export FILE.png         its plots; FILE.plot.svg: the same as SVG",
            "/export FILE.json        its records, as --json writes them",
            "/export FILE overwrite   replaces a file",
        ),
        ("texts", "save"),
    ),
    files=("",),
)
