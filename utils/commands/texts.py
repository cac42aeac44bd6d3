"""/texts: the last texts, and where and why they differ from the target's."""

import json
from collections.abc import Sequence
from csv import DictWriter
from io import StringIO

from utils.commands.shared.registry import Command, CommandContext, Outcome, Reply, ShowRows, output_in
from utils.comparison.arms import ComparedRun, divergence_sentence
from utils.comparison.harness import LastPrompt
from utils.comparison.records import GENERATION, gathered
from utils.errors import UserError
from utils.files import write_file
from utils.metrics.results import first_difference
from utils.text import count_of

MARKER = "»"  # precedes the part that differs


def _texts(argument: str, context: CommandContext) -> Outcome:
    last = context.harness.state.last or context.harness.last()  # the latter raises UserError
    if not last.compared:
        raise UserError("no strategy answered the last prompt: send it again.")
    ordered = sorted(last.compared, key=lambda entry: entry.run.name != context.harness.baseline.name)
    groups = gathered(((one.run.is_local and one.run.tokens) or one.run.text, one) for one in ordered)
    causes, pair = context.harness.state.causes.items(), context.harness.loaded
    reasons = [(name, divergence_sentence(cause, pair.tokenizer)) for name, cause in causes if pair is not None]
    return [ShowRows([*(_row(last, group) for group in groups.values()), *reasons])]


def _row(last: LastPrompt, group: Sequence[ComparedRun]) -> tuple[str, str]:
    """The arms that generated a text, and the text, marked at the first difference from the baseline's."""
    _, run, comparison = group[0]
    names = ", ".join(entry.run.name for entry in group)
    tokens = "tokens unknown" if run.new_tokens is None else count_of(run.new_tokens, "token")
    about = f"{names}\n{tokens}, {run.finish}"
    other = next((entry.run for entry in last.compared if entry.run.name == run.baseline), None)
    if other is None or comparison.first_difference is None:
        return about, run.text
    # In characters: two different tokens may begin with the same characters.
    shared = first_difference(run.text, other.text)
    whose = "" if run.is_local else f"{other.name} from "
    about += f", differs from {whose}{comparison.unit} {comparison.first_difference + 1}"
    return about, run.text if shared is None else run.text[:shared] + MARKER + run.text[shared:]


TEXTS = Command(
    "texts",
    "",
    "the last texts, and why they differ",
    _texts,
    group="results",
    rank=1,
    about="They are marked where they differ from the text of the target. Below them: the first token that differs, "
    "its probability, and the cause: sampling or rounding.",
    example=("> /texts", "ngram, target   The sea", "speculative     The sea »is"),
)


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
    """CSV: a row for each request of a load, each row of another report, or each run of a prompt."""
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
    example=("> /export report.html", "the session written to report.html"),
    syntax=(
        "/export FILE.html        a page with everything that was shown, in colours",
        "/export FILE.jsonl       the records of the last result, as --json writes them; .json is accepted, too",
        "/export FILE.csv         its rows, or the requests of /server load, without lists",
        "/export FILE overwrite   replaces a file",
    ),
    files=("",),
)
