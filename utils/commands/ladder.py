"""/ladder: up to which context length do drafts pay, and what changes beyond it?

Parts of one text, cut to each context length and with a question at the end, run in turns by every strategy that drafts
and by the target alone. A part has the same end at all lengths, so that lengths are compared part by part.
"""

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pydoc_data.topics import topics
from statistics import mean, median
from typing import Any, Self

from utils.commands.experiments.races import ArmRace, RaceItem, RaceResult, race_row, server_arms, texts, then_findings
from utils.commands.experiments.races import with_bounds as bounds
from utils.commands.experiments.speed_model import BY_POSITION, draft_figures
from utils.commands.shared.registry import Command, CommandContext, Outcome
from utils.commands.shared.result_tables import NOTHING, ResultColumn, ResultTable, Row, figure, grouped
from utils.comparison import speed_claims as claims
from utils.comparison.arms import Arm, Run, complete, request_maker
from utils.comparison.harness import Harness, comparable_servers
from utils.comparison.records import Finding, Note, Progress, Report, ReportEvent
from utils.comparison.warm_up import with_costs
from utils.config.settings import Settings
from utils.decode.model_info import GROWTH, cache_bytes, context_length
from utils.errors import UserError
from utils.files import read_text
from utils.metrics.intervals import speedup_interval
from utils.metrics.results import Generation
from utils.models.memory import free_bytes
from utils.models.sources import parse_path
from utils.prompts.prompt_files import Prompt
from utils.servers.connection import Connection
from utils.text import byte_size, encodable


@dataclass(frozen=True, slots=True)
class RoundModel:
    """The figures of the rounds of one run; times are in decode steps of its baseline's run.

    `rates` has for each position the share of rounds with a draft there, of those that accepted all drafts before it,
    and its acceptance. `drafts` is the number of drafts per round, `width` that of the median round with drafts.
    `verify` and `draft` are the extra time of a verify pass and the time of drafting, per draft. `reading` is the time
    in which the drafter reads the prompt, per new token, and `other` the rest of a round. Of servers, `verify` is all
    extra time.
    """

    rates: tuple[tuple[float, float], ...]
    drafts: float
    width: float
    verify: float
    draft: float = 0.0
    reading: float = 0.0
    other: float = 0.0

    @classmethod
    def of(cls, ours: Run, theirs: Run) -> Self | None:
        """The figures of a run beside its baseline's, or None if they are not known."""
        passes, speeds = ours.target_forwards or ours.rounds, [one.decode_tokens_per_second for one in (ours, theirs)]
        if ours.drafted is None or ours.accepted is None or not passes or not ours.new_tokens:
            return None
        pairs, drafts = ours.accepted_by_position or ((ours.accepted, ours.drafted),), ours.drafted / passes
        before = [passes, *(kept for kept, _ in pairs)]
        found = zip(before, pairs, strict=False)
        rates = tuple((tried / left, kept / tried) for left, (kept, tried) in found if tried and left)
        if ours.generation is not None and theirs.generation is not None:
            costs = _local_costs(ours.generation, theirs.generation)
            return None if costs is None else cls(rates, drafts, **costs)
        if speeds[0] is None or speeds[1] is None:
            return None
        extra = ours.new_tokens / passes * speeds[1] / speeds[0] - 1
        return cls(rates, drafts, drafts, extra / drafts) if drafts else cls(rates, 0, 0, 0, other=extra)

    @property
    def speedup(self) -> float:
        """The speed-up of decoding that follows from these figures."""
        tokens = chance = 1.0
        for share, accepted in self.rates:
            chance *= share * accepted
            tokens += chance
        spent = 1 + self.drafts * (self.verify + self.draft) + self.other
        return 1 / (max(spent, 1e-3) / tokens + self.reading)

    def rates_with(self, other: Self) -> tuple[tuple[float, float], ...]:
        """The rates with the acceptance of another run. Positions that it never tried get that of its last one."""
        known = [accepted for _, accepted in other.rates or self.rates]
        return tuple((share, known[min(place, len(known) - 1)]) for place, (share, _) in enumerate(self.rates))


def _local_costs(ours: Generation, theirs: Generation) -> dict[str, float] | None:
    """Measured without the first round, in which the target reads the prompt, and without the round that took longest
    to draft, in which the drafter does. Forward passes are medians, because a busy machine delays some of them.
    """
    rounds = [(timing, len(step.drafted)) for step, timing in zip(ours.steps, ours.timings, strict=False)]
    steps = [timing.total for timing in theirs.timings[1:]]
    if len(rounds) < 3 or not steps or not (step := median(steps)):
        return None
    longest = max(rounds, key=lambda one: one[0].drafting)
    later = [one for one in rounds[1:] if one is not longest]
    drafting = [one for one in later if one[1]]
    width, drafts = median([count for _, count in drafting] or [0]), sum(count for _, count in drafting)
    reading = longest[0].drafting - median(timing.drafting for timing, _ in later)
    return {
        "width": width,
        "verify": (median(one.verifying for one, _ in drafting) / step - 1) / width if drafts else 0.0,
        "draft": sum(one.drafting for one, _ in drafting) / step / drafts if drafts else 0.0,
        "reading": max(0.0, reading) / step / len(ours.tokens),
        "other": sum(one.other + one.drafting * (not count) for one, count in later) / step / len(later),
    }


ACCEPTANCE, VERIFYING, DRAFTING, FEWER = "acceptance", "verifying", "drafting", "fewer drafts"
# What would the speed-up of decoding be in the short context if only these figures were those of the long one? The
# target's own reading of the prompt is not part of it, because drafts cannot shorten it. Without drafts in the long
# context, their acceptance and costs are not known.
SWAPS: dict[str, Callable[[RoundModel, RoundModel], RoundModel]] = {
    ACCEPTANCE: lambda short, long: replace(short, rates=short.rates_with(long)),
    VERIFYING: lambda short, long: replace(short, verify=long.verify) if long.width else short,
    DRAFTING: lambda short, long: replace(short, draft=long.draft, reading=long.reading) if long.width else short,
    FEWER: lambda short, long: replace(short, rates=long.rates_with(short), drafts=long.drafts),
}


def models_of(results: Sequence[RaceResult]) -> dict[tuple[int, int], RoundModel]:
    """The known models of an arm's runs by text and repeat."""
    models = {(one.item.number, one.repeat): RoundModel.of(one.ours[0], one.theirs[0]) for one in results if one.theirs}
    return {key: model for key, model in models.items() if model is not None}


def cause_effects(short: Sequence[RaceResult], long: Sequence[RaceResult]) -> dict[str, Any]:
    """By cause, the `factor` by which it alone changes the speed-up of decoding from the short to the long context, and
    its 95 % `interval` over the texts, which are the same in both. Empty where the figures are not known.
    """
    before, after, effects = models_of(short), models_of(long), {}
    for name, swap in SWAPS.items():
        groups: dict[int, list[float]] = {}
        for key in before.keys() & after.keys():
            groups.setdefault(key[0], []).append(swap(before[key], after[key]).speedup / before[key].speedup)
        if groups:
            found = speedup_interval([sorted(group) for _, group in sorted(groups.items())])
            effects[name] = {
                "factor": found.estimate,
                "interval": [found.low, found.high] if found.is_bounded else None,
            }
    return effects


def lowers(effect: Row | None) -> bool:
    """Whether a cause lowers the speed-up: noticeably, and with the whole interval below 1."""
    return bool(
        effect and effect["interval"] and effect["interval"][1] < 1 and effect["factor"] <= 1 - claims.NOTICEABLE
    )


def main_cause(rows: Sequence[Row]) -> tuple[str, Row] | None:
    """The cause that lowers the speed-up most in the longest context, and the row of the longest context in which it is
    not distinguishable. Returns None if no cause lowers it. `rows` are the rows of one arm, by context.

    Tests from the longest context to shorter ones, until one is not distinguishable, keep the error of a single test.
    """
    causes = {name: effect for name, effect in rows[-1]["causes"].items() if lowers(effect)}
    if not causes:
        return None
    name = min(causes, key=lambda cause: float(causes[cause]["factor"]))
    return name, next(row for row in reversed(rows) if not lowers(row["causes"].get(name)))


DEFAULT = (512, 2048, 8192)
K = 1024
TEXTS = claims.MIN_VALUES  # parts of the text; fewer are repeated
QUESTION = "\n\nSummarize the text above in five sentences."
CHARACTERS = 4  # per token, roughly
AIM, LEAST, TRIES = 0.985, 0.95, 12  # a prompt is cut to this share of its tokens, and has at least that share
SPARE = 1.25  # parts of the text are longer than the first one needs to be, because others may have longer tokens
PREFILL_SHARE = 0.5  # from this share of the time on, reading the prompt is mentioned
NO_DRAFTS = "a strategy that drafts is needed: turn one on, for example with /speculative on."
ONE_TEXT = f"The intervals are over repeats of one text. A file with room for {TEXTS} parts gives {TEXTS} texts."
PREFILL = "Of the time of the baseline, reading the prompt takes {}, and drafts do not shorten it."


def _name(length: int) -> str:
    return f"{length // K}k" if length % K == 0 else str(length)


def _lengths(words: Sequence[str]) -> list[int]:
    for word in words:
        if not re.fullmatch(r"[1-9]\d{0,7}k?", word, re.ASCII):
            raise UserError(f"'{word}' is not a context length: write tokens, such as 512 or 2k.")
    return sorted({int(word.removesuffix("k")) * (K if word.endswith("k") else 1) for word in words})


def _ladder(argument: str, context: CommandContext) -> Outcome:
    words, file = re.fullmatch(r"((?:\d\S*\s*)*)(.*)", argument, re.DOTALL).groups()  # type: ignore[union-attr]
    lengths, harness, settings = _lengths(words.split()), context.harness, context.settings
    text = encodable(read_text(parse_path(file), "The text file") if file else "\n\n".join(topics.values()))
    ladders = []
    if not harness.state.servers or harness.runs_locally(settings):
        arms = [replace(harness.arm(one), timed=True) for one in harness.enabled(settings) if one.drafts]
        if not arms:
            raise UserError(NO_DRAFTS)
        ladders.append(_Ladder(harness, settings, [*arms, harness.arm(harness.baseline)]))
    if servers := comparable_servers(harness):
        names = {one.address.name for one in servers} | {one.address.baseline for one in servers}
        both = [one for one in harness.state.servers if one.address.name in names]
        ladders.append(_Ladder(harness, settings, server_arms(harness, both), both[0]))
    if not ladders:
        raise UserError("a server with a baseline is needed: /server add NAME URL baseline=NAME.")
    return [ladder.report(f"/ladder {argument}".strip(), text, lengths) for ladder in ladders]


class _Ladder:
    """One ladder, of local strategies or of servers, of which `server` counts tokens if no models are loaded."""

    def __init__(
        self, harness: Harness, settings: Settings, arms: Sequence[Arm], server: Connection | None = None
    ) -> None:
        self._harness, self._settings, self._arms, self._server = harness, settings, arms, server
        self._race, self._lengths = ArmRace(harness, ()), list[int]()
        models = () if server else (harness.pair.target, harness.pair.drafter)
        self._models = [model for model in models if hasattr(model, "config")]

    def report(self, title: str, text: str, lengths: Sequence[int]) -> Report:
        table = ladder_table(servers=self._server is not None)
        return table.report(
            *("server_ladder" if self._server else "ladder", title, self._settings),
            then_findings(self._events(text, lengths), lambda: self._findings(table)),
            conclude=conclusion,
            title=title + ", on servers" * bool(self._server),
        )

    def _events(self, text: str, lengths: Sequence[int]) -> Iterator[ReportEvent]:
        limits = [context_length(model) for model in self._models]
        if self._models:
            yield Progress("measuring what a run takes ...")
            self._settings = with_costs(self._harness, self._settings)
        if not lengths:
            most = limits[0] if limits and limits[0] else DEFAULT[-1]
            lengths = [length for length in DEFAULT if length <= most] or [most // 2, most]
        items = yield from self._items(text, lengths)
        repeats = -(-TEXTS * len(self._lengths) // len(items))
        self._race = ArmRace(self._harness, items, repeats)
        yield from map(Note, [ONE_TEXT] * (repeats == TEXTS))
        yield Note(self._estimate(items, repeats))
        if limits[1:] and limits[1] is not None and limits[1] < self._lengths[-1]:
            yield Note(f"The drafter has a context length of {limits[1]:,}, so it drafts nothing in longer contexts.")
        yield from self._race.events()

    def _items(self, text: str, lengths: Sequence[int]) -> Generator[Note, None, list[RaceItem]]:
        """The prompts, part after part. Lengths that do not fit get a note; if none fits, UserError is raised."""
        size = 0
        for length in lengths:
            try:
                self._check(length)
                size = len(self._cut(text, length))
                self._lengths.append(length)
            except UserError as error:
                problem = f"{_name(length)} is left out. {error}"
                if length == lengths[-1] and not self._lengths:
                    raise UserError(problem) from error
                yield Note(problem)
        count, runs = max(1, min(TEXTS, int(len(text) / (SPARE * size)))), (self._settings, self._arms)
        return [
            RaceItem(part, Prompt(self._cut(text[: len(text) * part // count], length)), _name(length), *runs)
            for part in range(1, count + 1)
            for length in self._lengths
        ]

    def _check(self, length: int) -> None:
        """Raise UserError if the target does not have such a context, or the device the memory for it."""
        if self._models:
            limit, pair = context_length(self._models[0]), self._harness.pair
            if limit is not None and length > limit:
                raise UserError(f"{pair.target_name} has a context length of {limit:,}.")
            if self._bytes(length) > (free := free_bytes(str(pair.device))):
                need = byte_size(self._bytes(length))
                raise UserError(f"Its keys and values need up to {need} of memory, and {byte_size(free)} are free.")

    def _bytes(self, length: int) -> int:
        return int(GROWTH * sum(cache_bytes(model, length) for model in self._models))

    def _cut(self, text: str, length: int) -> str:
        """The end of the text with the question, as long as a prompt in a context of this many tokens may be."""
        most = length - self._settings.length
        if most <= 2 * self._tokens(QUESTION):
            raise UserError(f"The question and {self._settings.length} new tokens (/length) leave no room for a text.")
        size = CHARACTERS * most
        for _ in range(TRIES):
            prompt = text[-size:] + QUESTION
            tokens = self._tokens(prompt)
            if LEAST * most <= tokens <= most:
                return prompt
            if tokens < most and size >= len(text):
                break
            size = max(1, min(len(text), size) + int((AIM * most - tokens) * len(prompt) / tokens))
        raise UserError("The text is too short for it.")

    def _tokens(self, text: str) -> int:
        """The tokens of a prompt. For a server that does not count them, an estimate."""
        if self._server is None:
            return len(self._harness.prompt_ids(text, self._settings))
        try:
            kind, client = self._server.kind, self._server.client
            prompt = request_maker(None, text, self._settings)(kind, client).prompt
            ids = None if isinstance(prompt, tuple) else kind.tokens(client, prompt, special=True)
        except UserError:  # reported when the prompt is run
            ids = None
        return len(text) // CHARACTERS if ids is None else len(ids)

    def _estimate(self, items: Sequence[RaceItem], repeats: int) -> str:
        """What runs, and the time and memory that it takes. The time on servers is not estimated.

        A prefill takes n (a + b n) seconds, by short runs of the target at the first two lengths.
        """
        count = repeats * len(items) // len(self._lengths)
        what = f"{count} runs at {', '.join(map(_name, self._lengths))} tokens with each of {len(self._arms)} arms"
        if not self._models:
            return f"{what}."
        short = replace(self._settings, length=1)
        runs = [complete(self._arms[-1].run(one.prompt.text, short)) for one in items[: min(2, len(self._lengths))]]
        (size, seconds), (larger, longer) = ((run.prompt_tokens or 1, run.seconds) for run in (runs[0], runs[-1]))
        grows = max(0.0, (longer / larger - seconds / size) / (larger - size)) if larger > size else 0.0
        reading = sum(length * (seconds / size + grows * (length - size)) for length in self._lengths)
        steps = len(self._lengths) * self._settings.length * self._harness.pair.engine.step_seconds
        whole = count * len(self._arms) * (reading + steps)
        about = f"{whole:.0f} s" if whole < 120 else f"{whole / 60:.0f} minutes"
        return f"{what}: about {about}, and up to {byte_size(self._bytes(self._lengths[-1]))} for keys and values."

    def _findings(self, table: ResultTable) -> Iterator[Finding]:
        """The figures of every arm at every length. Those of baselines are recorded and not shown."""
        for arm in self._arms:
            shortest: list[RaceResult] = []
            for length in self._lengths:
                results = (one for one in self._race.results if one.arm.name == arm.name)
                if chosen := [one for one in results if one.item.group == _name(length)]:
                    causes = cause_effects(shortest, chosen) if shortest else {}
                    shortest = shortest or chosen
                    row = race_row(_name(length), chosen) | {"context": length, "causes": causes} | _figures(chosen)
                    yield Finding((), row) if _is_baseline(row) else table.finding(row)


def _figures(results: Sequence[RaceResult]) -> dict[str, Any]:
    """The figures of an arm at one length that a race does not have. Servers do not know the cost of a draft."""
    pairs = [(one.ours[0], one.theirs[0]) for one in results if one.theirs]
    each = zip_longest(*(one.ours[0].accepted_by_position or () for one in results), fillvalue=(0, 0))
    positions = [[*map(sum, zip(*counts, strict=True))] for counts in each]
    waits = [(one.first_seconds, one.seconds) for _, one in pairs if one.first_seconds is not None]
    models, prompts = [*models_of(results).values()], [one.ours[0].prompt_tokens for one in results]
    passes = [(1 + model.verify * model.width, model.width) for model in models if model.width]
    runs = [(ours.generation, theirs.generation) for ours, theirs in pairs if ours.generation and theirs.generation]
    return {
        "prompt_tokens": prompts,
        "accepted_by_position": positions,
        "first_drafts": positions[0][0] / positions[0][1] if positions else results[0].ours[0].acceptance_rate,
        "prefill_share": sum(first for first, _ in waits) / sum(whole for _, whole in waits) if waits else None,
        "draft_cost": draft_figures(runs, 1.0)["draft_cost"] if runs and models else None,
        "verify_cost": mean(cost for cost, _ in passes) if passes else None,
        "drafts_per_pass": mean(width for _, width in passes) if passes else None,
        "drafts_per_round": mean(model.drafts for model in models) if models else None,
    }


def ladder_table(*, servers: bool) -> ResultTable:
    """The columns of a ladder."""
    return ResultTable(
        figure("context", "context", "{:,}"),
        figure("server" if servers else "strategy", "strategy"),
        figure("acceptance", "acceptance_rate", "{:.3f}"),
        replace(BY_POSITION, drop=1),
        *([] if servers else [figure("draft cost", "draft_cost", "{:.3f}")]),
        figure("round cost" if servers else "verify cost", "verify_cost", "{:.2f}"),
        ResultColumn("speed-up", claims.speedup_text),
        ResultColumn("95 % interval", lambda row: claims.interval_text(row["interval"])),
    )


def _is_baseline(row: Row) -> bool:
    return row["verdict"] == claims.BASELINE or row.get("baseline", "") is None


def conclusion(rows: Sequence[Row]) -> list[str]:
    """Up to which context each arm pays, and what changes beyond it. `rows` are the figures of the findings."""
    arms = [arm for arm in grouped(rows, "strategy").values() if not _is_baseline(arm[0])]
    lines = [line for arm in arms for line in (_pays(arm), *_cause(arm))]
    if arms and (arms[0][-1]["prefill_share"] or 0) >= PREFILL_SHARE:
        lines.append(PREFILL.format(" and ".join(_at(row, f"{row['prefill_share']:.0%}") for row in _ends(arms[0]))))
    lines += [_at(row, f"{row['strategy']}: {texts(row)}") + "." for row in rows if row["other_texts_at_prompts"]]
    servers = (row for row in rows if "baseline" in row)
    return [*lines, *dict.fromkeys(note for row in servers for note in claims.server_notes(row["strategy"], row))]


def _at(row: Row, what: str) -> str:
    return f"{what} at {_name(row['context'])} tokens"


def _ends(arm: Sequence[Row]) -> Sequence[Row]:
    """The shortest and the longest context, which may be the same."""
    return [*arm[:1], *arm[1:][-1:]]


def _pays(arm: Sequence[Row]) -> str:
    """The contexts in which an arm is faster, and the speed-up at the last of them and at the next one."""
    faster, shown = [row for row in arm if row["verdict"] == claims.FASTER], arm
    names = ", ".join(_name(row["context"]) for row in faster)
    if not faster:
        head, shown = "is not measurably faster in any context", _ends(arm)
    elif faster == arm[: len(faster)]:
        head, shown = f"pays up to {_name(faster[-1]['context'])} tokens", arm[len(faster) - 1 : len(faster) + 1]
    else:
        head = f"is faster only at {names} tokens"
    few = {claims.TOO_FEW: "too few runs to tell"}
    speeds = (
        f"{_at(row, bounds(row) if row['speedup'] else NOTHING)}, {few.get(row['verdict'], row['verdict'])}"
        for row in shown
    )
    return f"{arm[0]['strategy']} {head}: {'; '.join(speeds)}."


# What is worse, the form of its figures, and the field of the first one; the second one is the drafts of a pass.
FALLS = {
    ACCEPTANCE: ("acceptance of the first draft of a round falls", "{:.2f}", "first_drafts"),
    VERIFYING: ("{} become dearer", "{:.2f} decode steps for {:.1f} drafts", "verify_cost"),
    DRAFTING: ("drafting becomes dearer, reading the prompt included", "{:.2f} decode steps a draft", "draft_cost"),
    FEWER: ("fewer tokens are drafted", "{:.1f} a round", "drafts_per_round"),
}


def _cause(arm: Sequence[Row]) -> list[str]:
    """What lowers the speed-up of decoding most in the longest context."""
    name, last = arm[0]["strategy"], arm[-1]
    if not any(effect["interval"] for effect in last["causes"].values()):
        return []
    if (found := main_cause(arm)) is None:
        return [f"{name}: neither acceptance nor a cost is distinguishably worse in the longest context."]
    (cause, before), effect = found, last["causes"][found[0]]
    words, form, key = FALLS[cause]
    words = words.format("rounds (drafting and verifying)" if "baseline" in last else "verify passes")
    figures = " and ".join(_at(row, form.format(row[key] or 0, row["drafts_per_pass"] or 0)) for row in (arm[0], last))
    low, high = effect["interval"]
    alone = f"this alone makes decoding {effect['factor']:.2f}x as fast (95 % interval {low:.2f} to {high:.2f})"
    return [f"{name}: beyond {_name(before['context'])} tokens, {words} ({figures}); {alone}."]


LADDER = Command(
    "ladder",
    "[N ...] [FILE]",
    "up to which context do drafts pay?",
    _ladder,
    group="does it help?",
    about="Run texts cut to several context lengths, with a question at the end, by every strategy that drafts and by "
    "the target alone, in turns: acceptance, costs and speed-up at each length, and what makes drafts pay less in a "
    "long context. N are tokens of prompt and answer together (512 2k 8k, as far as the target's context allows; 2k is "
    "2,048). The text is that of FILE, or the reference of Python. An estimate of time and memory comes first.",
    example=("> /ladder 512 2k", "speculative pays up to 2k tokens: 1.31x (1.22 to 1.40) at 2k tokens, faster."),
    files=("",),
)
