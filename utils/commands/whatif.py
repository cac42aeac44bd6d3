"""/why and /whatif: how the last prompt spent its time and what limits its speed-up, and every draft length predicted.

/why has the times of the prompt's own runs. For /whatif, rounds and acceptance come from the decoding loop itself, run
over what the drafters propose along the finished text (sampling.counterfactual), and times from the measured costs,
or with on=DEVICE from a model of other hardware.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from utils.commands.experiments import other_hardware as elsewhere
from utils.commands.experiments.speed_model import (
    BY_POSITION,
    GammaRounds,
    Prediction,
    TargetTiming,
    bottleneck,
    draft_figures,
    gamma_text,
    predictions,
    replayed_rounds,
    target_run,
)
from utils.commands.shared.registry import Command, CommandContext, Outcome
from utils.commands.shared.result_tables import ACCEPTANCE, NOTHING, ResultColumn, ResultTable, Row, figure, grouped
from utils.comparison.arms import PREFIX
from utils.comparison.harness import LastPrompt
from utils.comparison.records import read_records, run_records, shortened
from utils.comparison.strategies import Job
from utils.errors import UserError
from utils.metrics.results import Generation, spans_of
from utils.models.feature_drafter import StepwiseDrafter
from utils.models.sources import parse_path
from utils.pairs.request import LOADED
from utils.text import count_of

MIN_GAIN = 1.02  # predicted ratio from which a gamma is recommended
EXACT = "Rounds and acceptance are those of real runs. Speeds are predicted from measured costs (/costs)."
ESTIMATE = "An estimate for /verify coupled. Other rules use other random numbers and accept slightly more drafts."
UNLISTED = "A gamma that is not listed accepts the same drafts as the one above it."


TABLE = ResultTable(
    figure("strategy", "strategy"),
    ResultColumn("gamma", lambda row: gamma_text(row["gamma"])),
    figure("rounds", "rounds", drop=2),
    ResultColumn("accepted", lambda row: f"{row['accepted']}/{row['drafted']}", drop=1),
    ACCEPTANCE,
    figure("tokens/forward", "tokens_per_target_forward", "{:.2f}"),
    figure("tokens/s", "tokens_per_second", "{:.1f}"),
    figure("speed-up", "speedup", "{:.2f}x"),
)


def _whatif(argument: str, context: CommandContext) -> Outcome:
    if argument:
        return _elsewhere(elsewhere.parse(argument), context)
    harness, (last, run, job) = context.harness, _replayed(context, context.settings.drafter_kind)
    drafting = [strategy for strategy in harness.runnable(job.settings) if strategy.drafts]
    replayed = predictions(job, drafting, run, lambda text: harness.progress(f"replaying {text}"))
    shown = ("whatif", last.text, job.settings, _rows(job, run, replayed))
    return [TABLE.report(*shown, shown=_without_repeats, conclude=partial(_conclusion, context.settings.gamma))]


def _replayed(context: CommandContext, kinds: tuple[str, ...]) -> tuple[LastPrompt, Generation, Job]:
    """The last prompt, its target's run and the job to replay. Raises UserError if there is nothing to replay."""
    last, harness = context.harness.last(), context.harness
    run = target_run(last)
    TargetTiming.of(run)  # raises UserError before anything is replayed
    # The text was generated with the old settings; the drafters along it may be chosen anew.
    settings = replace(last.job.settings, drafter_kind=kinds, costs=context.settings.costs)
    job = harness.job(last.job.prompt, settings, last.job.history)
    if not settings.reset_in_between:
        # A real run would start from the session's storage, which may already contain this text.
        job = replace(job, storage=harness.state.storage, caches=harness.state.caches)
    return last, run, job


def _rows(job: Job, run: Generation, replayed: Iterator[Prediction]) -> Iterator[Row]:
    for strategy, gamma, steps, seconds, speedup in replayed:
        yield {
            "strategy": strategy.name,
            "drafter": strategy.drafter_label(job.pair),
            "gamma": gamma,
            "rounds": len(steps),
            "drafted": sum(step.draft_counts[0] for step in steps),
            "accepted": sum(step.draft_counts[1] for step in steps),
            "tokens_per_target_forward": sum(len(step.tokens) for step in steps) / len(steps),
            "tokens_per_second": len(run.tokens) / seconds,
            "speedup": speedup,
            "exact": strategy.repeats_target(job.settings),
        }


def _without_repeats(rows: Sequence[Row]) -> list[Row]:
    return [row for above, row in pairwise([{}, *rows]) if not _repeats(row, above)]


def _repeats(row: Row, above: Row) -> bool:
    """Whether a larger gamma changes no round. It drafts more, so it is recorded, but neither shown nor advised."""
    same = (row[name] == above.get(name) for name in ("strategy", "rounds", "accepted"))
    return row["gamma"] is not None and all(same)


def _conclusion(gamma: int | None, rows: Sequence[Row]) -> list[str]:
    """The best gamma of each strategy, what the figures are, and what to type. `gamma` is the value of the session."""
    found = [best_gamma(own) for own in grouped(_without_repeats(rows), "strategy").values()]
    exact = all(row["exact"] for row in rows)
    lines = [*(line for line, _ in found), f"{EXACT if exact else ESTIMATE} {UNLISTED}"]
    if advised := [best for _, best in found if best is not None]:
        value = gamma_text(max(advised, key=lambda row: float(row["speedup"]))["gamma"])
        change = "" if value == gamma_text(gamma) else f"/gamma {value}, then "
        lines.append(f"Next: {change}/race 5 measures it.")
    return lines


def best_gamma(rows: Sequence[Row]) -> tuple[str, Row | None]:
    """A sentence on the best gamma of a strategy, and its row if it is predicted to be faster than the target alone.

    Each row is a gamma, where None is adaptive.
    """
    name, best = rows[0]["strategy"], max(rows, key=lambda row: float(row["speedup"]))
    if best["speedup"] < MIN_GAIN:
        return f"{name}: no gamma is predicted to be faster than target-only.", None
    auto = other = next((row for row in rows if row["gamma"] is None), None)
    if auto is not None and best["speedup"] < MIN_GAIN * auto["speedup"]:
        best, other = auto, best
    # Also if auto is preferred to a fixed gamma that the table shows as slightly faster.
    also = "" if other is None or best is other else f" ({gamma_text(other['gamma'])}: {other['speedup']:.2f}x)"
    return (
        f"{name}: best with gamma {gamma_text(best['gamma'])}, predicted {best['speedup']:.2f}x target-only{also}.",
        best,
    )


THERE = ResultTable(
    figure("gamma", "gamma"),
    figure("predicted speed-up", "predicted_speedup", "{:.2f}x"),
    ResultColumn("interval", lambda row: "{:.2f}x to {:.2f}x".format(*row["interval"])),
    figure("predicted tokens/s", "tokens_per_second", "{:,.1f}", drop=1),
)


def _elsewhere(values: dict[str, Any], context: CommandContext) -> Outcome:
    last, run, job = _replayed(context, (LOADED,))
    pair, word, source = job.pair, values.pop("target", ""), values.pop("from", "")
    if source:
        values |= elsewhere.measured(_records_of(source, last, context))
    if pair.drafter is None:
        raise UserError("a drafter is needed: load one with /load.")
    if not isinstance(pair.drafter, StepwiseDrafter) and len(values["points"]) < 2:
        raise UserError("published figures are of heads, such as EAGLE: load one, or give plain=, k3= and k7=.")
    shape = elsewhere.Shape.named(word) if word else elsewhere.Shape.of_config(pair.target.config.to_dict())
    load = elsewhere.Deployment(shape, **values)
    load.check()  # raises UserError before anything is replayed
    strategy = next(one for one in context.harness.runnable(job.settings) if one.word == LOADED)
    progress = context.harness.progress
    replayed = replayed_rounds(job, [strategy], run.tokens, lambda text: progress(f"replaying {text}"))
    title, conclude = f'/whatif on={load.device} of "{shortened(last.text)}"', partial(_there, load)
    shown = ("whatif on", last.text, job.settings, _predicted(load, replayed))
    return [THERE.report(*shown, conclude=conclude, title=title)]


def _records_of(source: str, last: LastPrompt, context: CommandContext) -> list[Row]:
    """The records of a file, or those of a server's answer to the last prompt and of the runs without drafts."""
    if all(server.address.name != source for server in context.harness.state.servers):
        return [run.row for run in read_records(parse_path(source)).runs]
    rows = run_records(last, {}, last.job.pair)
    return [row for row in rows if row["strategy"] == PREFIX + source or not row["drafted"]]


def _predicted(load: elsewhere.Deployment, replayed: Iterator[GammaRounds]) -> Iterator[Row]:
    lengths = {
        one.gamma: sum(len(step.tokens) for step in one.steps) / len(one.steps)
        for one in replayed
        if one.gamma is not None and 1 <= one.gamma <= elsewhere.MOST_DRAFTS
    }
    ratio = load.ratio(lengths)
    for gamma, length in lengths.items():
        speedup = length / ratio(gamma)
        there = {"device": load.device, "predicted_speedup": speedup, "interval": load.error.interval(speedup)}
        speed = None if load.plain is None else load.plain * speedup
        yield {"gamma": gamma, "tokens_per_round": length, **there, "tokens_per_second": speed}


def _there(load: elsewhere.Deployment, rows: Sequence[Row]) -> list[str]:
    """The best gamma, the error, and what the prediction is made from. Measured figures have a line of their own."""
    error, bandwidth = load.error, elsewhere.DEVICES[load.device].bandwidth
    lengths = [f"{row['tokens_per_round']:.2f}" for row in rows]
    best = max(rows, key=lambda row: float(row["predicted_speedup"]))
    speedup, (low, high) = best["predicted_speedup"], best["interval"]
    found = f"best with gamma {best['gamma']}, predicted {speedup:.2f}x target-only ({low:.2f}x to {high:.2f}x)"
    return [
        f"{load.device}: {found if speedup >= MIN_GAIN else 'no gamma is predicted to be faster than target-only'}.",
        f"Error for {load.known}: median {error.median:.0%}, 90th percentile {error.high:.0%} (the interval), by "
        f"{count_of(error.cells, 'prediction')} for {error.series} series of published figures.",
        _alone(load),
        f"Replayed, exact for this text alone: {', '.join(lengths)} tokens per round with gamma 1, 2, ...",
        f"Assumed: a target of {load.shape.stored / 1e9:.3g} billion parameters, head of {load.shape.head / 1e9:.2g}, "
        f"{load.weights}, batch {load.batch}, context {load.context}, {bandwidth / 1e12:g} TB/s.",
    ]


def _alone(load: elsewhere.Deployment) -> str:
    """The measured speeds as they were given, or the predicted one of the target alone."""
    if load.plain is not None:
        points = (f", k{k:.3g} {speed:.4g}" for k, (speed, _) in load.points.items())
        return f"Measured, as given: plain {load.plain:.4g}{''.join(points)} tokens/s."
    error, speed = elsewhere.ERRORS[load.shape.kind, elsewhere.ALONE], load.batch / load.step
    if error.median > elsewhere.MOST_ERROR:
        return f"The speed of the target alone is not predicted: {error.reason}."
    low, high = error.interval(speed)
    return f"Target-only: predicted {speed:,.0f} tokens/s ({low:,.0f} to {high:,.0f}); median error {error.median:.0%}."


WHATIF = Command(
    "whatif",
    "[on=DEVICE]",
    "the predicted speed of every gamma",
    _whatif,
    group="does it help?",
    rank=4,
    about="Predict rounds, acceptance and speed of the last prompt for every gamma from 0 to 16, and for auto, without "
    "decoding again. With on=DEVICE, the speed-up on other hardware, with the error of such predictions.",
    syntax=("/whatif", f"/whatif {elsewhere.USAGE}", "/whatif on=H100 from=SERVER|FILE    speeds of its records"),
    words={f"{name}=": "" for name in elsewhere.PARTS} | {f"on={name}": "" for name in elsewhere.DEVICES},
    example=("> /whatif", "speculative: best with gamma 4, predicted 1.52x target-only."),
)


UNIT = "Unit of the costs: one target forward over one token, by the times of these runs."


def _seconds(row: Row, part: str) -> str:
    total = sum(row["seconds"].values())
    return f"{row['seconds'][part]:.2f} s, {row['seconds'][part] / total:.0%}" if total else NOTHING


WHY_TABLE = ResultTable(
    figure("strategy", "strategy"),
    figure("measured speed-up", "speedup", "{:.2f}x"),
    figure("tokens/round", "tokens_per_round", "{:.2f}"),
    figure("drafts/round", "drafts_per_round", "{:.1f}"),
    figure("draft cost", "draft_cost", "{:.3f}"),
    figure("verify cost", "verify_cost", "{:.2f}"),
    BY_POSITION,
    ResultColumn("rounds without drafts", lambda row: f"{row['declined_rounds']}/{row['rounds']}"),
    *(ResultColumn(part, partial(_seconds, part=part)) for part in ("drafting", "verifying", "other")),
)


def _why(argument: str, context: CommandContext) -> Outcome:
    last = context.harness.last()
    TargetTiming.of(target_run(last))  # raises UserError if the target's own run cannot be compared with
    if not any(strategy.drafts and run.timings for strategy, run, _ in last.local):
        raise UserError(
            "a run that drafts is needed: turn one on, for example with /speculative on, and send a prompt."
        )
    return [WHY_TABLE.report("why", last.text, last.job.settings, _splits(last), conclude=_limits, transposed=True)]


def _splits(last: LastPrompt) -> Iterator[Row]:
    target, jobs = target_run(last), last.jobs
    for strategy, run, comparison in last.local:
        if strategy.drafts and run.timings:
            parts = ((one.drafting, one.verifying, one.total) for one in run.timings)
            drafting, verifying, total = map(sum, zip(*parts, strict=True))
            yield {
                **draft_figures([(run, target)], comparison.speedup or 1.0),
                "strategy": strategy.name,
                "gamma": last.job.settings.gamma,
                "speedup": comparison.speedup,
                "tokens_per_round": len(run.tokens) / len(run.steps),
                "seconds": {"drafting": drafting, "verifying": verifying, "other": total - drafting - verifying},
                "accepted_by_span": spans_of(jobs[strategy.name].prompt, run.steps, last.job.pair.tokenizer),
            }


def _limits(rows: Sequence[Row]) -> list[str]:
    known = (row for row in rows if row["bottleneck"] and row["speedup"])
    lines = [f"{row['strategy']}: the bottleneck is {bottleneck(row)}." for row in known]
    for row in rows:
        kinds = (f"{kind} {accepted}/{drafted}" for kind, (accepted, drafted) in row["accepted_by_span"].items())
        lines += [f"{row['strategy']}, accepted by kind of text: {shown}."] if (shown := ", ".join(kinds)) else []
    return [*lines, UNIT, "Next: /whatif predicts every gamma for this text."]


WHY = Command(
    "why",
    "",
    "where the time went, and what limits it",
    _why,
    group="does it help?",
    rank=3,
    about="Where the time of the last prompt went: drafting, verifying and the rest, and what limits its speed-up.",
    example=("> /why", "speculative: the bottleneck is the cost of drafting; without it ..."),
)
