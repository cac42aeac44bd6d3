"""The sentences below the table of /race FILE: which strategies are faster on which tasks, and what to do next."""

from collections.abc import Mapping, Sequence

from utils.comparison.benchmark_tables import BenchmarkSample
from utils.comparison.harness import Harness
from utils.comparison.reports import Finding
from utils.comparison.speed_claims import BASELINE, FASTER, NOT_DISTINGUISHABLE, SLOWER, TOO_FEW, Row, claim_text
from utils.config.settings import Settings
from utils.text import count_of

MEANING = "Speed-ups are geometric means over the prompts."


def suite_conclusion(
    harness: Harness, settings: Settings, sample: BenchmarkSample, findings: Sequence[Finding]
) -> list[str]:
    """A sentence for each task, whether required texts are equal, and what to do next."""
    tasks: dict[str, list[Row]] = {}
    for finding in findings:
        tasks.setdefault(finding.figures["task"], []).append(finding.figures)
    overall = list(tasks.values())[-1]  # all prompts, or the only task
    finished = max(row["prompts"] for row in overall)
    lines = [f"{finished} of {sample.prompts} prompts were run."] if finished < sample.prompts else []
    lines += _task_sentences(tasks)
    compared = [row for row in overall if row["compared_texts"] and row["strategy"] != harness.baseline.name]
    lines += _required_texts([row for row in compared if row["must_be_the_targets"]], harness)
    if free := [row["strategy"] for row in compared if not row["must_be_the_targets"]]:
        lines.append(
            f"{' and '.join(free)}: with sampling under /verify {settings.verify}, a text may differ from "
            "the target's. /verify coupled makes them the same."
        )
    return [*lines, next_step(overall)]


def _task_sentences(tasks: Mapping[str, Sequence[Row]]) -> list[str]:
    """A sentence for each task. Several tasks with too few runs share one."""
    undecided = {task: row for task, rows in tasks.items() if (row := _undecided(rows))}
    if len(undecided) < 2:
        return [task_sentence(task, rows) for task, rows in tasks.items()]
    shown = ", ".join(f"{task} ({row['strategy']} about {row['speedup']:.1f}x)" for task, row in undecided.items())
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
        return f"{task}: {best['strategy']} is at about {best['speedup']:.1f}x target-only, but too few runs to tell."
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


def _required_texts(rows: Sequence[Row], harness: Harness) -> list[str]:
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
            if harness.pair.engine.state.verified
            else "this may be a rounding tie, since this engine does not guarantee equal bits"
        )
        lines.append(f"Texts that differ: {others}: {cause}. Send such a prompt, then /texts explains it.")
    return lines
