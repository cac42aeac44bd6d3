"""Explains the answers of servers to one prompt: speed and text compared with the baseline.

One run of each proves nothing, so speeds are "about", and no gain is claimed where no draft was accepted.
"""

from collections.abc import Iterator

from utils.comparison.server_runs import CHARACTER, ComparedServer, ServerPrompt
from utils.comparison.summary import NOTICEABLE
from utils.decode.steps import FinishReason
from utils.servers.address import TARGET
from utils.servers.kinds.completion import CountedBy

NOT_COUNTED = "{} gives neither token ids nor usage figures, so its tokens and its speed are unknown."
NO_BASELINE = (
    "Speed-ups need a baseline: /server add NAME URL baseline=NAME says with which server another is compared."
)
OTHER_HOST = "{} and {} are on different hosts, so their speeds are not compared."
NO_RUN = "{} has no answer of {} to be compared with."
DIFFERENT_LENGTHS = "{} and {} generated {} and {} tokens, which affects tokens/s, too."
NO_GAIN = "{}: no draft was accepted, so any difference in speed is noise or the cost of drafting."
SAMPLED = "Sampled texts need not be equal; /server text {} compares greedy ones."
LOCAL_BASELINE = "Texts of servers and of the local target are compared under greedy decoding only (/temperature 0)."


def server_summary(prompt: ServerPrompt) -> Iterator[str]:
    """The sentences below the table."""
    finished = [entry for entry in prompt.compared if entry.run.finish is not FinishReason.INTERRUPTED]
    for entry in finished:
        if entry.run.answer.completion.counted_by is CountedBy.NOTHING:
            yield NOT_COUNTED.format(entry.run.name)
        if entry.comparison.baseline is not None:
            yield from _compared(entry, prompt)
        if (found := entry.run.answer.acceptance) is not None and found.note:
            yield f"{entry.run.name}: {found.note}"
    if len(finished) > 1 and all(entry.comparison.baseline is None for entry in finished):
        yield NO_BASELINE
    sampled = (one for one, compared in finished if compared.speedup and compared.same is None)
    if (run := next(sampled, None)) is not None:
        local = run.address.baseline == TARGET
        yield LOCAL_BASELINE if local else SAMPLED.format(run.address.name)


def is_noise(entry: ComparedServer) -> bool:
    """Whether a server looks faster than its baseline although none of its drafts was accepted."""
    return bool(entry.run.accepted == 0 and entry.run.drafted and (entry.comparison.speedup or 0) > 1)


def _compared(entry: ComparedServer, prompt: ServerPrompt) -> Iterator[str]:
    run, comparison = entry
    baseline = comparison.baseline or ""
    other = next((one.run for one in prompt.compared if one.run.name == baseline), None)
    parts = list(filter(None, (_speed(entry), _text(entry))))
    if parts:
        yield f"{run.name}: {', and '.join(parts)}."
    elif baseline != TARGET and other is None:
        yield NO_RUN.format(run.name, baseline)
    if run.accepted == 0 and run.drafted:
        yield NO_GAIN.format(run.name)
    if other is not None and run.address.host != other.address.host:
        yield OTHER_HOST.format(run.name, baseline)
    lengths = (run.new_tokens, comparison.baseline_tokens)
    if comparison.speedup is not None and None not in lengths and lengths[0] != lengths[1]:
        yield DIFFERENT_LENGTHS.format(run.name, baseline, *lengths)


def _speed(entry: ComparedServer) -> str:
    speedup, decoding = entry.comparison.speedup, entry.comparison.decode_speedup
    if speedup is None or is_noise(entry):
        return ""
    baseline = entry.comparison.baseline
    alone = "" if decoding is None else f" ({decoding:.1f}x after the first token)"
    if abs(speedup - 1) < NOTICEABLE:
        return f"about as fast as {baseline}{alone}"
    return f"about {speedup:.1f}x as fast as {baseline}{alone}"


def _text(entry: ComparedServer) -> str:
    comparison = entry.comparison
    if comparison.same is None:
        return ""
    if comparison.same:
        return f"the same text as {comparison.baseline}"
    place = (comparison.first_difference or 0) + 1
    where = "character" if comparison.unit == CHARACTER else "token"
    name = entry.run.address.name
    return f"another text than {comparison.baseline} from {where} {place} (a rounding tie? see /server text {name})"
