"""The part of a report page about servers: their names, the figures of their answers, and their texts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from utils.comparison.marked_text import TextPiece
from utils.screen.html_page import Cell, heading, paragraph, table, verbatim

Record = Mapping[str, Any]
COLUMNS = (
    "server",
    "tokens",
    "seconds",
    "first token, s",
    "tokens/s",
    "decode tokens/s",
    "baseline",
    "speed-up",
    "acceptance",
    "tokens per forward",
    "text",
)
SETUP = ("server", "URL", "model", "kind", "prompt sent as", "tokens counted by")


def server_blocks(records: Sequence[Record]) -> Iterator[str]:
    """The answers to one prompt, from the records of servers."""
    yield table([_setup(row) for row in records], SETUP)
    yield table([_figures(row) for row in records], COLUMNS)
    notes = [f"{row['strategy']}: {row['acceptance_note']}" for row in records if row["acceptance_note"]]
    yield from map(paragraph, notes)
    seen: dict[str, str] = {}
    for row in records:
        yield heading(f"{row['strategy']}: {row['finish_reason'] or row['finish']}", 3)
        if row["text"] in seen:
            yield paragraph(f"The same text as {seen[row['text']]}.")
        else:
            yield verbatim([TextPiece(row["text"], False)])
        seen.setdefault(row["text"], row["strategy"])


def _setup(row: Record) -> list[Cell]:
    server = row["server"]
    values = (server["name"], server["url"], server["model"], server["engine"], server["prompt_form"])
    return [Cell(str(value)) for value in (*values, row["tokens_counted_by"])]


def _figures(row: Record) -> list[Cell]:
    drafted = row["drafted"]
    acceptance = f"{row['accepted']}/{drafted} = {row['acceptance_rate']:.3f}" if drafted else "-"
    return [
        Cell(row["strategy"]),
        Cell("-" if row["new_tokens"] is None else str(row["new_tokens"])),
        rounded(row["seconds"], "{:.2f}"),
        rounded(row["first_token_seconds"], "{:.3f}"),
        rounded(row["tokens_per_second"], "{:.1f}"),
        rounded(row["decode_tokens_per_second"], "{:.1f}"),
        Cell(row["baseline"] or "-"),
        rounded(row["speedup_vs_baseline"], "{:.2f}x"),
        Cell(acceptance, str(row["acceptance_rate"]) if drafted else ""),
        rounded(row["tokens_per_target_forward"], "{:.2f}"),
        Cell(_same(row)),
    ]


def _same(row: Record) -> str:
    if row["same_as_baseline"] is None:
        return "-"
    unit = row["first_difference_in"].removesuffix("s")
    return "same" if row["same_as_baseline"] else f"differs at {unit} {row['first_difference'] + 1}"


def rounded(value: float | None, form: str) -> Cell:
    """A rounded figure with all its digits, or a dash."""
    return Cell("-") if value is None else Cell(form.format(value), repr(value))
