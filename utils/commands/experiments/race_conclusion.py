"""The sentences below the table of /race: which arms are faster, whether texts are equal, and what to do next."""

from collections.abc import Mapping, Sequence
from typing import Any

from utils.comparison.speed_claims import (
    BASELINE,
    FASTER,
    NOT_DISTINGUISHABLE,
    SLOWER,
    TOO_FEW,
    Row,
    claim_text,
    rough,
    server_notes,
    speed_sentence,
)
from utils.comparison.summary import NO_BASELINE
from utils.text import count_of

REPEATS = 5  # of the last prompt
NO_TARGET = "Nothing to compare with: /target on adds speed-ups."
WITH_FASTER = "Next: /whatif predicts other values of /gamma, and /race 3 FILE measures your own prompts."
WITHOUT_FASTER = "Next: /why shows what limits the speed-up."
MEANING = "Speed-ups are geometric means over the prompts."
SAME = "{}: {} of {} texts equal those of {}"
SHOWN_PROMPTS = 8
UNPAIRED = "{}: no speed-up over {}. It needs answers of both to the same prompts, token counts, and one host."
OTHER_REASON = "{}: no drafts of these answers are known, so the difference may have another reason than speculation."


def repeats_conclusion(rows: Sequence[Row]) -> list[str]:
    """What repeats of one prompt show about each strategy, and what to do next."""
    if all(row["speedup"] is None for row in rows):
        return [NO_TARGET]
    lines = speed_sentences(rows)
    verdicts = {row["verdict"] for row in rows}
    if TOO_FEW in verdicts:
        return [*lines, f"Next: /race {REPEATS} tells whether the difference is real."]
    return [*lines, WITH_FASTER if FASTER in verdicts else WITHOUT_FASTER]


def speed_sentences(rows: Sequence[Row]) -> list[str]:
    """A sentence for each row that was compared."""
    return [sentence for row in rows if (sentence := speed_sentence(row))]


def file_conclusion(rows: Sequence[Row], prompts: int, *, verify: str, engine_is_verified: bool) -> list[str]:
    """A sentence for each task, whether required texts are equal, and what to do next. `prompts` is their number."""
    tasks: dict[str, list[Row]] = {}
    for row in rows:
        tasks.setdefault(row["task"], []).append(row)
    overall = list(tasks.values())[-1]  # all prompts, or the only task
    finished = max(row["prompts"] for row in overall)
    lines = [f"{finished} of {prompts} prompts were run."] if finished < prompts else []
    lines += _task_sentences(tasks)
    compared = [row for row in overall if row["compared_texts"] and row["verdict"] != BASELINE]
    lines += _required_texts([row for row in compared if row["must_be_the_targets"]], engine_is_verified)
    if free := [row["strategy"] for row in compared if not row["must_be_the_targets"]]:
        lines.append(
            f"{' and '.join(free)}: with sampling under /verify {verify}, a text may differ from "
            "the target's. /verify coupled makes them the same."
        )
    return [*lines, next_step(overall)]


def server_conclusion(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the repeats show about the speed and the text of each server, over all prompts."""
    overall = [row for row in rows if row["task"] == rows[-1]["task"]]
    lines = speed_sentences(overall)
    lines += [other_reason(row) for row in overall if row["verdict"] == FASTER and not row["drafted"]]
    lines += [_texts(row) for row in overall if row["compared_texts"]]
    if len(overall) > 1 and all(row["baseline"] is None for row in overall):
        lines.append(NO_BASELINE)
    unpaired = [row for row in overall if row["baseline"] and not row["speedups"]]
    lines += [UNPAIRED.format(row["strategy"], row["baseline"]) for row in unpaired]
    lines += [line for row in overall for line in server_notes(row["strategy"], row)]
    return lines or [f"{count_of(len(overall), 'server')} measured; there is no baseline to compare with."]


def other_reason(row: Row) -> str:
    """A warning for a gain without drafts."""
    return OTHER_REASON.format(row["strategy"])


def prompt_numbers(numbers: Sequence[int]) -> str:
    """The first of these prompts."""
    return ", ".join(map(str, numbers[:SHOWN_PROMPTS])) + (", ..." if len(numbers) > SHOWN_PROMPTS else "")


def _texts(row: Row) -> str:
    sentence = SAME.format(row["strategy"], row["same_texts"], row["compared_texts"], row["baseline"])
    others = row["other_texts_at_prompts"]
    return f"{sentence}, not at prompt {prompt_numbers(others)}." if others else f"{sentence}."


def _task_sentences(tasks: Mapping[str, Sequence[Row]]) -> list[str]:
    """A sentence for each task. Several tasks with too few runs share one."""
    undecided = {task: row for task, rows in tasks.items() if (row := _undecided(rows))}
    if len(undecided) < 2:
        return [task_sentence(task, rows) for task, rows in tasks.items()]
    shown = ", ".join(f"{task} ({row['strategy']} about {rough(row['speedup'])})" for task, row in undecided.items())
    others = [task_sentence(task, rows) for task, rows in tasks.items() if task not in undecided]
    return [f"Too few runs to tell: {shown}.", *others]


def _undecided(rows: Sequence[Row]) -> Row | None:
    """The fastest strategy that drafts with a gain, if there are too few runs to decide whether it is faster."""
    gaining = [row for row in _measured(rows) if not row["without_gain"]]
    return gaining[0] if gaining and {row["verdict"] for row in gaining} == {TOO_FEW} else None


def _measured(rows: Sequence[Row]) -> list[Row]:
    """Strategies that preserve the target's distribution and were compared with the target, the fastest first."""
    known = (row for row in rows if row["lossless"] and row["verdict"] != BASELINE and row["speedup"] is not None)
    return sorted(known, key=lambda row: -row["speedup"])


def task_sentence(task: str, rows: Sequence[Row]) -> str:
    """Which of the strategies that preserve the target's distribution are faster than the target alone."""
    others = [row for row in rows if row["lossless"] and row["verdict"] != BASELINE]
    if not others:
        return f"{task}: no enabled strategy drafts, so there is nothing to compare."
    measured = _measured(rows)
    if not measured:
        return f"{task}: speed-ups need the target's own runs: /target on."
    if faster := [row for row in measured if row["verdict"] == FASTER]:
        named = "; ".join(f"{row['strategy']}, {claim_text(row)}" for row in faster)
        return f"{task}: faster over {count_of(faster[0]['prompts'], 'prompt')}: {named}."
    gaining = [row for row in measured if not row["without_gain"]]
    if not gaining:
        return f"{task}: drafts saved nothing (1.00 tokens per target forward), so differences in speed are noise."
    best = gaining[0]
    if best["verdict"] == TOO_FEW:
        return f"{task}: {best['strategy']} is at about {rough(best['speedup'])} target-only, but too few runs to tell."
    if all(row["verdict"] == SLOWER for row in gaining):
        return f"{task}: target-only is the fastest; the nearest is {best['strategy']}, {claim_text(best)}."
    return f"{task}: no difference can be distinguished; {best['strategy']} is at {claim_text(best)}."


def next_step(rows: Sequence[Row]) -> str:
    """What to do next, from the figures of all prompts."""
    verdicts = {row["verdict"] for row in rows if row["lossless"]}
    if FASTER in verdicts:
        return f"{MEANING} Next: /whatif on a slow prompt, or /export report.html."
    if verdicts & {TOO_FEW, NOT_DISTINGUISHABLE}:
        return f"{MEANING} Next: more prompts, or more repeats (/race 3 FILE), narrow the intervals."
    return f"{MEANING} Next: send one of the prompts, then /why shows what limits its speed-up."


def _required_texts(rows: Sequence[Row], engine_is_verified: bool) -> list[str]:
    """Whether the texts equal the target's where this is required."""
    same, compared = (sum(row[name] for row in rows) for name in ("same_texts", "compared_texts"))
    lines = [f"Texts that must equal the target's, and do: {same} of {compared}."] if compared else []
    if same < compared:
        others = "; ".join(
            f"{row['strategy']} at prompt {', '.join(map(str, row['other_texts_at_prompts']))}"
            for row in rows
            if row["other_texts_at_prompts"]
        )
        # With a verified engine, logits do not depend on the verify width, so rounding cannot be the reason.
        cause = (
            "this should not happen"
            if engine_is_verified
            else "this may be a rounding tie, since this engine does not guarantee equal bits"
        )
        lines.append(f"Texts that differ: {others}: {cause}. Send such a prompt, then /texts explains it.")
    return lines
