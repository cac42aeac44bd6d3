"""/export: a report of the session as a page, or the last result as a picture of the screen or as records."""

import json
from collections.abc import Callable
from csv import DictWriter
from datetime import UTC, datetime
from io import StringIO

from utils.commands.shared.outcomes import Outcome, Reply
from utils.commands.shared.paths import output_in
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.session_state import ShownResult
from utils.errors import UserError
from utils.files import write_file
from utils.screen.renderer import picture
from utils.screen.report_page import NOTHING, report_page
from utils.screen.run_view import show_prompt_runs, show_report

Exporter = Callable[[ShownResult, CommandContext], str]
PAGE = "html"  # the format of the whole session; other formats export the last result


def _export(argument: str, context: CommandContext) -> Outcome:
    path, overwrite = output_in(argument, "/export report.html")
    form = path.suffix.lower().removeprefix(".")
    if form not in EXPORTERS:
        endings = ", ".join(f".{name}" for name in EXPORTERS)
        raise UserError(f"'{path}' does not end in one of {endings}; write for example report.html.")
    shown = context.harness.state.shown
    if shown is None or not (shown.records or form == PAGE):
        raise UserError(NOTHING)
    content = EXPORTERS[form](shown, context)
    # Model output may contain lone surrogates, which strict UTF-8 refuses.
    write_file(path, content.encode("utf-8", errors="replace"), overwrite=overwrite)
    last = "the last report" if shown.report else "the runs of the last prompt"
    return [Reply(f"{'a report of the session' if form == PAGE else last} written to {path}")]


def _page(_: ShownResult, context: CommandContext) -> str:
    return report_page(context.harness.state.results, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC")


def _picture(shown: ShownResult, context: CommandContext) -> str:
    if report := shown.report:
        return picture(lambda renderer: show_report(renderer, report, shown.findings))
    last = context.harness.state.last
    assert last is not None
    return picture(lambda renderer: show_prompt_runs(renderer, last, shown.causes))


def _records(shown: ShownResult, context: CommandContext) -> str:
    """JSON lines, as written by --json."""
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in shown.records)


def _rows(shown: ShownResult, context: CommandContext) -> str:
    """CSV: a row for each request of a load, each finding of another report, or each run of a prompt."""
    rows = shown.records
    if shown.report is not None:
        rows = rows[1:] or rows[0]["findings"]
    nested = {name for row in rows for name, value in row.items() if isinstance(value, (list, tuple, dict))}
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in nested]
    file = StringIO(newline="")
    writer = DictWriter(file, names, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


EXPORTERS: dict[str, Exporter] = {PAGE: _page, "svg": _picture, "jsonl": _records, "json": _records, "csv": _rows}
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
            "/export FILE.svg         the last result in colours, as on the screen",
            "/export FILE.jsonl       its records, as --json writes them; .json is accepted, too",
            "/export FILE.csv         its rows, or the requests of /server load, without lists",
            "/export FILE overwrite   replaces a file",
        ),
        ("texts", "save"),
    ),
    files=("",),
)
