"""/ladder: up to which context length do drafts pay, and what changes beyond it?

Parts of one text, cut to each context length and with a question at the end, run by every strategy that drafts and by
the target alone, in turns. Each part has its end in common at all lengths, so lengths are compared text by text.
"""

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pydoc_data.topics import topics
from statistics import mean
from typing import Any

from utils.bounds import WholeRange
from utils.commands.experiments.context_causes import (
    ACCEPTANCE,
    DRAFTING,
    FEWER,
    VERIFYING,
    RoundModel,
    cause_effects,
    main_cause,
)
from utils.commands.experiments.races import (
    ArmRace,
    RaceItem,
    RaceResult,
    race_row,
    server_arms,
    texts,
    then_findings,
    with_bounds,
)
from utils.commands.experiments.speed_model import BY_POSITION, draft_figures
from utils.commands.shared.registry import Command, CommandContext, Outcome
from utils.commands.shared.result_tables import (
    NOTHING,
    ResultColumn,
    ResultTable,
    Row,
    figure,
    figures_of,
    grouped,
    marked,
)
from utils.comparison.arms import Arm, request_maker
from utils.comparison.harness import Harness, comparable_servers
from utils.comparison.records import Finding, Note, Progress, Report, ReportEvent
from utils.comparison.speed_claims import (
    BASELINE,
    FASTER,
    MIN_VALUES,
    TOO_FEW,
    baseline_name,
    interval_text,
    server_notes,
    speedup_text,
)
from utils.comparison.warm_up import with_costs
from utils.config.settings import Settings
from utils.decode.model_info import GROWTH, cache_bytes, check_memory, context_length
from utils.errors import UserError
from utils.files import read_text
from utils.metrics.costs import Costs
from utils.models.memory import free_bytes
from utils.models.sources import parse_path
from utils.prompts.prompt_files import Prompt
from utils.servers.connection import Connection
from utils.text import byte_size, count_of, encodable

DEFAULT = (512, 2048, 8192)
K = 1024
LENGTH = WholeRange(16, 1 << 24)
TEXTS = MIN_VALUES  # texts of each length; of fewer texts each is repeated
QUESTION = "\n\nSummarize the text above in five sentences."
FIRST_GUESS = 4  # characters per token
FITS, FILLS, TRIES = 0.985, 0.95, 12  # a text is cut to this share of the tokens, and fills at least that share
SPARE = 1.25  # parts of a text are this much longer than the longest cut, because others may need more characters
PREFILL_SHARE = 0.5  # from this share of the time on, reading the prompt is mentioned
NO_DRAFTS = "a strategy that drafts is needed: turn one on, for example with /speculative on."
FULL = "{} and the question leave no room for a text: {} is the maximum number of new tokens (/length)."
SHORT = "The text is too short for a context of {}."
ONE_TEXT = "All lengths have the same text, so the intervals hold for repeats of it. A longer file gives {} texts."
PREFILL = "Of the time of {}, reading the prompt takes {}, and drafts do not shorten it."
DRAFTER_CONTEXT = "The drafter has a context length of {:,}, so it drafts nothing in longer contexts."


def length_name(length: int) -> str:
    return f"{length // K}k" if length % K == 0 else str(length)


def _lengths(words: Sequence[str]) -> tuple[int, ...]:
    lengths = set()
    for word in words:
        number, k = re.fullmatch(r"(.*?)(k?)", word.lower().removesuffix(",")).groups()  # type: ignore[union-attr]
        try:
            lengths.add(LENGTH.check(WholeRange(1).parse(number) * (K if k else 1)))
        except UserError as error:
            raise UserError(f"'{word}' is not a context length, such as 512 or 2k: {error}") from error
    return tuple(sorted(lengths))


def _ladder(argument: str, context: CommandContext) -> Outcome:
    match = re.fullmatch(r"((?:\d\S*\s*)*)(.*)", argument, re.DOTALL)
    assert match is not None  # the pattern matches every argument
    lengths, file = _lengths(match[1].split()), match[2].strip()
    text = read_text(parse_path(file), "The text file") if file else "\n\n".join(topics.values())
    harness, settings, title = context.harness, context.settings, f"/ladder {argument}".strip()
    ladders = []
    if not harness.state.servers or harness.runs_locally(settings):
        drafting = [one for one in harness.enabled(settings) if one.drafts]
        if not drafting:
            raise UserError(NO_DRAFTS)
        arms = [replace(harness.arm(one), timed=True) for one in drafting]
        ladders.append(_Ladder(harness, settings, [*arms, harness.arm(harness.baseline)], None))
    if servers := comparable_servers(harness):
        names = {one.address.baseline for one in servers}
        both = [one for one in harness.state.servers if one in servers or one.address.name in names]
        ladders.append(_Ladder(harness, settings, server_arms(harness, both), both[0]))
    if not ladders:
        raise UserError("a server with a baseline is needed: /server add NAME URL baseline=NAME.")
    return [ladder.report(title, text, lengths) for ladder in ladders]


class _Ladder:
    """One ladder, of local strategies or of servers. `server` counts the tokens of prompts if no model is loaded."""

    def __init__(self, harness: Harness, settings: Settings, arms: Sequence[Arm], server: Connection | None) -> None:
        self._harness, self._settings, self._arms, self._server = harness, settings, arms, server
        self._race = ArmRace(harness, ())
        self._lengths: dict[str, int] = {}

    def report(self, title: str, text: str, lengths: Sequence[int]) -> Report:
        servers = self._server is not None
        table = ladder_table(servers=servers)
        events = self._events(encodable(text), lengths)
        return table.report(
            *("server_ladder" if servers else "ladder", title, self._settings),
            then_findings(events, lambda: map(_finding_of(table), self._rows())),
            conclude=lambda findings: conclusion(figures_of(findings)),
            title=title + ", on servers" * servers,
        )

    def _events(self, text: str, lengths: Sequence[int]) -> Iterator[ReportEvent]:
        if self._is_local:
            yield Progress("measuring the costs of drafters ...")
            self._settings = with_costs(self._harness, self._settings)
        items = yield from self._items(text, lengths or self._defaults())
        repeats = -(-TEXTS // len({item.number for item in items}))
        if repeats >= TEXTS:
            yield Note(ONE_TEXT.format(TEXTS))
        self._race = ArmRace(self._harness, items, repeats, weight=lambda item: self._lengths[item.group])
        yield Note(self._estimate(items, repeats))
        drafter = self._harness.loaded.drafter if self._is_local and self._harness.loaded else None
        bound = None if drafter is None else context_length(drafter)
        if bound is not None and bound < max(self._lengths.values()):
            yield Note(DRAFTER_CONTEXT.format(bound))
        yield from self._race.events()

    @property
    def _is_local(self) -> bool:
        return self._server is None

    @property
    def _limit(self) -> int | None:
        return context_length(self._harness.pair.target) if self._is_local else None

    def _defaults(self) -> tuple[int, ...]:
        limit = self._limit
        fitting = tuple(length for length in DEFAULT if limit is None or length <= limit)
        return fitting if fitting or limit is None else (limit // 2, limit)

    def _items(self, text: str, lengths: Sequence[int]) -> Generator[Note, None, list[RaceItem]]:
        """The prompts, text after text, each from the shortest to the longest.

        Lengths that do not fit are left out with a note. Raises UserError if none is left.
        """
        kept, reasons, size = [], [], 0
        for length in lengths:
            try:
                self._check(length)
                size = len(self._cut(text, length))
                kept.append(length)
            except UserError as error:
                reasons.append(f"{length_name(length)} is left out. {error}")
        if not kept:
            raise UserError(reasons[0])
        yield from map(Note, reasons)
        self._lengths = {length_name(length): length for length in kept}
        count = max(1, min(TEXTS, int(len(text) / (SPARE * size))))
        ends = [len(text) * (place + 1) // count for place in range(count)]
        return [
            RaceItem(number, Prompt(self._cut(text[:end], length)), length_name(length), self._settings, self._arms)
            for number, end in enumerate(ends, start=1)
            for length in kept
        ]

    def _check(self, length: int) -> None:
        """Raise UserError if the models do not have such a context, or the memory for it."""
        if not self._is_local:
            return
        limit, pair = self._limit, self._harness.pair
        if limit is not None and length > limit:
            raise UserError(f"{pair.target_name} has a context length of {limit:,}.")
        check_memory(self._models, length, remedy="use shorter lengths", free=free_bytes(str(pair.device)))

    @property
    def _models(self) -> list[Any]:
        models = self._harness.pair.target, self._harness.pair.drafter
        return [model for model in models if hasattr(model, "config")]

    def _cut(self, text: str, length: int) -> str:
        """The end of the text with the question, as long as the prompt of a context of this many tokens may be."""
        most = length - self._settings.length
        if most <= self._tokens(QUESTION) * 2:
            raise UserError(FULL.format(count_of(self._settings.length, "new token"), self._settings.length))
        aim, size = int(FITS * most), FIRST_GUESS * most
        for _ in range(TRIES):
            prompt = text[-size:] + QUESTION
            tokens = self._tokens(prompt)
            if FILLS * most <= tokens <= most:
                return prompt
            if tokens < aim and size >= len(text):
                break
            size = max(1, min(len(text), size) + int((aim - tokens) * len(prompt) / tokens))
        raise UserError(SHORT.format(count_of(length, "token")))

    def _tokens(self, text: str) -> int:
        """The tokens of a prompt. For a server that does not count them, an estimate."""
        if self._harness.has_pair:
            return len(self._harness.prompt_ids(text, self._settings))
        assert self._server is not None
        try:
            kind, client = self._server.kind, self._server.client
            prompt = request_maker(None, text, self._settings)(kind, client).prompt
            ids = None if isinstance(prompt, tuple) else kind.tokens(client, prompt, special=True)
        except UserError:  # reported when the prompt is run
            ids = None
        return len(text) // FIRST_GUESS if ids is None else len(ids)

    def _estimate(self, items: Sequence[RaceItem], repeats: int) -> str:
        texts, names = len(items) // len(self._lengths), [*self._lengths]
        what = f"{count_of(texts, 'text')} at {', '.join(names)} tokens, {len(self._arms)} strategies"
        what += f", {repeats} times each" if repeats > 1 else ""
        if not self._is_local:
            return f"{what.replace('strategies', 'servers')}: the time on servers is not estimated."
        need = byte_size(int(GROWTH * sum(cache_bytes(model, max(self._lengths.values())) for model in self._models)))
        costs, step = self._settings.costs or Costs(), self._harness.pair.engine.step_seconds
        steps = sum(_decode_steps(costs, length, self._settings.length) for length in self._lengths.values())
        seconds = step * steps * texts * repeats * len(self._arms)
        about = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
        return f"{what}: about {about}, and up to {need} for keys and values."

    def _rows(self) -> Iterator[dict[str, Any]]:
        """The figures of every arm at every length."""
        groups: dict[tuple[str, str], list[RaceResult]] = {}
        for one in self._race.results:
            groups.setdefault((one.arm.name, one.item.group), []).append(one)
        names = dict.fromkeys(name for name, _ in groups)
        for arm in names:
            shortest: list[RaceResult] = []
            for group, length in self._lengths.items():
                if results := groups.get((arm, group)):
                    row = race_row(group, results) | {"context": length} | _figures(results)
                    yield row | {"causes": cause_effects(shortest, results) if shortest else {}}
                    shortest = shortest or results


def _decode_steps(costs: Costs, length: int, new: int) -> float:
    """A cautious estimate of the time of one run, in decode steps of a short context."""
    longer, growth = costs.longer, 0.0
    if longer is not None:
        growth = (longer.step - 1) * max(0, length - costs.length) / (longer.length - costs.length)
    return costs.prefill_cost(length) * (1 + growth / 2) + new * (1 + growth)


def _figures(results: Sequence[RaceResult]) -> dict[str, Any]:
    """The figures of an arm at one length that a race does not have. Only local runs have times of rounds."""
    pairs = [(one.ours[0], one.theirs[0]) for one in results if one.theirs]
    known = [positions for one in results if (positions := one.ours[0].accepted_by_position)]
    summed = [[*map(sum, zip(*column, strict=True))] for column in zip_longest(*known, fillvalue=(0, 0))]
    models = [model for ours, theirs in pairs if (model := RoundModel.of(ours, theirs)) is not None]
    passes = [cost for model in models if (cost := model.verify_cost) is not None]
    waits = [(one.first_seconds, one.seconds) for _, one in pairs if one.first_seconds is not None]
    prompts = [one.ours[0].prompt_tokens for one in results]
    runs = [(ours.generation, theirs.generation) for ours, theirs in pairs if ours.generation and theirs.generation]
    costs = draft_figures(runs, 1.0) if runs and models else {}
    return {
        "prompt_tokens": [tokens for tokens in prompts if tokens is not None],
        "accepted_by_position": summed,
        "prefill_share": sum(first for first, _ in waits) / sum(whole for _, whole in waits) if waits else None,
        "verify_cost": mean(passes) if passes else None,
        "drafts_per_pass": mean([model.width for model in models if model.width]) if passes else None,
        "drafts_per_round": mean([model.drafts for model in models]) if models else None,
        **{name: costs.get(name) for name in ("draft_cost", "declined_rounds")},
    }


BAR, WIDEST = 5, 20  # characters for a speed-up of 1, and of the longest bar


def _bar(row: Row) -> str:
    """The speed-up, with a line at 1."""
    length = 0 if row["speedup"] is None else min(WIDEST, round(BAR * row["speedup"]))
    return f"{'=' * min(length, BAR):{BAR}}|{'=' * (length - BAR)}" if length else ""


def ladder_table(*, servers: bool) -> ResultTable:
    """The columns of a ladder; of servers only the time of a whole round is known."""
    costs = (figure("draft cost", "draft_cost", "{:.3f}"), figure("verify cost", "verify_cost", "{:.2f}"))
    return ResultTable(
        figure("context", "context", "{:,}"),
        figure("server" if servers else "strategy", "strategy"),
        figure("acceptance", "acceptance_rate", "{:.3f}"),
        replace(BY_POSITION, drop=2),
        *((figure("round cost", "verify_cost", "{:.2f}"),) if servers else costs),
        marked(ResultColumn("speed-up", speedup_text)),
        ResultColumn("95 % interval", lambda row: interval_text(row["interval"])),
        ResultColumn("1x =====|", _bar, 1),
    )


def _finding_of(table: ResultTable) -> Callable[[dict[str, Any]], Finding]:
    # The rows of baselines are recorded and not shown.
    return lambda row: Finding((), row) if _is_baseline(row) else table.finding(row)


def _is_baseline(row: Row) -> bool:
    return row["verdict"] == BASELINE or row.get("baseline", "") is None


def conclusion(rows: Sequence[Row]) -> list[str]:
    """Up to which context each arm pays, and what changes beyond it. `rows` are the figures of the findings."""
    arms = [arm for arm in grouped(rows, "strategy").values() if not _is_baseline(arm[0])]
    lines = [line for arm in arms for line in (_pays(arm), *_cause(arm), *_other_texts(arm))]
    if arms and (arms[0][-1]["prefill_share"] or 0) >= PREFILL_SHARE:
        shares = " and ".join(f"{row['prefill_share']:.0%} at {_name(row)}" for row in _ends(arms[0]))
        lines.append(PREFILL.format(baseline_name(arms[0][0]), shares))
    notes = [note for row in rows if "baseline" in row for note in server_notes(row["strategy"], row)]
    return [*lines, *dict.fromkeys(notes)]


def _name(row: Row) -> str:
    return f"{length_name(row['context'])} tokens"


def _ends(arm: Sequence[Row]) -> Sequence[Row]:
    """The shortest and the longest context, which may be the same."""
    return [*arm[:1], *arm[1:][-1:]]


def _pays(arm: Sequence[Row]) -> str:
    """The contexts in which an arm is faster, and the speed-up at the last of them and at the next one."""
    faster = [row for row in arm if row["verdict"] == FASTER]
    if not faster:
        head, shown = "is not measurably faster in any context", _ends(arm)
    elif faster != arm[: len(faster)]:
        head, shown = f"is faster at {' and '.join(map(_name, faster))}", arm
    else:
        head = f"pays up to {_name(faster[-1])}" + ", the longest context" * (faster == arm)
        shown = arm[len(faster) - 1 : len(faster) + 1]
    return f"{arm[0]['strategy']} {head}: {'; '.join(map(_speedup, shown))}."


def _speedup(row: Row) -> str:
    if row["speedup"] is None:
        return f"at {_name(row)} nothing to compare with"
    verdict = "too few runs to tell" if row["verdict"] == TOO_FEW else row["verdict"]
    return f"{with_bounds(row)} at {_name(row)}, {verdict}"


def _first_drafts(row: Row) -> str:
    """The acceptance of the first draft of a round, or of all drafts where positions are not known."""
    accepted, tried = next(iter(row["accepted_by_position"]), (row["accepted"], row["drafted"]))
    return f"{accepted / tried:.2f}" if tried else NOTHING


def _round(row: Row) -> str:
    return f"{row['verify_cost'] or 1:.2f} decode steps for {row['drafts_per_pass'] or 0:.1f} drafts"


FALLS: dict[str, tuple[str, Callable[[Row], str]]] = {
    ACCEPTANCE: ("acceptance of the first draft of a round falls", _first_drafts),
    VERIFYING: ("verify passes become dearer", _round),
    DRAFTING: (
        "drafting becomes dearer, reading the prompt included",
        lambda row: f"{row['draft_cost'] or 0:.2f} decode steps a draft",
    ),
    FEWER: ("fewer tokens are drafted", lambda row: f"{row['drafts_per_round'] or 0:.1f} a round"),
}
OF_SERVERS = "rounds become dearer, drafting and verifying together"


def _cause(arm: Sequence[Row]) -> list[str]:
    first, last = arm[0], arm[-1]
    if not last["causes"]:
        return []
    if (found := main_cause(arm)) is None:
        between = f"between {_name(first)} and {_name(last)}"
        return [f"{first['strategy']}: {between} neither acceptance nor a cost changes distinguishably for the worse."]
    cause, before = found
    (words, shown), effect = FALLS[cause], last["causes"][cause]
    words = OF_SERVERS if cause == VERIFYING and "baseline" in last else words
    low, high = effect["interval"]
    return [
        f"{first['strategy']}: beyond {_name(before)}, {words} ({shown(first)} at {_name(first)}, {shown(last)} at "
        f"{_name(last)}), which alone makes decoding {effect['factor']:.2f}x as fast (95 % interval {low:.2f} to "
        f"{high:.2f})."
    ]


def _other_texts(arm: Sequence[Row]) -> list[str]:
    return [f"{row['strategy']} at {_name(row)}: {texts(row)}." for row in arm if row["other_texts_at_prompts"]]


LADDER = Command(
    "ladder",
    "[N ...] [FILE]",
    "up to which context do drafts pay?",
    _ladder,
    group="does it help?",
    about="Run texts cut to several context lengths, with a question at the end, by every strategy that drafts and by "
    "the target alone, in turns: acceptance, costs and speed-up at each length, and what makes drafts pay less in a "
    "long context. N are tokens of prompt and answer together (512 2k 8k, as far as the target's context allows; 2k is "
    "2,048). The text is that of FILE, or the reference of Python. It begins with an estimate of time and memory.",
    example=("> /ladder 512 2k", "speculative pays up to 2k tokens, the longest context: 1.31x ..."),
    files=("",),
)
