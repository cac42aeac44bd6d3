"""The sentences of a verdict. They depend on its figures alone, so a record yields the same sentences as the screen."""

from utils.commands.experiments.race_conclusion import other_reason, prompt_numbers
from utils.commands.experiments.race_figures import spread
from utils.commands.shared.columns import NOTHING, ResultColumn, ResultTable, Row, figure
from utils.comparison.speed_claims import TOO_FEW, baseline_name, star
from utils.metrics.intervals import FASTER, SLOWER
from utils.text import byte_size

WIDE = 1.1  # more prompts would help an interval whose ends have a larger ratio
SMALL_GAIN = 1.03  # smaller speed-ups are not worth a recommendation
LITTLE_GAIN = 1.02  # tasks with a smaller speed-up do not profit
CAUSES = {
    "drafting": "the cost of drafting",
    "verifying": "the cost of verifying several tokens at once",
    "rejection": "the rejection of drafts",
    "other": "work outside the models",
    "prefill": "reading the prompt, which speculative decoding does not make faster",
}


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
    servers = "baseline" in row
    texts = server_texts(row) if servers else texts_sentence(row)
    lines = [answer(row, texts), *more_prompts(row), conditions(row), *tasks(row)]
    if row.get("bottleneck"):
        lines += [bottleneck(row), better_drafter(row)]
    if servers:
        reason = [other_reason(row)] if row["verdict"] == FASTER and not row["drafted"] else []
        return [*lines, *reason, *server_selection(row), *row["skipped"]]
    return [*lines, *selection(row), *row["skipped"], *apply(row)]


def answer(row: Row, texts: str) -> str:
    """Whether it helps, with which settings, and whether the text equals the target's. `texts` words the last part."""
    name, baseline = row["candidate"], baseline_name(row)
    ratio = f"{row['speedup']:.2f}x{star(row)} {baseline}{interval_text(row)}"
    here = "here" if row["divided"] else f"on {these(row)}"
    too_few = _too_few(row)
    if too_few and row["without_gain"]:
        return f"Too few runs for an answer: the drafts of {name} have saved no forward pass so far, {texts}."
    if too_few:
        return f"Too few runs for an answer: {name} was {about(row['speedup'])} {baseline} so far, {texts}."
    if row["without_gain"]:
        return (
            f"Speculative decoding does not help {here}: the drafts of the best candidate, {name}, saved no forward "
            f"pass of the target (1.00 tokens each); {ratio}, {texts}."
        )
    if row["verdict"] == SLOWER:
        return f"Speculative decoding does not help {here}: the best candidate, {name}, is slower: {ratio}, {texts}."
    if row["verdict"] == FASTER and row["speedup"] < SMALL_GAIN:
        return f"Speculative decoding hardly helps {here}: {name} is {ratio}, {texts}."
    if row["verdict"] == FASTER:
        start = "Use" if row["divided"] else f"On {these(row)}, use"
        return f"{start} {name}: {ratio}, {texts}."
    low, high = row["interval"]
    # An interval that excludes 1 would otherwise seem to contradict the answer.
    why = "" if low <= 1 <= high else ", because too many of its repeats lie on the other side of 1"
    return (
        f"Speculative decoding makes no measurable difference {here}: "
        f"{name} is {ratio}, not distinguishable from no difference{why}; {texts}."
    )


def more_prompts(row: Row) -> list[str]:
    """How to get a clearer answer if the interval is wide and contains 1."""
    if row["interval"] is None or row["verdict"] in (FASTER, SLOWER) or row["interval"][1] < WIDE * row["interval"][0]:
        return []
    return ["More prompts of your own narrow the interval: /verdict FILE."]


def about(speedup: float) -> str:
    return f"about {speedup:.1f}x"


def these(row: Row) -> str:
    return "this prompt" if row["prompts"] == 1 else f"these {row['prompts']} prompts"


def interval_text(row: Row) -> str:
    """The interval, and whether it is over prompts or repeats."""
    if row["interval"] is None:
        return ""
    low, high = row["interval"]
    over = f"{row['prompts']} prompts" if row["interval_over"] == "prompts" else f"{row['pairs']} repeats"
    return f" (95 % interval {low:.2f} to {high:.2f} over {over})"


def texts_sentence(row: Row) -> str:
    """Whether the texts are the target's own."""
    if not row["must_be_the_targets"]:
        return f"same distribution of texts (/verify {row['verify']})"
    identical = f"text identical on {row['same_texts']} of {row['prompts']}"
    if row["same_texts"] == row["prompts"]:
        return identical if row["prompts"] > 1 else "text identical to the target's"
    numbers = ", ".join(str(one["number"]) for one in row["by_prompt"] if not one["same"])
    cause = (
        "this should not happen, please report it"
        if row["engine_verified"]
        else "this engine does not guarantee equal bits, see /audit"
    )
    return f"{identical} (not on prompt {numbers}: {cause})"


def server_texts(row: Row) -> str:
    """Whether the texts are those of the server's baseline."""
    name = row["strategy"].partition(" ")[2]
    if not row["compared_texts"]:
        return f"texts were not compared, because they are sampled: /server text {name} compares greedy ones"
    identical = f"text identical on {row['same_texts']} of {row['compared_texts']}"
    if not (others := row["other_texts_at_prompts"]):
        return identical
    return f"{identical} (not on prompt {prompt_numbers(others)}: /server text {name} examines these)"


def conditions(row: Row) -> str:
    """The conditions of the measurement."""
    passes = f"{row['passes']} pass{'es' * (row['passes'] > 1)}"
    where = f"{passes} over {row['prompts']} {row['source']}" if row["prompts"] > 1 else f"{row['pairs']} repeats"
    shorter = f" (/length is {row['length_setting']})" if row["length"] < row["length_setting"] else ""
    left_out = f" {row['left_out']} further prompts were left out." if row["left_out"] else ""
    what, chosen = "whole requests, one at a time", ""
    if "baseline" not in row:
        what, chosen = "whole runs with prefill", f" The settings were chosen on {_chosen_on(row)}."
        chosen += " Every prompt began a new conversation." if row["turns"] else ""
    if row["conversations"]:
        chosen += f" {row['conversations']} of the prompts were conversations of several turns."
    load = " /server load shows many requests at once." if "baseline" in row else ""
    return (
        f"Measured: {what}, up to {row['length']} new tokens{shorter}, {row['processor']}, {where}, in turns with "
        f"{baseline_name(row)}.{chosen}{left_out}{load}"
    )


def _chosen_on(row: Row) -> str:
    return "other prompts" if row["divided"] else "runs that are not counted"


def server_selection(row: Row) -> list[str]:
    """Which servers were considered, if there were several."""
    if len(row["considered"]) < 2:
        return []
    shown = ", ".join(f"{name} {speedup:.2f}x" for name, speedup in row["considered"].items())
    return [f"Chosen by its speed-up on {_chosen_on(row)}: {shown}."]


def _too_few(row: Row) -> bool:
    return row["interval"] is None or row["verdict"] == TOO_FEW


def tasks(row: Row) -> list[str]:
    """Where it helps and where not, if the prompts have several tasks."""
    known = row["tasks"]
    if len(known) < 2:
        return []
    shown = ", ".join(f"{task} {one['speedup']:.2f}x" for task, one in known.items())
    without = [task for task, one in known.items() if one["speedup"] < LITTLE_GAIN or one["accepted"] == 0]
    few = min(one["prompts"] for one in known.values())
    line = f"By task: {shown}."
    if without and not _too_few(row):
        line += f" It does not help with {', '.join(without)}."
    if few < 3:
        line += f" (Rough: some tasks have only {few} prompt{'s' * (few > 1)}.)"
    return [line]


def bottleneck(row: Row) -> str:
    """What limits the speed-up."""
    cause = row["bottleneck"]
    if cause == "no drafts":
        share = row["declined_rounds"] / row["rounds"]
        return f"Bottleneck: nothing is drafted in {share:.0%} of the rounds, which are then decode steps."
    costs = f"verifying {row['drafts_per_round']:.1f} drafts takes {row['verify_cost']:.2f} decode steps"
    if row["draft_cost"] is not None:
        costs += f", a draft {row['draft_cost']:.2f}"
    rate = "" if row["acceptance_rate"] is None else f", {row['acceptance_rate']:.0%} of the drafts are accepted"
    return f"Bottleneck: {CAUSES[cause]}; without it {about(row['limits'][cause])}. {costs}{rate}.".replace(
        ". v", ". V", 1
    )


def better_drafter(row: Row) -> str:
    """The gain from a drafter that is twice as fast or twice as accurate."""
    gains = row["better_drafter"]
    return (
        f"A drafter twice as fast would bring {about(gains['twice_as_fast'])}, one twice as accurate (half as many "
        f"rejections at every position) {about(gains['twice_as_accurate'])}, with unchanged draft lengths."
    )


def selection(row: Row) -> list[str]:
    """Which other candidates were considered."""
    shown = ", ".join(f"{one['name']} {one['predicted_speedup']:.2f}x" for one in row["considered"])
    lines = [f"Predicted before the measurement: {shown}."] if len(row["considered"]) > 1 else []
    if lines and row["trials"]:
        lines[0] += f" Trial runs of the best {len(row['tried'])}: {row['kind_name']} was the fastest."
    if row["not_tried"]:
        lines.append(f"There was no time to replay: {', '.join(row['not_tried'])}.")
    return lines


def helps(row: Row) -> bool:
    """Whether the answer recommends the candidate."""
    return bool(
        row["interval"] and not row["without_gain"] and row["verdict"] == FASTER and row["speedup"] >= SMALL_GAIN
    )


def apply(row: Row) -> list[str]:
    """How to apply the recommended settings here."""
    if row["interval"] is None:
        return []
    if helps(row) and row["in_use"]:
        return ["This session uses these settings already."]
    if helps(row):
        return [f"To use it here: /verdict apply, or {' and '.join(row['commands'])}."]
    return ["/verdict apply turns speculative decoding off here."] if row["verdict"] == SLOWER else []
