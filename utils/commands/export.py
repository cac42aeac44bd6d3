"""/export: what the session has shown as a page, or the records of the last result."""

import json
from csv import DictWriter
from io import StringIO

from utils.commands.shared.registry import Command, CommandContext, Outcome, Reply, output_in
from utils.comparison.records import GENERATION
from utils.errors import UserError
from utils.files import write_file

RECORDS = "the records of the last result"
FORMATS = {"html": "the session", "jsonl": RECORDS, "json": RECORDS, "csv": "the rows of the last result"}
NOTHING = "nothing can be exported yet: send a prompt first."


def _export(argument: str, context: CommandContext) -> Outcome:
    path, overwrite = output_in(argument, "/export report.html")
    form = path.suffix.lower().removeprefix(".")
    if form not in FORMATS:
        endings = ", ".join(f".{name}" for name in FORMATS)
        raise UserError(f"'{path}' does not end in one of {endings}; write for example report.html.")
    if not (records := context.harness.state.records()):
        raise UserError(NOTHING)
    if form == "html":
        content = context.page()
    elif FORMATS[form] == RECORDS:  # lines, as written by --json
        content = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in records)
    else:
        is_report = records[0]["record"] != GENERATION
        content = _table(records[1:] or records[0]["findings"] if is_report else records)
    # Model output may contain lone surrogates, which strict UTF-8 refuses.
    write_file(path, content.encode("utf-8", errors="replace"), overwrite=overwrite)
    return [Reply(f"{FORMATS[form]} written to {path}")]


def _table(rows: list[dict[str, object]]) -> str:
    """CSV: a row for each request of a load, each finding of another report, or each run of a prompt."""
    nested = {name for row in rows for name, value in row.items() if isinstance(value, (list, tuple, dict))}
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in nested]
    file = StringIO(newline="")
    writer = DictWriter(file, names, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


EXPORT = Command(
    "export",
    "FILE",
    "what was shown, or the last records",
    _export,
    group="results",
    rank=3,
    about="Write what the session has shown, or the last result, to a file. The ending of its name decides.",
    example=("> /export report.html", "the session written to report.html"),
    syntax=(
        "/export FILE.html        a page with everything that was shown, in colours",
        "/export FILE.jsonl       the records of the last result, as --json writes them; .json is accepted, too",
        "/export FILE.csv         its rows, or the requests of /server load, without lists",
        "/export FILE overwrite   replaces a file",
    ),
    see_also=("texts", "save"),
    files=("",),
)
