"""The texts of servers side by side, marked where they differ from the text of their baseline."""

from collections.abc import Sequence

from utils.comparison.reports import Column
from utils.comparison.server_runs import ComparedServer
from utils.metrics.results import first_difference
from utils.text import count_of


def server_columns(compared: Sequence[ComparedServer]) -> list[Column]:
    """A column for each different text, with the names of its servers."""
    groups: dict[str, list[ComparedServer]] = {}
    for entry in compared:
        groups.setdefault(entry.run.text, []).append(entry)
    return [_column(group, compared) for group in groups.values()]


def _column(group: Sequence[ComparedServer], compared: Sequence[ComparedServer]) -> Column:
    run, comparison = group[0]
    names = [entry.run.name for entry in group]
    tokens = "tokens unknown" if run.new_tokens is None else count_of(run.new_tokens, "token")
    about = f"{tokens}, {run.finish}"
    other = next((one.run for one in compared if one.run.name == comparison.baseline), None)
    shared = None if other is None else first_difference(run.text, other.text)
    if other is None or shared is None:
        return Column(names, about, run.text)
    about += f", differs from {other.name} from character {shared + 1}"
    return Column(names, about, run.text[:shared], run.text[shared:])
