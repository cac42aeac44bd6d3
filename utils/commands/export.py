"""/export: what was shown last, as a file: a picture in colours, a chart, or its records."""

import json
from collections.abc import Callable
from functools import partial

from utils.commands.paths import path_in, write_new
from utils.commands.registry import Command, Outcome, Situation
from utils.comparison.harness import Shown
from utils.errors import UserError
from utils.screen.plots import line_png
from utils.screen.run_view import show_again, show_report
from utils.screen.screenshots import picture

FORMS = ("html", "svg", "png", "json")


def _export(argument: str, situation: Situation) -> Outcome:
    path = path_in(argument, "/export evening.svg")
    form = path.suffix.lower().removeprefix(".")
    if form not in FORMS:
        raise UserError(
            f"'{argument}' ends in none of {', '.join(f'.{name}' for name in FORMS)}, for example evening.svg."
        )
    shown = situation.bench.memory.shown
    if shown is None or not shown.records:
        raise UserError("nothing was shown yet that could be exported: send a prompt first.")
    made = MAKERS[form](shown, situation)
    write_new(path, made if isinstance(made, bytes) else made.encode("utf-8", errors="replace"))
    return Outcome(
        reply=f"{f'/{shown.report.name}' if shown.report else 'the runs of the last prompt'} written to {path}"
    )


def _picture(form: str, shown: Shown, situation: Situation) -> str:
    if report := shown.report:
        return picture(lambda renderer: show_report(renderer, report, shown.findings), form)
    return picture(lambda renderer: show_again(renderer, situation.bench.last(), shown.causes), form)


def _chart(shown: Shown, situation: Situation) -> bytes:
    chart = shown.report.chart(shown.findings) if shown.report else None
    if chart is None:
        raise UserError(
            "only what has a plot becomes a PNG: /whatif, /race or /sweep first; .svg and .html take everything."
        )
    return line_png(chart)


def _records(shown: Shown, situation: Situation) -> str:
    """As --json appends them, a line each."""
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in shown.records)


MAKERS: dict[str, Callable[[Shown, Situation], str | bytes]] = {
    "html": partial(_picture, "html"),
    "svg": partial(_picture, "svg"),
    "png": _chart,
    "json": _records,
}
EXPORT = Command(
    "export",
    "FILE",
    "what was shown last as a file: .svg or .html in its colours, .png its plot, .json its records",
    _export,
)
