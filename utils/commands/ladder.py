"""/ladder: up to which context length do drafts pay, and what changes beyond it?

Parts of one text, cut to each context length and with a question at the end, run in turns by every strategy that drafts
and by the target alone. A part has the same end at all lengths, so that lengths are compared part by part.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile, zip_longest
from pydoc_data.topics import topics
from statistics import mean
from typing import Any, Self

from utils.bounds import parse_tokens, short_tokens
from utils.commands.experiments.races import ArmRace, RaceItem, RaceResult, race_row, server_arms, texts, then_rows
from utils.commands.experiments.races import with_bounds as bounds
from utils.commands.experiments.speed_model import BY_POSITION, TimeSplit, draft_figures
from utils.commands.shared.registry import Command, CommandContext, Outcome
from utils.commands.shared.result_tables import NOTHING, ResultColumn, ResultTable, Row, bar, figure, grouped
from utils.comparison import speed_claims as claims
from utils.comparison.arms import Arm, Run, complete, request_maker
from utils.comparison.harness import Harness
from utils.comparison.records import Report, gathered
from utils.comparison.warm_up import with_costs
from utils.config.settings import Settings
from utils.decode.model_info import GROWTH, cache_bytes, check_memory, context_length
from utils.errors import UserError
from utils.files import read_text
from utils.metrics.intervals import speedup_interval
from utils.models.sources import parse_path
from utils.prompts.prompt_files import Prompt
from utils.servers.address import TARGET
from utils.servers.connection import Connection
from utils.text import byte_size, encodable


@dataclass(frozen=True, slots=True)
class RoundModel:
    """The figures of the rounds of one run; times are in decode steps of its baseline's run.

    `rates` has for each position the share of rounds with a draft there, of those that accepted all drafts before it,
    and its acceptance. `drafts` is the number of drafts per round. `verify` is the extra time of a verify pass, and
    `draft` that of drafting with reading the prompt, both per draft; `other` is the rest of a round. Of servers, and
    without drafts, the whole extra time is in one of them.
    """

    rates: tuple[tuple[float, float], ...]
    drafts: float
    verify: float
    draft: float
    other: float

    @classmethod
    def of(cls, ours: Run, theirs: Run) -> Self | None:
        """The figures of a run beside its baseline's, or None if they are not known."""
        passes, times = ours.target_forwards or ours.rounds, _extra_times(ours, theirs)
        if ours.drafted is None or ours.accepted is None or not passes or times is None:
            return None
        pairs, drafts = ours.accepted_by_position or ((ours.accepted, ours.drafted),), ours.drafted / passes
        before = [passes, *(kept for kept, _ in pairs)]
        found = zip(before, pairs, strict=False)
        rates = tuple((tried / left, kept / tried) for left, (kept, tried) in found if tried and left)
        verify, draft, other = times
        return cls(rates, drafts, verify / drafts, draft / drafts, other) if drafts else cls(rates, 0, 0, 0, sum(times))

    @property
    def speedup(self) -> float:
        """The speed-up of decoding that follows from these figures."""
        tokens = chance = 1.0
        for share, accepted in self.rates:
            chance *= share * accepted
            tokens += chance
        return tokens / max(1 + self.drafts * (self.verify + self.draft) + self.other, 1e-3)

    def rates_with(self, other: Self) -> tuple[tuple[float, float], ...]:
        """The rates with the acceptance of another run. Positions that it never tried get that of its last one."""
        known = [accepted for _, accepted in other.rates or self.rates]
        return tuple((share, known[min(place, len(known) - 1)]) for place, (share, _) in enumerate(self.rates))


def _extra_times(ours: Run, theirs: Run) -> tuple[float, float, float] | None:
    """The extra time of a mean round in verifying, in drafting and besides, in decode steps, or None if it is not
    known. The times of a server's rounds follow from its speed.
    """
    if ours.generation is not None and theirs.generation is not None:
        split = TimeSplit.of([(ours.generation, theirs.generation)])
        if split is None or not split.steps:
            return None
        return split.verifying / split.steps, split.drafting / split.steps, split.other / split.steps
    passes, speeds = ours.target_forwards or ours.rounds, [one.decode_tokens_per_second for one in (ours, theirs)]
    if not passes or not ours.new_tokens or speeds[0] is None or speeds[1] is None:
        return None
    return ours.new_tokens / passes * speeds[1] / speeds[0] - 1, 0.0, 0.0


ACCEPTANCE, VERIFYING, DRAFTING, FEWER = "acceptance", "verifying", "drafting", "fewer drafts"
# What would the speed-up of decoding be in the short context if only these figures were those of the long one? The
# target's own reading of the prompt is not part of it, because drafts cannot shorten it. Without drafts in the long
# context, their acceptance and costs are not known.
SWAPS: dict[str, Callable[[RoundModel, RoundModel], RoundModel]] = {
    ACCEPTANCE: lambda short, long: replace(short, rates=short.rates_with(long)),
    VERIFYING: lambda short, long: replace(short, verify=long.verify) if long.drafts else short,
    DRAFTING: lambda short, long: replace(short, draft=long.draft) if long.drafts else short,
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
    keys = sorted(before.keys() & after.keys())
    for name, swap in SWAPS.items() if keys else ():
        groups = gathered((key[0], swap(before[key], after[key]).speedup / before[key].speedup) for key in keys)
        found = speedup_interval([*groups.values()])
        interval = [found.low, found.high] if found.is_bounded else None
        effects[name] = {"factor": found.estimate, "interval": interval}
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
TEXTS = claims.MIN_VALUES  # parts of the text; fewer are repeated
QUESTION = "\n\nSummarize the text above in five sentences."
CHARACTERS = 4  # per token, roughly
AIM, LEAST, TRIES = 0.985, 0.95, 12  # a prompt is cut to this share of its tokens, and has at least that share
SPARE = 1.25  # parts of the text are longer than the first one needs to be, because others may have longer tokens
PREFILL_SHARE = 0.5  # from this share of the time on, reading the prompt is mentioned
NO_DRAFTS = "a strategy that drafts is needed: turn one on, for example with /speculative on."
ONE_TEXT = f"The intervals are over repeats of one text. A file with room for {TEXTS} parts gives {TEXTS} texts."
PREFILL = "Of the time of the baseline, reading the prompt takes {}, and drafts do not shorten it."


def _ladder(argument: str, context: CommandContext) -> Outcome:
    words = [*takewhile(lambda word: word[0].isdigit(), argument.split())]
    lengths, file = sorted(set(map(parse_tokens, words))), "".join(argument.split(maxsplit=len(words))[len(words) :])
    text = encodable(read_text(parse_path(file), "The text file") if file else "\n\n".join(topics.values()))
    harness, settings, servers, ladders = context.harness, context.settings, [*context.harness.state.servers], []
    if not servers or harness.runs_locally(settings):
        arms = [replace(harness.arm(one), timed=True) for one in harness.enabled(settings) if one.drafts]
        if not arms:
            raise UserError(NO_DRAFTS)
        ladders.append(_Ladder(harness, settings, [*arms, harness.arm(harness.baseline)]))
    if servers:
        ladders.append(_Ladder(harness, settings, server_arms(harness, servers), servers[0]))
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
        return ladder_table(servers=self._server is not None).report(
            *("server_ladder" if self._server else "ladder", title, self._settings),
            then_rows(partial(self._run, text, lengths), self._rows),
            shown=without_baselines,
            conclude=conclusion,
            title=title + ", on servers" * bool(self._server),
        )

    def _run(self, text: str, lengths: Sequence[int]) -> None:
        limits = [context_length(model) for model in self._models]
        if self._models:
            self._harness.progress("measuring what a run takes ...")
            self._settings = with_costs(self._harness, self._settings)
        if not lengths:
            most = limits[0] if limits and limits[0] else DEFAULT[-1]
            lengths = [length for length in DEFAULT if length <= most] or [most // 2, most]
        items = self._items(text, lengths)
        repeats = -(-TEXTS * len(self._lengths) // len(items))
        self._race = ArmRace(self._harness, items, repeats)
        if repeats == TEXTS:
            self._harness.note(ONE_TEXT)
        self._harness.note(self._estimate(items, repeats))
        if limits[1:] and limits[1] is not None and limits[1] < self._lengths[-1]:
            sentence = f"The drafter has a context length of {limits[1]:,}, so it drafts nothing in longer contexts."
            self._harness.note(sentence)
        self._race.run_all()

    def _items(self, text: str, lengths: Sequence[int]) -> list[RaceItem]:
        """The prompts, part after part. Lengths that do not fit get a note; if none fits, UserError is raised."""
        problems, size, runs = list[str](), 0, (self._settings, self._arms)
        for length in lengths:
            try:
                size = len(self._cut(text, length))
                self._lengths.append(length)
            except UserError as error:
                problems.append(f"{short_tokens(length)} is left out. {error}")
        if not self._lengths:
            raise UserError(problems[-1])
        for problem in problems:
            self._harness.note(problem)
        count = max(1, min(TEXTS, int(len(text) / (SPARE * size))))
        return [
            RaceItem(part, Prompt(self._cut(text[: len(text) * part // count], length)), short_tokens(length), *runs)
            for part in range(1, count + 1)
            for length in self._lengths
        ]

    def _cut(self, text: str, length: int) -> str:
        """The end of the text with the question, as long as a prompt in a context of this many tokens may be. Raises
        UserError if the length leaves no room for text, or exceeds the target's context length or the free memory.
        """
        limit = context_length(self._models[0]) if self._models else None
        if limit is not None and length > limit:
            raise UserError(f"{self._harness.pair.target_name} has a context length of {limit:,}.")
        check_memory(self._models, length, remedy="choose shorter contexts")
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
        names = ", ".join(map(short_tokens, self._lengths))
        what = f"{count} runs at {names} tokens with each of {len(self._arms)} arms"
        if not self._models:
            return f"{what}."
        short = replace(self._settings, length=1)
        runs = [complete(self._arms[-1].run(one.prompt.text, short)) for one in items[: min(2, len(self._lengths))]]
        sizes = [run.prompt_tokens or 1 for run in runs]
        rates = [run.seconds / size for run, size in zip(runs, sizes, strict=True)]
        grows = max(0.0, (rates[-1] - rates[0]) / max(1, sizes[-1] - sizes[0]))
        reading = sum(length * (rates[0] + grows * (length - sizes[0])) for length in self._lengths)
        steps = len(self._lengths) * self._settings.length * self._harness.pair.engine.step_seconds
        whole = count * len(self._arms) * (reading + steps)
        about = f"{whole:.0f} s" if whole < 120 else f"{whole / 60:.0f} minutes"
        memory = byte_size(int(GROWTH * sum(cache_bytes(model, self._lengths[-1]) for model in self._models)))
        return f"{what}: about {about}, and up to {memory} for keys and values."

    def _rows(self) -> Iterator[Row]:
        """The figures of every arm at every length."""
        for arm in self._arms:
            shortest: list[RaceResult] = []
            for length in self._lengths:
                results = (one for one in self._race.results if one.arm.name == arm.name)
                if chosen := [one for one in results if one.item.group == short_tokens(length)]:
                    causes = cause_effects(shortest, chosen) if shortest else {}
                    shortest = shortest or chosen
                    row = race_row(short_tokens(length), chosen) | {"context": length, "causes": causes}
                    yield row | _figures(chosen, row)


def _figures(results: Sequence[RaceResult], row: Row) -> dict[str, Any]:
    """The figures of an arm at one length that the row of a race does not have. Servers do not know the cost of a
    draft.
    """
    pairs, models = [(one.ours[0], one.theirs[0]) for one in results if one.theirs], [*models_of(results).values()]
    runs = [(ours.generation, theirs.generation) for ours, theirs in pairs if ours.generation and theirs.generation]
    each = zip_longest(*(one.ours[0].accepted_by_position or () for one in results), fillvalue=(0, 0))
    positions = [[*map(sum, zip(*counts, strict=True))] for counts in each]
    waits = [(one.first_seconds, one.seconds) for _, one in pairs if one.first_seconds is not None]
    known = {
        "accepted_by_position": positions,
        "draft_cost": None,
        "verify_cost": mean(1 + model.drafts * model.verify for model in models) if models else None,
        "drafts_per_round": mean(model.drafts for model in models) if models else None,
    }
    return (draft_figures(runs, row["speedup"] or 1.0) if runs else known) | {
        "prompt_tokens": [one.ours[0].prompt_tokens for one in results],
        "first_drafts": positions[0][0] / positions[0][1] if positions else row["acceptance_rate"],
        "prefill_share": sum(first for first, _ in waits) / sum(whole for _, whole in waits) if waits else None,
    }


def ladder_table(*, servers: bool) -> ResultTable:
    """The columns of a ladder. The bars of two of them are a chart by context."""
    return ResultTable(
        figure("context", "context", "{:,}"),
        figure("server" if servers else "strategy", "strategy"),
        figure("acceptance", "acceptance_rate", "{:.3f}", drop=2),
        bar("first draft", lambda row: row["first_drafts"], lambda row: f"{row['first_drafts']:.2f}", cells=6),
        replace(BY_POSITION, drop=1),
        *([] if servers else [figure("draft cost", "draft_cost", "{:.3f}")]),
        figure("round cost" if servers else "verify cost", "verify_cost", "{:.2f}"),
        bar("speed-up", lambda row: row["speedup"], claims.speedup_text, cells=9, most=3),
        ResultColumn("95 % interval", lambda row: claims.interval_text(row["interval"])),
    )


def without_baselines(rows: Sequence[Row]) -> list[Row]:
    baselines = {row.get("baseline", TARGET) for row in rows}
    return [row for row in rows if row["strategy"] not in baselines]


def conclusion(rows: Sequence[Row]) -> list[str]:
    """Up to which context each arm pays, and what changes beyond it."""
    arms = [*grouped(without_baselines(rows), "strategy").values()]
    lines = [line for arm in arms for line in (_pays(arm), *_cause(arm))]
    if arms and (arms[0][-1]["prefill_share"] or 0) >= PREFILL_SHARE:
        lines.append(PREFILL.format(" and ".join(_at(row, f"{row['prefill_share']:.0%}") for row in _ends(arms[0]))))
    lines += [_at(row, f"{row['strategy']}: {texts(row)}") + "." for row in rows if row["other_texts_at_prompts"]]
    servers = (row for row in rows if "baseline" in row)
    return [*lines, *dict.fromkeys(note for row in servers for note in claims.server_notes(row["strategy"], row))]


def _at(row: Row, what: str) -> str:
    return f"{what} at {short_tokens(row['context'])} tokens"


def _ends(arm: Sequence[Row]) -> Sequence[Row]:
    """The shortest and the longest context, which may be the same."""
    return [*arm[:1], *arm[1:][-1:]]


def _pays(arm: Sequence[Row]) -> str:
    """The contexts in which an arm is faster, and the speed-up at the last of them and at the next one."""
    if not any(row["speedup"] for row in arm):
        return f"{arm[0]['strategy']} has no speed-up. {claims.NO_BASELINE}"
    faster, shown = [row for row in arm if row["verdict"] == claims.FASTER], arm
    if not faster:
        head, shown = "is not measurably faster in any context", _ends(arm)
    elif faster == arm[: len(faster)]:
        head, shown = f"pays up to {short_tokens(faster[-1]['context'])} tokens", arm[len(faster) - 1 : len(faster) + 1]
    else:
        head = f"is faster only at {', '.join(short_tokens(row['context']) for row in faster)} tokens"
    few = {claims.TOO_FEW: "too few runs to tell"}
    speeds = (
        f"{_at(row, bounds(row) if row['speedup'] else NOTHING)}, {few.get(row['verdict'], row['verdict'])}"
        for row in shown
    )
    return f"{arm[0]['strategy']} {head}: {'; '.join(speeds)}."


# What is worse, the form of its figures, and the field of the first one; the second one is the drafts of a round.
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
    values = (_at(row, form.format(row[key] or 0, row["drafts_per_round"] or 0)) for row in (arm[0], last))
    low, high = effect["interval"]
    alone = f"this alone makes decoding {effect['factor']:.2f}x as fast (95 % interval {low:.2f} to {high:.2f})"
    return [f"{name}: beyond {short_tokens(before['context'])} tokens, {words} ({' and '.join(values)}); {alone}."]


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
