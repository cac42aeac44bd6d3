"""The sentences and the chart of /verdict with servers, made from its figures alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from utils.commands.experiments.verdict.wording import answer, more_prompts, tasks, without_blanks
from utils.commands.servers.race_figures import OTHER_REASON, SHOWN_PROMPTS
from utils.comparison.charts import DotChart, repeats_chart
from utils.comparison.reports import Finding
from utils.comparison.speed_claims import FASTER
from utils.text import count_of

Row = Mapping[str, Any]
NOT_COMPARED = "texts were not compared, because they are sampled: /server text {} compares their distributions"


def sentences(row: Row) -> list[str]:
    """All sentences, the answer first. row: the figures of the candidate's finding."""
    known = {one["task"]: one for one in row["by_task"] if one["speedup"]}
    lines = [answer(row, texts(row)), *more_prompts(row), conditions(row), *tasks({**row, "tasks": known})]
    if row["verdict"] == FASTER and not row["drafted"]:
        lines.append(OTHER_REASON.format(row["strategy"]))
    return without_blanks([*lines, selection(row), *row["skipped"]])


def texts(row: Row) -> str:
    """Whether the texts are those of the baseline."""
    name = row["strategy"].partition(" ")[2]
    if not row["compared_texts"]:
        return NOT_COMPARED.format(name)
    identical = f"text identical on {row['same_texts']} of {row['compared_texts']}"
    if not (others := row["other_texts_at_prompts"]):
        return identical
    listed = ", ".join(map(str, others[:SHOWN_PROMPTS])) + (", ..." if len(others) > SHOWN_PROMPTS else "")
    return f"{identical} (not on prompt {listed}: /server text {name} shows whether these are near-ties)"


def conditions(row: Row) -> str:
    """How it was measured."""
    passes = f"{row['passes']} pass{'es' * (row['passes'] > 1)} over {row['prompts']} {row['source']}"
    where = passes if row["prompts"] > 1 else count_of(row["pairs"], "repeat")
    shorter = f" (/length is {row['length_setting']})" if row["length"] < row["length_setting"] else ""
    left_out = f" {row['left_out']} further prompts were left out." if row["left_out"] else ""
    return (
        f"Measured: whole requests, one at a time, up to {row['length']} new tokens{shorter}, {row['processor']}, "
        f"{where}, in turns with {row['baseline']}.{left_out} /server load shows many requests at once."
    )


def selection(row: Row) -> str:
    """Which servers were considered, if there were several."""
    if len(row["considered"]) < 2:
        return ""
    shown = ", ".join(f"{name} {speedup:.2f}x" for name, speedup in row["considered"].items())
    where = "other prompts" if row["divided"] else "runs that are not counted"
    return f"Chosen by its speed-up on {where}: {shown}."


def charts(findings: Sequence[Finding]) -> list[DotChart]:
    """The speed-up of each prompt, or of each run where the interval is over repeats; of all and by task."""
    row = findings[-1].figures
    if not row["speedups"]:
        return []
    tasks_rows = row["by_task"] if len(row["by_task"]) > 1 else []
    rows = [(row["strategy"], row), *((one["task"], {**one, "interval": None}) for one in tasks_rows)]
    per_prompt = row["interval_over"] == "prompts"
    return [repeats_chart(rows, "prompt" if per_prompt else "run", row["baseline"])]
