"""/export: write the last result to a file: a picture in colours, its plot, or its records."""

import json
from collections.abc import Callable, Sequence
from functools import partial

from utils.commands.outcomes import Outcome, Reply
from utils.commands.paths import output_in, write_output
from utils.commands.registry import Command, CommandContext, Page
from utils.comparison.charts import Chart, caption, prompt_charts
from utils.comparison.session_state import ShownResult
from utils.errors import UserError
from utils.screen.figures import png_plot, svg_plot
from utils.screen.run_view import show_prompt_runs, show_report
from utils.screen.screenshots import picture

FORMS = ("html", "plot.svg", "svg", "png", "json")


def _export(argument: str, context: CommandContext) -> Outcome:
    file = output_in(argument, "/export evening.svg")
    form = next((form for form in FORMS if file.path.name.lower().endswith(f".{form}")), "")
    if not form:
        endings = ", ".join(f".{name}" for name in FORMS)
        raise UserError(f"'{file.path}' does not end in one of {endings}; write for example evening.svg.")
    shown = context.harness.state.shown
    if shown is None or not shown.records:
        raise UserError("there is no result to export yet: send a prompt first.")
    content = EXPORTERS[form](shown, context)
    # Model output can hold lone surrogates, which strict UTF-8 refuses.
    write_output(file, content if isinstance(content, bytes) else content.encode("utf-8", errors="replace"))
    return [
        Reply(f"{f'/{shown.report.name}' if shown.report else 'the runs of the last prompt'} written to {file.path}")
    ]


def _picture(form: str, shown: ShownResult, context: CommandContext) -> str:
    if report := shown.report:
        return picture(lambda renderer: show_report(renderer, report, shown.findings), form)
    return picture(lambda renderer: show_prompt_runs(renderer, context.harness.last(), shown.causes), form)


def _plot(draw: Callable[[Sequence[Chart], str], str | bytes], shown: ShownResult, _: CommandContext) -> str | bytes:
    charts = shown.report.charts(shown.findings) if shown.report else prompt_charts(shown.records)
    if not charts:
        raise UserError("the last result has no plot: run /whatif, /race or /why first, or export .svg or .html.")
    return draw(charts, caption(shown.records[0]))


def _records(shown: ShownResult, context: CommandContext) -> str:
    """JSON lines, as --json writes them."""
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in shown.records)


EXPORTERS: dict[str, Callable[[ShownResult, CommandContext], str | bytes]] = {
    "html": partial(_picture, "html"),
    "svg": partial(_picture, "svg"),
    "png": partial(_plot, png_plot),
    "plot.svg": partial(_plot, svg_plot),
    "json": _records,
}
EXPORT = Command(
    "export",
    "FILE",
    "write the last result to a file",
    _export,
    group="results",
    rank=3,
    page=Page(
        "Write the last result to a file. The ending of its name decides the format.",
        ("> /export evening.svg", "the runs of the last prompt written to evening.svg"),
        (
            "/export FILE.svg         a picture in colours",
            "/export FILE.html        the same as a page",
            "/export FILE.png         the plots; FILE.plot.svg: the same as SVG",
            "/export FILE.json        the records, as --json writes them",
            "/export FILE overwrite   replaces a file",
        ),
        ("texts", "save"),
    ),
)
