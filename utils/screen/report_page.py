"""The report of a session: its measurements, models, machine and settings.

The look of an element is left to `html_page`. Figures come from the JSON records.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from utils.comparison.charts import prompt_charts
from utils.comparison.reports import shortened
from utils.comparison.run_texts import TextPiece
from utils.comparison.session_state import ShownResult, ShownResults
from utils.comparison.speed_claims import NO_GAIN, NO_GAIN_SENTENCE, speedup_text
from utils.config.setting_table import as_json
from utils.config.settings import Settings
from utils.errors import UserError
from utils.metrics.results import difference_text
from utils.screen.html_page import Cell, figure, heading, html_page, paragraph, table, verbatim
from utils.text import byte_size, count_of

Record = Mapping[str, Any]
ANSWERS = ("verdict", "race")  # reports whose sentences are the answer, the best one first
LEGEND = "Marked text consists of accepted drafts. Everything else was computed by the target itself."
NOTHING = "there is no result to export yet: send a prompt first."
ONE_RUN = "One run of each strategy. /race repeats them."
NOISE = f"{{}}: {NO_GAIN_SENTENCE}, so differences in speed are noise or the cost of drafting."


def report_page(results: ShownResults, date: str) -> str:
    """The whole page as HTML. Raises UserError if nothing was measured."""
    kept = [result for result in results.kept if result.records]  # without results that have no finished run
    if not kept:
        raise UserError(NOTHING)
    models = kept[-1].records[0]["models"]
    names = f"{models['target']} + {models['drafter'] or 'no drafter'}" if models["target"] else "Servers"
    return html_page(f"{names}: speculative decoding", _elements(kept, results.count - len(results.kept), date))


def _elements(kept: Sequence[ShownResult], dropped: int, date: str) -> Iterator[str]:
    """Everything below the title. `dropped` is the number of earlier results that were not kept."""
    setups = _setups(kept)
    program = kept[-1].records[0]["versions"]["program"]
    yield paragraph(f"{count_of(len(kept), 'result')} of one session, {date}, program version {program}.")
    if dropped:
        yield paragraph(f"The first {count_of(dropped, 'result')} of the session are not part of this page.")
    yield from _answer(kept)
    for index, setup in enumerate(setups):
        yield heading("Setup" if len(setups) == 1 else f"Setup {index + 1}")
        yield table([(Cell(name), Cell(value)) for name, value in setup_rows(setup)])
    for number, result in enumerate(kept, start=1):
        place = "" if len(setups) == 1 else f", setup {setups.index(_setup(result.records[0])) + 1}"
        yield from _report(number, result, place) if result.report else _prompt(number, result, place)
    yield heading("All settings of the last result")
    yield table([(Cell(name), Cell(_typed(value))) for name, value in kept[-1].records[0]["settings"].items()])


def _answer(kept: Sequence[ShownResult]) -> Iterator[str]:
    """The sentences of the last /verdict, or of the last /race."""
    reports = {result.report.name: result for result in kept if result.report}
    result = next((reports[name] for name in ANSWERS if name in reports), None)
    if result is not None:
        record = result.records[0]
        yield heading("Answer")
        yield paragraph(_headline(result) + ("" if record["finished"] else " (interrupted)"))
        # The first sentence of /verdict is the answer, and the others explain it; /race has one for each strategy.
        strong = 1 if record["record"] == ANSWERS[0] else len(record["conclusion"])
        yield from (paragraph(line, strong=index < strong) for index, line in enumerate(record["conclusion"]))


def _setup(record: Record) -> dict[str, Any]:
    setup = {part: record[part] for part in ("models", "engine", "machine", "versions")}
    # New measurements of the engines change their figures a little, but not the setup.
    return setup | {"engine": {name: value for name, value in setup["engine"].items() if name != "table"}}


def _setups(kept: Sequence[ShownResult]) -> list[dict[str, Any]]:
    """Each different setup once, in the order of its first result."""
    setups: list[dict[str, Any]] = []
    for result in kept:
        if (setup := _setup(result.records[0])) not in setups:
            setups.append(setup)
    return setups


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
    return [("engine", text), *_faster_baseline(engine.get("faster_baseline"))]


def _faster_baseline(other: Record | None) -> list[tuple[str, str]]:
    """The engine in which the target alone would be faster, if any."""
    return [("target-only elsewhere", f"{other['factor']:.2f}x as fast in {other['name']} (estimate)")] if other else []


def _model(name: str, facts: Record) -> str:
    quantized = "" if facts.get("quantize") in (None, "none") else f", {facts['quantize']}"
    size = "" if facts.get("memory") is None else f", {byte_size(facts['memory'])}"
    return f"{name} ({facts.get('dtype')}{quantized}, on {facts.get('device')}{size})"


def _report(number: int, result: ShownResult, place: str) -> Iterator[str]:
    report, record = result.report, result.records[0]
    assert report is not None
    yield heading(f"{number}. {_headline(result)}")
    stopped = "" if record["finished"] else " It was interrupted; these are the finished parts."
    yield paragraph(f"{_changed(record)}{place}.{stopped}")
    rows = [finding.cells for finding in result.findings if finding.cells]
    if report.transposed:
        rows = list(zip(report.headings, *rows, strict=True))
    yield table([[Cell(cell) for cell in row] for row in rows], () if report.transposed else report.headings)
    for further in report.tables(result.findings):
        yield paragraph(further.title)
        yield table([[Cell(cell) for cell in row] for row in further.rows], further.headings)
        if further.note:
            yield paragraph(further.note)
    yield from map(figure, report.charts(result.findings))
    yield from (paragraph(line) for line in record["conclusion"])
    if attachment := report.attachment(result.findings):
        yield verbatim([TextPiece(attachment, False)])


def _headline(result: ShownResult) -> str:
    assert result.report is not None
    return result.report.headline


def _prompt(number: int, result: ShownResult, place: str) -> Iterator[str]:
    records, first = result.records, result.records[0]
    yield heading(f"{number}. Prompt: {shortened(first['prompt'])}")
    turn = f" Turn {first['turn'] + 1} of a conversation." if first.get("turn") else ""
    yield paragraph(f"{_changed(first)}{place}.{turn}")
    yield verbatim([TextPiece(first["prompt"], False)])
    servers = [row for row in records if row["server"]]
    if servers:
        yield table([_server(row) for row in servers], SERVERS)
    columns = {name: cell for name, cell in COLUMNS.items() if servers or name not in OF_SERVERS}
    yield table([[cell(row) for cell in columns.values()] for row in records], tuple(columns))
    noise = [row["strategy"] for row in records if _saves_nothing(row)]
    yield paragraph(" ".join([ONE_RUN, *map(NOISE.format, noise)]))
    notes = [f"{row['strategy']}: {row['acceptance_note']}" for row in servers if row["acceptance_note"]]
    yield from map(paragraph, notes)
    yield from map(figure, prompt_charts(records))
    if any(row["accepted"] for row in records if not row["server"]):
        yield paragraph(LEGEND)
    yield from _texts(records, result)


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


SERVERS = ("server", "URL", "model", "kind", "prompt sent as", "tokens counted by")


def _server(row: Record) -> list[Cell]:
    server = row["server"]
    values = (server["name"], server["url"], server["model"], server["kind"], server["prompt_form"])
    return [Cell(str(value)) for value in (*values, row["tokens_counted_by"])]


def _rounded(value: float | None, form: str) -> Cell:
    """A rounded figure with all its digits, or a dash."""
    return Cell("-") if value is None else Cell(form.format(value), repr(value))


def _acceptance(row: Record) -> Cell:
    if not row["drafted"]:
        return Cell("-")
    rate = row["acceptance_rate"]
    return Cell(f"{row['accepted']}/{row['drafted']} = {rate:.3f}", str(rate))


def _drafts_per_round(row: Record) -> Cell:
    drafted, rounds = row["drafted"], row["rounds"]
    return _rounded(drafted / rounds if drafted is not None and rounds else None, "{:.1f}")


COLUMNS: dict[str, Callable[[Record], Cell]] = {
    "strategy": lambda row: Cell(row["strategy"]),
    "tokens": lambda row: Cell("-" if row["new_tokens"] is None else str(row["new_tokens"])),
    "seconds": lambda row: _rounded(row["seconds"], "{:.2f}"),
    "tokens/s": lambda row: _rounded(row["tokens_per_second"], "{:.1f}"),
    "decode tokens/s": lambda row: _rounded(row["decode_tokens_per_second"], "{:.1f}"),
    "baseline": lambda row: Cell(row["baseline"] or "-"),
    "speed-up": lambda row: _speedup(row),
    "acceptance": _acceptance,
    "drafts per round": _drafts_per_round,
    "tokens per forward": lambda row: _rounded(row["tokens_per_target_forward"], "{:.2f}"),
    "first token, s": lambda row: _rounded(row["first_token_seconds"], "{:.3f}"),
    "text": lambda row: Cell(_same(row)),
}
OF_SERVERS = ("decode tokens/s", "baseline")  # columns of prompts with servers


def _saves_nothing(row: Record) -> bool:
    """Whether the strategy drafts, but generated one token per forward pass of the target."""
    if row["server"]:
        return bool(row["drafted"]) and row["accepted"] == 0
    return row["drafted"] is not None and (row["tokens_per_target_forward"] or 0.0) < NO_GAIN


def _speedup(row: Record) -> Cell:
    value = row["speedup_vs_baseline"]
    text = speedup_text({"speedup": value, "without_gain": _saves_nothing(row)})
    return Cell(text, "" if value is None else repr(value))


def _same(row: Record) -> str:
    if row["same_as_baseline"] is None:
        return "-"
    return difference_text(row["first_difference"], row["first_difference_in"].removesuffix("s"))


def _changed(record: Record) -> str:
    """The settings that differ from their defaults. Costs are measured, so they are left out."""
    defaults = as_json(Settings())
    changed = {name: value for name, value in record["settings"].items() if value != defaults.get(name)}
    changed.pop("costs", None)
    shown = ", ".join(f"{name} {_typed(value)}" for name, value in changed.items())
    return f"Settings: {shown}; the others have their defaults" if shown else "Default settings"


def _typed(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
