"""What /server text concludes: is the text the server's own, is the server deterministic, and what differs."""

from collections.abc import Sequence

from utils.commands.servers.text_samples import sampled_conclusion
from utils.commands.servers.text_ties import Cause
from utils.comparison.reports import Finding
from utils.text import count_of

Figures = dict[str, object]
NO_LOGPROBS = "without token ids and log-probabilities a rounding tie cannot be distinguished from a bug"


def conclusion(name: str, baseline: str | None, findings: Sequence[Finding]) -> list[str]:
    """The sentences: about greedy texts, the most important one first, then about sampled texts."""
    sampled = [] if baseline is None else sampled_conclusion(name, baseline, findings)
    return [*_greedy(name, baseline, findings), *sampled]


def _greedy(name: str, baseline: str | None, findings: Sequence[Finding]) -> list[str]:
    rows = {(finding.figures["check"], finding.figures["server"]): finding.figures for finding in findings}
    found = [finding.figures for finding in findings if finding.figures["check"] == "difference"]
    alone = [row for (check, _), row in rows.items() if check == "alone"]
    if len(alone) < (1 if baseline is None else 2):
        return []  # interrupted before anything could be compared
    if unsteady := [str(row["server"]) for row in alone if row["unique_texts"] != 1]:
        return [
            f"Not deterministic: {' and '.join(unsteady)} answered equal requests with different texts, although no "
            "other request was sent. So a difference cannot be attributed to speculation.",
            *_reasons(found, baseline),
        ]
    first = _repeats(name, alone[0]) if baseline is None else _same_text(name, baseline, rows["alone", name], found)
    return [first, *_under_load(name, baseline, rows), *_reasons(found, baseline)]


def _repeats(name: str, row: Figures) -> str:
    requests, prompts = count_of(_whole(row["requests"]), "request"), count_of(_whole(row["prompts"]), "prompt")
    return (
        f"Deterministic: {requests} for {prompts} got equal texts from {name}. With baseline=SERVER in "
        "its /server add, they are compared with those without speculation."
    )


def _same_text(name: str, baseline: str, row: Figures, found: Sequence[Figures]) -> str:
    prompts, differing = _whole(row["prompts"]), _whole(row["differing_prompts"])
    if not differing:
        length = f" of up to {count_of(_whole(row['tokens']), 'token')}" if row["tokens"] else ""
        requests = count_of(_whole(row["requests"]), "request")
        return (
            f"The text of {name} is that of {baseline}: equal for {count_of(prompts, 'prompt')} "
            f"({requests} to each server{length})."
        )
    causes = [figures["cause"] for figures in found if figures["under"] == "alone" and figures["server"] == name]
    counted = ", ".join(f"{causes.count(cause.value)} {cause.value}" for cause in Cause if cause.value in causes)
    return f"The text of {name} is not that of {baseline} for {differing} of {count_of(prompts, 'prompt')}" + (
        f": {counted}." if counted else "."
    )


def _under_load(name: str, baseline: str | None, rows: dict[tuple[str, str], Figures]) -> list[str]:
    loaded = {server: row for (check, server), row in rows.items() if check == "load"}
    if name not in loaded:
        return []
    at_once = f"With {loaded[name]['concurrency']} requests at once"
    changed = {server: _whole(row["differing_prompts"]) for server, row in loaded.items() if row["differing_prompts"]}
    if not changed:
        return [f"{at_once} the texts stay the same."]
    counts = " and ".join(f"{server} for {count_of(count, 'prompt')}" for server, count in changed.items())
    sentence = f"{at_once} texts differ from those given alone: {counts}."
    if baseline in changed:
        sentence += f" {baseline} does so without speculation: its results depend on the batch."
    return [sentence]


def _reasons(found: Sequence[Figures], baseline: str | None) -> list[str]:
    """One sentence for each cause that occurs."""
    causes = {figures["cause"] for figures in found}
    only_loaded = all(figures["under"] == "load" for figures in found if figures["cause"] == Cause.BUG.value)
    lines = []
    if Cause.TIE.value in causes:
        lines.append(
            "rounding tie: the gap between the log-probabilities of the two tokens is at most twice as large as what "
            "separates equal contexts computed in different ways (decode step and prefill, alone and under load), so "
            "either token can win."
        )
    if Cause.BUG.value in causes and only_loaded:
        lines.append(
            "not a near-tie: rounding does not explain how other requests at the same time change the text; report it "
            "to the engine's authors."
        )
    elif Cause.BUG.value in causes:
        lines.append(
            "not a near-tie: rounding does not explain it. Check that both servers have the same weights, number "
            "format and sampling defaults; if so, report it to the engine's authors."
        )
    if Cause.UNKNOWN.value in causes:
        lines.append(f"unknown: {NO_LOGPROBS}, or {baseline or 'the server'} did not repeat its own text.")
    return lines


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value
