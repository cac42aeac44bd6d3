"""The results of races and sweeps: the figures of each group of prompts and arm, their table and sentences."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from utils.commands.experiments.race_runs import RaceItem, RaceResult, pooled_run
from utils.commands.shared.columns import NOTHING, ResultColumn, ResultTable, Row, figure, marked
from utils.comparison.arms import Arm, LocalArm
from utils.comparison.reports import shortened
from utils.comparison.runs import PREFIX, text_figures
from utils.comparison.speed_claims import (
    BASELINE,
    FASTER,
    SLOWER,
    TOO_FEW,
    SpeedClaim,
    interval_text,
    reasons_unknown,
    rough,
    server_notes,
    speed_sentence,
    speedup_text,
)
from utils.comparison.summary import NO_BASELINE
from utils.prompts.prompt_files import ALL_TASKS

REPEATS = 5  # of the last prompt
SHOWN_TASK = 16  # characters of a task in the table
SHOWN_PROMPTS = 8
NO_TARGET = "Nothing to compare with: /target on adds speed-ups."
NO_RIVAL = "No enabled strategy drafts, so there is nothing to compare."
UNPAIRED = "{}: no speed-up over {}. It needs answers of both to the same prompts, token counts, and one host."
OTHER_REASON = "{}: no drafts of these answers are known, so the difference may have another reason than speculation."
MORE_PROMPTS = "Next: more prompts, or more repeats (/race 3 FILE), narrow the intervals."
MORE_REPEATS = f"Next: /race {REPEATS} tells whether the difference is real."
OWN_PROMPTS = "Next: /whatif predicts other values of /gamma, and /race 3 FILE measures your own prompts."
LIMITS = "Next: /why shows what limits the speed-up of a prompt."


def race_table(items: Sequence[RaceItem], *, servers: bool = False) -> ResultTable:
    """The columns of a race: of one prompt with its repeats, or of the prompts of a file with their texts."""
    several = len({item.number for item in items}) > 1
    tasks = len({item.group for item in items}) > 1
    both = servers or several
    columns = [
        (tasks, ResultColumn("task", lambda row: shortened(row["task"], SHOWN_TASK))),
        (True, figure("server" if servers else "strategy", "strategy")),
        (several and not servers, figure("prompts", "prompts", drop=1)),
        (several, marked(figure("tokens/s", "pooled_tokens_per_second", "{:.1f}", drop=0 if servers else 7))),
        (not several, marked(spread("tokens/s", "tokens_per_second", "{:.1f}"))),
        (not both, RANGE),
        (not several or servers, spread("time to first token", "first_token_seconds", "{:.0f} ms", scale=1000, drop=4)),
        (not several or servers, spread("decoding", "decode_tokens_per_second", "{:.1f}", drop=3)),
        (True, ResultColumn("speed-up", speedup_text)),
        (True, ResultColumn("95 % interval", lambda row: interval_text(row["interval"]))),
        (both, figure("acceptance", "acceptance_rate", "{:.3f}", drop=6)),
        (both, figure("tokens/forward", "tokens_per_target_forward", "{:.2f}", drop=2 if servers else 0)),
        (both, ResultColumn("text", _same_text)),
        (not both, figure("verdict", "verdict")),
    ]
    return ResultTable(*(column for shown, column in columns if shown))


def _same_text(row: Row) -> str:
    """How many of the compared texts are the baseline's."""
    return f"same {row['same_texts']}/{row['compared_texts']}" if row["compared_texts"] else NOTHING


def spread(heading: str, key: str, form: str, *, scale: float = 1, drop: int = 0) -> ResultColumn:
    """A column with the median of a list of figures."""

    def shown(row: Row) -> str:
        known = [value for value in row[key] if value]
        return form.format(scale * median(known)) if known else NOTHING

    return ResultColumn(heading, shown, drop)


def _range(row: Row) -> str:
    """The lowest and the highest speed, without decimals from 100 on."""
    values = row["tokens_per_second"]
    form = ".1f" if max(values) < 100 else ".0f"
    return f"{min(values):{form}}-{max(values):{form}}"


RANGE = ResultColumn("range", _range, 5)


def race_rows(
    results: Sequence[RaceResult], arms: Sequence[Arm], *, these_prompts: bool = False
) -> Iterator[dict[str, Any]]:
    """The figures of each group and arm. If there are several groups, one for all prompts comes last."""
    groups = list(dict.fromkeys(result.item.group for result in results))
    if len(groups) > 1:
        # Prompts without a task have this name too, and their group must not appear twice.
        groups = [*(group for group in groups if group != ALL_TASKS), ALL_TASKS]
    for group in groups:
        for arm in arms:
            chosen = [one for one in results if one.arm.name == arm.name and group in (ALL_TASKS, one.item.group)]
            if chosen:
                yield race_row(group, chosen, these_prompts=these_prompts)


def race_row(task: str, group: Sequence[RaceResult], *, these_prompts: bool = False) -> dict[str, Any]:
    """The figures of one arm. With `these_prompts`, the interval covers other repeats of these prompts only."""
    arm, settings, first = group[0].arm, group[0].item.settings, group[0].ours[0]
    lossless = arm.strategy is None or arm.strategy.lossless
    runs = [run for result in group for run in result.ours]
    total, groups = pooled_run(runs), speedups_by_prompt(group)
    per_forward = total.tokens_per_target_forward or None
    # Only drafts can save forward passes, so tokens per forward mean nothing for other arms.
    drafts = arm.strategy.drafts if arm.strategy is not None else bool(total.drafted)
    claim = SpeedClaim.of(
        groups,
        baseline=first.name == first.baseline,
        tokens_per_forward=per_forward if drafts else None,
        these_prompts=these_prompts,
    )
    return {
        "task": task,
        "strategy": arm.name,
        **({} if first.is_local else _server_figures(group)),
        "prompts": len({result.item.number for result in group}),
        "new_tokens": total.new_tokens,
        "seconds": total.seconds,
        "tokens_per_second": [speed for result in group if (speed := result.speed)],
        "pooled_tokens_per_second": total.tokens_per_second or None,
        "first_token_seconds": [run.first_seconds for run in runs if run.first_seconds is not None],
        "decode_tokens_per_second": [run.decode_tokens_per_second for run in runs if run.decode_tokens_per_second],
        "speedups": [speedup for speedups in groups for speedup in speedups],
        "speedups_by_prompt": groups,
        **claim.figures,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "acceptance_rate": total.acceptance_rate,
        "tokens_per_target_forward": per_forward,
        "lossless": lossless,
        "must_be_the_targets": arm.strategy is not None and arm.strategy.repeats_target(settings),
        "engine_verified": isinstance(arm, LocalArm) and arm.pair.engine.state.verified,
        **text_figures((result.item.number, result.same) for result in group if lossless),
    }


def _server_figures(group: Sequence[RaceResult]) -> dict[str, Any]:
    """The figures that only servers have: the baseline, and what else the server did meanwhile."""
    runs = [run for result in group for run in result.ours]
    others = [run.other_tokens for result in group for run in result.theirs]
    return {
        "baseline": runs[0].baseline,
        "other_tokens": [run.other_tokens for run in runs],
        "disturbed": any(run.other_tokens for run in runs) or any(others),
        "acceptance_unknown": reasons_unknown(run.acceptance for run in runs),
    }


def speedups_by_prompt(group: Sequence[RaceResult]) -> list[list[float]]:
    """The speed-ups of each prompt in its repeats."""
    by_prompt: dict[int, list[float]] = {}
    for result in group:
        if speedup := result.speedup:
            by_prompt.setdefault(result.item.number, []).append(speedup)
    return list(by_prompt.values())


def race_conclusion(rows: Sequence[Row], prompts: int | None = None) -> list[str]:
    """Which arms are faster, over all prompts and by task, whether texts are equal, and what to do next.

    `prompts` is the number of prompts of a file that should be run, or None for the last prompt.
    """
    tasks: dict[str, list[Row]] = {}
    for row in rows:
        tasks.setdefault(row["task"], []).append(row)
    overall = list(tasks.values())[-1]  # all prompts, or the only task
    finished = max(row["prompts"] for row in overall)
    lines = [f"{finished} of {prompts} prompts were run."] if prompts and finished < prompts else []
    lines += [sentence for row in overall if (sentence := speed_sentence(row))]
    lines += best_of_each(dict(list(tasks.items())[:-1]))
    lines += other_reasons(overall)
    servers = "baseline" in overall[0]
    if servers or prompts:  # the texts of the last prompt have been compared before
        compared = (row for row in overall if row["compared_texts"] and row["verdict"] != BASELINE)
        lines += [f"{row['strategy']}: {texts(row)}." for row in compared]
    return [*lines, *(_missing_baselines(overall) if servers else _next(overall, of_file=bool(prompts)))]


def best_of_each(groups: Mapping[str, Sequence[Row]]) -> list[str]:
    """A sentence on the fastest strategy of each task or value. Those with too few runs share one.

    Only strategies that preserve the target's distribution count, and one without a gain counts last.
    """
    lines, undecided = [], []
    for name, rows in groups.items():
        known = [row for row in rows if row["lossless"] and row["verdict"] != BASELINE and row["speedup"] is not None]
        if not known:
            continue
        best = max(known, key=lambda row: (not row["without_gain"] or row["speedup"] <= 1, row["speedup"]))
        is_noise = best["without_gain"] and best["speedup"] > 1
        if best["verdict"] == TOO_FEW and not is_noise:
            undecided.append(f"{name}, {best['strategy']} {with_bounds(best)}")
        else:
            lines.append(f"{name}: {speed_sentence(best)}")
    return [*([f"Too few runs to tell: {'; '.join(undecided)}."] if undecided else []), *lines]


def with_bounds(row: Row) -> str:
    """The speed-up of a task with its interval, if that has bounds."""
    if row["interval"] is None:
        return f"about {rough(row['speedup'])}"
    return f"{row['speedup']:.2f}x ({row['interval'][0]:.2f} to {row['interval'][1]:.2f})"


def other_reasons(rows: Sequence[Row]) -> list[str]:
    """A warning for each gain of a server whose drafts are unknown."""
    doubtful = (row for row in rows if "baseline" in row and row["verdict"] == FASTER and not row["drafted"])
    return [OTHER_REASON.format(row["strategy"]) for row in doubtful]


def texts(row: Row) -> str:
    """Whether the texts are the baseline's, and who explains a difference."""
    others = row["other_texts_at_prompts"]
    name = str(row["strategy"]).removeprefix(PREFIX)
    if "baseline" in row:
        if not row["compared_texts"]:
            return f"texts were not compared, because they are sampled: /server text {name} compares greedy ones"
        why = f"/server text {name} examines these"
    elif not row["must_be_the_targets"]:
        return "same distribution of texts as the target's, and with /verify coupled the same texts"
    else:
        # With a verified engine, logits do not depend on the verify width, so rounding cannot be the reason.
        why = "this should not happen" if row["engine_verified"] else "this engine does not guarantee equal bits"
        why += "; send such a prompt, then /texts explains it"
    identical = f"text identical on {row['same_texts']} of {row['compared_texts']}"
    numbers = ", ".join(map(str, others[:SHOWN_PROMPTS])) + (", ..." if len(others) > SHOWN_PROMPTS else "")
    return f"{identical} (not on prompt {numbers}: {why})" if others else identical


def _missing_baselines(rows: Sequence[Row]) -> list[str]:
    """The servers without a speed-up, and why, and what limits their figures."""
    notes = [note for row in rows for note in server_notes(row["strategy"], row)]
    if all(row["baseline"] is None for row in rows):
        return [NO_BASELINE, *notes]
    unpaired = (row for row in rows if row["baseline"] and not row["speedups"])
    return [*(UNPAIRED.format(row["strategy"], row["baseline"]) for row in unpaired), *notes]


def _next(rows: Sequence[Row], *, of_file: bool) -> list[str]:
    """What to do next, from the figures of all prompts."""
    rivals = [row for row in rows if row["lossless"] and row["verdict"] != BASELINE]
    if not rivals or all(row["speedup"] is None for row in rows):
        return [NO_TARGET if rivals else NO_RIVAL]
    verdicts = {row["verdict"] for row in rivals}
    if of_file and FASTER not in verdicts and verdicts != {SLOWER}:
        return [MORE_PROMPTS]
    if not of_file and TOO_FEW in verdicts:
        return [MORE_REPEATS]
    return [OWN_PROMPTS if FASTER in verdicts and not of_file else LIMITS]
