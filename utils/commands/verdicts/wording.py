"""The table and the sentences of a verdict. They depend on its figures alone, so a record yields the same sentences as
the screen.
"""

from utils.commands.experiments.races import other_reasons, spread, texts, with_bounds
from utils.commands.experiments.speed_model import bottleneck
from utils.commands.shared.columns import NOTHING, ResultColumn, ResultTable, Row, figure
from utils.comparison.speed_claims import FASTER, SLOWER, TOO_FEW, baseline_name, claim_text, no_difference, rough, star
from utils.text import byte_size

SMALL_GAIN = 1.03  # smaller speed-ups are not worth a recommendation
LITTLE_GAIN, MIN_PROMPTS = 1.02, 3  # a task does not profit if its interval over so many prompts is below this gain


def verdict_table(*, servers: bool) -> ResultTable:
    """A column of the screen for the baseline and one for the candidate; each heading is a line."""
    memory = [] if servers else [ResultColumn("extra weights", _memory)]
    return ResultTable(
        figure("", "name"),
        ResultColumn("whole run", _whole_run),
        spread("decoding", "decode_tokens_per_second", "{:.1f} tokens/s"),
        spread("time to first token", "first_token_seconds", "{:.0f} ms", scale=1000),
        ResultColumn("acceptance", _acceptance),
        figure("tokens per forward", "tokens_per_target_forward", "{:.2f}"),
        *memory,
    )


def _whole_run(row: Row) -> str:
    if row["pooled_tokens_per_second"] is None:
        return NOTHING
    speed = f"{row['pooled_tokens_per_second']:.1f} tokens/s"
    return f"{speed}, {row['speedup']:.2f}x{star(row)}" if "candidate" in row else speed


def _acceptance(row: Row) -> str:
    return f"{row['accepted']}/{row['drafted']} = {row['acceptance_rate']:.3f}" if row["drafted"] else NOTHING


def _memory(row: Row) -> str:
    memory = row.get("extra_memory")
    return NOTHING if memory is None else byte_size(memory) if memory else "none"


def sentences(row: Row) -> list[str]:
    """All sentences, the answer first. `row` has the figures of the candidate's finding."""
    lines = [answer(row), conditions(row), *tasks(row)]
    lines += [f"The bottleneck is {bottleneck(row)}."] if row.get("bottleneck") else []
    return [*lines, *other_reasons([row]), *_selection(row), *row["skipped"], *_apply(row)]


def answer(row: Row) -> str:
    """Whether it helps, with which settings, and whether the text is the baseline's."""
    name, verdict, same = row["candidate"], row["verdict"], texts(row)
    these = "this prompt" if row["prompts"] == 1 else f"these {row['prompts']} prompts"
    here = "here" if row["divided"] else f"on {these}"
    per_prompt = row["interval_over"] == "prompts"
    over = f"{row['prompts']} prompts" if per_prompt else f"{row['pairs']} repeats"
    ratio = claim_text(row, f" over {over}")
    if row["interval"] is None or verdict == TOO_FEW:
        so_far = f"{name} was about {rough(row['speedup'])}{star(row)} {baseline_name(row)} so far"
        if row["without_gain"]:
            so_far = f"the drafts of {name} have saved no forward pass so far"
        return f"Too few runs for an answer: {so_far}, {same}."
    if row["without_gain"]:
        return (
            f"Speculative decoding does not help {here}: the drafts of the best candidate, {name}, saved no forward "
            f"pass of the target (1.00 tokens each); {ratio}, {same}."
        )
    if verdict == SLOWER:
        return f"Speculative decoding does not help {here}: the best candidate, {name}, is slower: {ratio}, {same}."
    if helps(row):
        return f"{'Use' if row['divided'] else f'On {these}, use'} {name}: {ratio}, {same}."
    if verdict == FASTER:
        return f"Speculative decoding hardly helps {here}: {name} is {ratio}, {same}."
    found = f"{name} is {ratio}, {no_difference(row)}; {same}."
    return f"Speculative decoding makes no measurable difference {here}: {found}"


def helps(row: Row) -> bool:
    """Whether the answer recommends the candidate."""
    return bool(row["verdict"] == FASTER and row["speedup"] >= SMALL_GAIN)


def conditions(row: Row) -> str:
    """The conditions of the measurement."""
    servers = "baseline" in row
    what = "requests, one at a time" if servers else "runs with prefill"
    passes = f"{row['passes']} pass{'es' * (row['passes'] > 1)} over {row['prompts']} {row['source']}"
    where = passes if row["prompts"] > 1 else f"{row['pairs']} repeats"
    shorter = f" (/length is {row['length_setting']})" if row["length"] < row["length_setting"] else ""
    further = {
        f"{row['conversations']} of the prompts were conversations of several turns.": row["conversations"],
        "Every prompt began a new conversation.": row["turns"] and not servers,
        f"{row['left_out']} further prompts were left out.": row["left_out"],
    }
    measured = (
        f"Measured: whole {what}, up to {row['length']} new tokens{shorter}, {row['processor']}, {where}, in turns "
        f"with {baseline_name(row)}."
    )
    return " ".join([measured, *(sentence for sentence, applies in further.items() if applies)])


def tasks(row: Row) -> list[str]:
    """The speed-up of each task with its interval, and the tasks whose interval excludes a gain.

    With two prompts an interval is too narrow too often: if prompts differ by 15 %, one of six tasks with a gain of
    1.10 is denied it in 8 % of verdicts, and with three prompts in less than 3 %.
    """
    known = row["tasks"]
    if len(known) < 2:
        return []
    lines = [f"By task: {', '.join(f'{task} {with_bounds(one)}' for task, one in known.items())}."]
    decided = row["interval"] is not None and row["verdict"] != TOO_FEW
    without = [task for task, one in known.items() if decided and _excludes_gain(one)]
    return [*lines, *([f"It does not help with {', '.join(without)}."] if without else [])]


def _excludes_gain(row: Row) -> bool:
    """Whether the interval of a task lies below the smallest gain that counts."""
    return bool(row["prompts"] >= MIN_PROMPTS and row["verdict"] != TOO_FEW and row["interval"][1] < LITTLE_GAIN)


def _selection(row: Row) -> list[str]:
    """Which candidates were considered, if there were several."""
    shown = ", ".join(f"{name} {speedup:.2f}x" for name, speedup in row["considered"].items())
    on = "other prompts" if row["divided"] else "runs that are not counted"
    how = "Measured" if "baseline" in row else "Predicted"
    lines = [f"{how} on {on}: {shown}."] if len(row["considered"]) > 1 else []
    if row.get("not_tried"):
        lines.append(f"There was no time to replay: {', '.join(row['not_tried'])}.")
    return lines


def _apply(row: Row) -> list[str]:
    """How to apply the recommended settings here."""
    if "baseline" in row:
        return []
    if helps(row):
        commands = " and ".join(row["commands"])
        return [f"To use it here: /verdict apply, or {commands}." if commands else "This session uses it already."]
    return ["/verdict apply turns speculative decoding off here."] if row["verdict"] == SLOWER else []
