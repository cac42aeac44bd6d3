"""/export: what the last prompt or report showed, as a file: a picture in colours, a chart, or its records."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from utils.commands.files import written
from utils.commands.registry import Command, Outcome, Situation
from utils.errors import UserError, one_of
from utils.models.sources import path_of
from utils.pictures import picture
from utils.plots import line_png
from utils.records import generation_records, report_record
from utils.run_view import show_again, show_report

FORMS = ("html", "svg", "png", "json")


def _export(argument: str, situation: Situation) -> Outcome:
    path = path_of(argument) if argument else Path()
    if not argument:
        raise UserError("give a file, for example: /export evening.svg")
    form = one_of(path.suffix.lower().removeprefix("."), FORMS, "the form of a picture")
    if path.exists():
        raise UserError(f"{path} is there already: choose another name.")
    made = MAKERS[form](situation)
    written(path, made if isinstance(made, bytes) else made.encode("utf-8", errors="replace"))
    what = "the last prompt's runs" if situation.bench.memory.found is None else f"/{situation.bench.memory.found[0].name}"
    return Outcome(reply=f"{what} written to {path}")


def _picture(form: str, situation: Situation) -> str:
    last, found = situation.bench.last(), situation.bench.memory.found
    return picture(lambda renderer: show_report(renderer, *found[:2]) if found else show_again(renderer, last), form)


def _chart(situation: Situation) -> bytes:
    found = situation.bench.memory.found
    chart = found[0].chart(found[1]) if found else None
    if chart is None:
        raise UserError("only what has a plot becomes a PNG: /whatif, /race or /sweep first; .svg and .html take everything.")
    return line_png(chart)


def _records(situation: Situation) -> str:
    """As --json appends them, a line each."""
    last, found = situation.bench.last(), situation.bench.memory.found
    told = found and [report_record(found[0], found[1], situation.bench.pair, finished=found[2])]
    rows = told or generation_records(last, {})
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


MAKERS: dict[str, Callable[[Situation], str | bytes]] = {
    "html": partial(_picture, "html"),
    "svg": partial(_picture, "svg"),
    "png": _chart,
    "json": _records,
}
EXPORT = Command("export", "FILE", "what was shown last as a file: .svg or .html in its colours, .png its plot, .json its records", _export)
