"""/server doctor: why does a server accept fewer drafts than its drafter should give?

The server answers prompts greedily, with sampling, after a long context and in its own template. The same target and
drafter are led through its texts here, so that both see the same tokens, and acceptance by position is compared.
Without models, the records of another machine are compared instead. The causes are those of /pair doctor.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from typing import Any

from utils.bounds import WholeRange
from utils.commands.experiments.races import with_bounds
from utils.commands.experiments.speed_model import expected_drafts, read_text
from utils.commands.shared.registry import CommandContext, Outcome, path_in
from utils.commands.shared.result_tables import NOTHING, ResultColumn, ResultTable, Row, figure
from utils.commands.verdicts.measurement import BUILT_IN, plan_prompts
from utils.commands.verdicts.selection import speculation
from utils.comparison.arms import request_maker
from utils.comparison.harness import Harness
from utils.comparison.records import Countdown, RecordedRun, read_records
from utils.config.settings import Settings, as_json
from utils.decode.model_info import context_length, vocabulary_size
from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.metrics.draft_causes import (
    ALARM,
    FEWEST,
    GREEDY,
    LONG,
    ODD,
    SAMPLED,
    TEMPLATE,
    Contrast,
    Counts,
    DraftCause,
    Probe,
    agrees,
    contrasts,
    diagnose,
    is_slower,
    rate,
)
from utils.metrics.intervals import Interval, speedup_interval
from utils.models.feature_drafter import FeatureDrafter
from utils.pairs.doctor import other_readings
from utils.prompts.prompt_files import read_prompts, spaced
from utils.servers.address import parse_numbers, parse_words, without_key
from utils.servers.client import ServerClient
from utils.servers.connection import Connection, RequestFor
from utils.servers.kinds.completion import Chat, ServerAcceptance, ServerCompletion, ServerRequest
from utils.servers.kinds.server_kind import SHORT_DRAFTS, ServerError, ServerKind, setup_facts
from utils.servers.processes.flags import settings_elsewhere
from utils.servers.processes.programs import DEFAULT_DRAFT, NGRAM
from utils.text import count_of, split_words

OPTIONS = {
    "prompts": (FEWEST, WholeRange(2, 1000)),
    "length": (64, WholeRange(8, 100_000)),
    "long": (1024, WholeRange(0, 10_000_000)),
}
ATTEMPTS = 3  # requests of a prompt until its figures belong to this request alone
SAME_TARGET = 0.8  # the share of its greedy text that a target of the same weights predicts, whatever its number format
RULE = "rejection"  # for drafts drawn from the drafter's distribution; every program that samples drafts has it
LEAST_READING = 0.05  # the first acceptance that a reading can explain: unrelated drafts are accepted at less, too
FILLER = "Background, which may be irrelevant:\n{}\n\n{}"
EXAMPLE = "/server doctor spec"
NO_HALF = (
    "there is nothing to compare with: load the server's target and drafter (/load target=... drafter=...), or name "
    "records of another machine (expect=FILE)."
)
NGRAMS = "{} drafts with n-grams of the text, and no model: it has no drafter that could be broken."
TOKENIZERS = (
    "the loaded drafter has its own tokenizer, and such drafts cannot be replayed; expect=FILE can compare them."
)
UNKNOWN = (
    "{0} reports no drafts, so its acceptance is unknown: vLLM needs /metrics or --per-request-spec-decode-metrics, "
    "llama.cpp sends its timings, and other servers say nothing about drafts."
)
CROWDED = (
    "the drafts of {0} could be counted for {1} of {2} prompts only, because other clients used it meanwhile ({3}): "
    "repeat it on an idle server."
)
OTHER_TARGET = (
    "the loaded target predicts {:.0%} of the text of {}: that server has another model. Load the server's own target."
)
OTHER_IDS = "{} sends token ids that the loaded target does not have: load the server's own target."
NO_DRAFTS = "{} makes no drafts: it was started without speculative decoding, or has turned it off."
FEW_ROUNDS = (
    "{} made no drafts in {:.0%} of the decode steps of {} texts: the context of its drafter may be too short, or "
    "a threshold holds drafts back."
)
UNREAD = (
    "{}: {} of {} texts are left out, because {} sends no token ids, and the local tokenizer makes others of its text."
)
ALL_UNREAD = (
    "{} sends no token ids, and the local tokenizer makes others of its texts, so they cannot be replayed here."
)
EARLY = (
    "{} often ends its drafts before {} tokens, as with a threshold (--spec-draft-p-min of llama.cpp), and does not "
    "count how many reached a position: all positions are compared as draft 1."
)
NONE_ON = "{} drafts on greedy texts, and makes no drafts on {} texts."
OFF_ON = {LONG: DraftCause.LONG, TEMPLATE: DraftCause.TEMPLATE}
OTHER_SETTINGS = "expect={} was measured with another {}: type /{} {} first."
NO_POSITIONS = "{} has no run with drafts of a single turn: --json FILE records them (accepted_by_position)."
CHECKED = (
    "{} over {}. The signs of whole prompts were flipped and the largest loss counted, so that a sound "
    "drafter gets a cause with a probability of at most {:.0%}. Losses below 0.05 are not counted."
)
PLACE = {GREEDY: "", SAMPLED: " when sampling", LONG: " in long contexts", TEMPLATE: " in the server's template"}
SENTENCES = {  # with `place`, the figures of a Contrast, and `later`, the 1-based position
    DraftCause.FIRST: "The first draft is accepted at {measured:.2f}{place}, expected {expected:.2f}: the drafter "
    "reads other hidden states or layers than it was trained on, its token ids are mapped wrongly, or it fits "
    "another one.",
    DraftCause.LATER: "Drafts before position {later} are accepted as expected, and at position {later} {measured:.2f} "
    "instead of {expected:.2f}: {kind}.",
    DraftCause.LONG: "Sound in short contexts, but in long ones draft {later} is accepted at {measured:.2f}, expected "
    "{expected:.2f}: the drafter's positions (RoPE scaling) or its sliding window are wrong, or its context too short.",
    DraftCause.GREEDY_DRAFTS: "Sound when greedy, but when sampling draft {later} is accepted at {measured:.2f}, and "
    "drafts drawn from the drafter's distribution would be at {expected:.2f}: as its likeliest tokens would be, so the "
    "server drafts greedily at a temperature above 0.",
    DraftCause.SAMPLED: "Sound when greedy, but when sampling draft {later} is accepted at {measured:.2f}, expected "
    "{expected:.2f}, which greedy drafts do not explain: drafts and text are drawn from other distributions.",
    DraftCause.TEMPLATE: "Sound with the prompts of this program, but in the other chat template (or its thinking) "
    "draft {later} is accepted at {measured:.2f}, expected {expected:.2f}.",
    DraftCause.SOUND: "Sound: drafts are accepted as expected at every position (the first at {measured:.2f}, expected "
    "{expected:.2f}).",
}
CLIFF, DECLINE = "a cliff, as of a block or a window that is too small", "as if a wrong state were fed back"
READING = "Explained by {}: this reading gives {:.2f} on the same texts."
UNCLEAR = "Not distinguishable: {} prompts cannot exclude that half of the acceptance is lost{}. About {} would do."
SLOW = (
    "Sound, and slow for other reasons: {} the speed of {} with {:.2f} tokens per forward pass, so a round costs "
    "{:.1f} decode steps. Fewer drafts a round, a cheaper drafter or fewer requests at once are the remedies."
)
SLOW_CHECKED = "A server that is as fast as {} would be called slow with a probability of at most {:.0%}."


def _interval(row: Row) -> str:
    return NOTHING if row["measured"] is None else f"{row['loss']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})"


TABLE = ResultTable(
    figure("texts", "texts"),
    ResultColumn("draft", lambda row: str(row["position"] + 1)),
    figure("measured", "measured", "{:.3f}"),
    figure("expected", "expected", "{:.3f}"),
    ResultColumn("loss, 95 % interval", _interval),
    figure("chance of that", "p", "{:.2g}"),
)


def row_of(contrast: Contrast) -> dict[str, Any]:
    names = ("position", "prompts", "measured", "expected", "loss", "p")
    low, high = max(-1.0, contrast.low), min(1.0, contrast.high)
    bounds = {"low": low, "high": high} if contrast.measured is not None else {"low": None, "high": None}
    return {"texts": contrast.probe, **{name: getattr(contrast, name) for name in names}, **bounds}


def sentence(cause: DraftCause, contrast: Contrast) -> str:
    measured = contrast.measured or 0.0
    kind = CLIFF if measured < ODD * contrast.expected else DECLINE
    later, place = contrast.position + 1, PLACE.get(contrast.probe, "")
    return SENTENCES[cause].format(measured=measured, expected=contrast.expected, later=later, place=place, kind=kind)


def checked(found: Sequence[Contrast]) -> str:
    prompts = count_of(max(one.prompts for one in found), "prompt")
    return CHECKED.format(count_of(len(found), "comparison"), prompts, ALARM)


def unclear(contrast: Contrast | None, prompts: int) -> str:
    where = "" if contrast is None else f" at draft {contrast.position + 1} of {contrast.probe} texts"
    return UNCLEAR.format(prompts, where, max(FEWEST, 2 * prompts) if contrast is None else contrast.needed)


def long_prompts(prompts: Sequence[str], tokens: int, count: Callable[[str], int]) -> list[str]:
    """Each prompt after so many tokens of other prompts. `count` counts the tokens of a text."""
    made = []
    for number, prompt in enumerate(prompts):
        others = " ".join([*prompts[number + 1 :], *prompts[:number]]) or prompt
        size = max(1, count(others))
        filler = " ".join([others] * ceil(tokens / size))
        made.append(FILLER.format(filler[: len(filler) * tokens // (size * ceil(tokens / size))], prompt))
    return made


@dataclass(frozen=True, slots=True)
class ServerText:
    """A server's answer: the ids of its prompt and of its text, and what happened to its drafts."""

    prompt: list[int]
    tokens: list[int]
    drafts: ServerAcceptance


@dataclass(slots=True)
class ServerExamination:
    """One examination of a server, and what it has found so far.

    `recorded` are the runs of another machine by prompt; without them the loaded pair is compared. `texts` are by the
    kind of texts and the place of the prompt. Without `by_position`, all positions are compared as the first draft.
    `off_on` is the kind of texts on which no drafts were made.
    """

    harness: Harness
    settings: Settings
    connection: Connection
    baseline: Connection | None
    prompts: Sequence[str]
    length: int
    long: int
    recorded: Mapping[str, RecordedRun]
    texts: dict[str, dict[int, ServerText]] = field(default_factory=dict)
    draft: int = 1
    by_position: bool = True
    facts: dict[str, str] = field(default_factory=dict)
    speedups: list[float] = field(default_factory=list)
    forwards: list[float] = field(default_factory=list)
    off_on: str = ""
    probes: list[Probe] = field(default_factory=list)
    found: list[Contrast] = field(default_factory=list)
    cause: DraftCause = DraftCause.UNCLEAR
    shown: Contrast | None = None
    reading: str = ""

    @property
    def name(self) -> str:
        return self.connection.address.name

    @property
    def temperature(self) -> float:
        """That of sampled texts."""
        return self.settings.processor.effective_temperature or 1.0

    def rows(self) -> Iterator[Row]:
        self.facts = self._setup()
        if self.facts:
            shown = ", ".join(f"{name} {value}" for name, value in self.facts.items())
            self.harness.note(f"{self.name} runs: {shown}.")
        for kind, prompts in self._kinds():
            try:
                self._ask_all(kind, prompts)
            except ServerError as error:
                if kind in (LONG, TEMPLATE) and error.status is not None:
                    self.harness.note(f"{kind}: left out, because the server refuses it. {error}")
                    self.texts.pop(kind, None)
                    continue
                raise
            if self.off_on:
                self.draft = _drafts_a_round(self._known) if self._known else DEFAULT_DRAFT
                self.cause = OFF_ON.get(kind, DraftCause.OFF)
                figures = {"cause": self.cause, "facts": self.facts}
                yield {"texts": kind, "position": 0, "measured": None, "expected": None} | figures
                return
        if not self._known:
            raise UserError(ALL_UNREAD.format(self.name))
        self._compare()
        yield from (row_of(one) | {"cause": self.cause, "facts": self.facts} for one in self.found)

    def _setup(self) -> dict[str, str]:
        """What the server says about its drafts, and how it was started if this session did that."""
        facts = self.connection.kind.setup(self.connection.client)
        if (local := self.connection.local) is not None:
            if local.launch.drafter == NGRAM:
                raise UserError(NGRAMS.format(self.name))
            facts = setup_facts(_arguments(local.command)) | facts
            facts.setdefault("method", "none" if not local.launch.drafts else local.launch.method or "draft model")
        return {name: without_key(value, self.connection.address.key) for name, value in facts.items()}

    def _kinds(self) -> Iterator[tuple[str, Sequence[str]]]:
        """The kinds of texts to ask for, the simplest first, and their prompts."""
        if self.recorded:
            yield (GREEDY if self.settings.processor.effective_temperature == 0 else SAMPLED), self.prompts
            return
        yield GREEDY, self.prompts
        pair = self.harness.pair
        yield SAMPLED, self.prompts
        bound = context_length(pair.target)
        tokens = self.long if bound is None else min(self.long, bound // 2)
        if tokens:
            yield LONG, long_prompts(self.prompts, tokens, lambda text: len(pair.tokenizer(text)["input_ids"]))
        kind, client = self.connection.kind, self.connection.client
        chat = self._request(TEMPLATE, self.prompts[0])(kind, client).prompt
        theirs = kind.tokens(client, chat, special=True) if isinstance(chat, Chat) else None
        if theirs is not None and theirs != tuple(self.harness.prompt_ids(self.prompts[0], self.settings)):
            yield TEMPLATE, self.prompts

    def _ask_all(self, kind: str, prompts: Sequence[str]) -> None:
        """The server's answers of a kind. Raises UserError if its drafts are unknown or those of others."""
        found, countdown, why = self.texts.setdefault(kind, {}), Countdown(self.harness.progress), ""
        rounds = steps = 0  # verify passes with drafts, and all passes after the prefill
        unread = 0
        for place, prompt in enumerate(prompts):
            countdown.at(place / len(prompts), f"{kind} texts: {place} of {len(prompts)}")
            for _ in range(ATTEMPTS):
                answer = self._ask(self.connection, kind, prompt)
                drafts = answer.acceptance
                if drafts is None or drafts.valid:
                    break
                why = drafts.note
            if drafts is None or not drafts.drafted:
                # A server that counts its tokens or sends figures would have reported drafts.
                if not answer.figures and answer.other_tokens is None:
                    raise UserError(UNKNOWN.format(self.name))
                steps += max(0, (answer.token_count or 1) - 1)
            elif drafts.valid:
                if (text := self._text(answer, prompt, drafts)) is not None:
                    found[place] = text
                unread += text is None
                passes = (drafts.forwards or 1) - 1
                steps += passes
                rounds += passes if drafts.rounds is None else drafts.rounds
                if kind == GREEDY:
                    self._note_speed(answer, prompt, drafts)
        self.off_on = "" if found or why or unread else kind
        if unread:
            self.harness.note(UNREAD.format(kind, unread, len(prompts), self.name))
            if not found:
                del self.texts[kind]
        if len(found) < min(FEWEST, len(prompts)) and why:
            raise UserError(CROWDED.format(self.name, len(found), len(prompts), why))
        if found and 2 * rounds < steps:
            self.harness.note(FEW_ROUNDS.format(self.name, 1 - rounds / steps, kind))

    def _request(self, kind: str, prompt: str) -> RequestFor:
        """The request for a prompt, which the server puts into its own template for texts of the kind TEMPLATE."""
        pair, settings = self.harness.loaded, self.settings
        if kind == TEMPLATE:
            pair, settings = None, replace(settings, chat=True, chat_template=True)
        make = request_maker(pair, prompt, settings)

        def request(own: ServerKind, client: ServerClient) -> ServerRequest:
            made = replace(make(own, client), max_tokens=self.length)
            if self.recorded:
                return made
            return replace(made, temperature=self.temperature if kind == SAMPLED else 0.0, top_k=0, top_p=1.0)

        return request

    def _ask(self, connection: Connection, kind: str, prompt: str) -> ServerCompletion:
        answer = connection.ask(self._request(kind, prompt))
        if answer.finish is FinishReason.INTERRUPTED:
            raise KeyboardInterrupt
        return answer

    def _text(self, answer: ServerCompletion, prompt: str, drafts: ServerAcceptance) -> ServerText | None:
        """The answer with its ids. Where the server gives none, the local tokenizer makes them; None if their number
        shows that they are others.
        """
        if self.recorded:
            return ServerText([], [], drafts)
        pair, sent, tokens = self.harness.pair, answer.request and answer.request.prompt, answer.token_ids
        if isinstance(sent, str | Chat):
            sent = self.connection.kind.tokens(self.connection.client, sent, special=True)
        prompt_ids = list(sent or self.harness.prompt_ids(prompt, self.settings))
        if tokens is None:
            tokens = tuple(pair.tokenizer(answer.text, add_special_tokens=False)["input_ids"])
            ends = answer.finish is FinishReason.STOP  # with a token that has no text
            if answer.token_count not in (None, len(tokens), len(tokens) + ends):
                return None
        if max((*prompt_ids, *tokens), default=0) >= vocabulary_size(pair.target):
            raise UserError(OTHER_IDS.format(self.name))
        return ServerText(prompt_ids, list(tokens), drafts)

    def _note_speed(self, answer: ServerCompletion, prompt: str, drafts: ServerAcceptance) -> None:
        """The speed of a greedy answer beside that of the baseline, which answers the same prompt."""
        speed, tokens = answer.decode_tokens_per_second, answer.token_count
        if self.baseline is None or not (speed and drafts.forwards and tokens):
            return
        if other := self._ask(self.baseline, GREEDY, prompt).decode_tokens_per_second:
            self.speedups.append(speed / other)
            self.forwards.append(tokens / drafts.forwards)

    @property
    def _known(self) -> list[ServerText]:
        return [text for texts in self.texts.values() for text in texts.values()]

    def _compare(self) -> None:
        """Replay the texts, and find the cause."""
        self.draft = _drafts_a_round(self._known)
        self.by_position = all(text.drafts.by_position for text in self._known)
        if not self.by_position:
            self.harness.note(f"{self.name} does not count drafts by position: all positions are compared as draft 1.")
        elif _end_early(self._known, self.draft):
            self.by_position = False
            self.harness.note(EARLY.format(self.name, self.draft))
        for kind, texts in self.texts.items():
            expected, greedy, countdown = list[Counts](), list[Counts](), Countdown(self.harness.progress)
            for done, (place, text) in enumerate(texts.items()):
                countdown.at(done / len(texts), f"replaying {kind} texts: {done} of {len(texts)}")
                drawn, likeliest = self._recorded(place) if self.recorded else self._replayed(kind, text)
                expected.append(drawn)
                greedy.append(likeliest)
            measured = [
                drafts.by_position if self.by_position else ((drafts.accepted, drafts.drafted),)
                for drafts in (text.drafts for text in texts.values())
            ]
            self.probes.append(Probe(kind, measured, expected, greedy))
        self.found = contrasts(self.probes)
        self.cause, self.shown = diagnose(self.probes, self.found)
        if self.cause in (DraftCause.FIRST, DraftCause.LATER) and not self.recorded:
            self._try_readings()
        elif self.cause is DraftCause.SOUND and is_slower(self.speedups):
            self.cause = DraftCause.SLOW

    @property
    def speed(self) -> Interval:
        return speedup_interval([[ratio] for ratio in self.speedups])

    def _replayed(self, kind: str, text: ServerText) -> tuple[Counts, Counts]:
        """The expected counts along a text. Raises UserError if the loaded target would not have generated it."""
        if len(text.tokens) < 2:
            return (), ()
        job = self.harness.job(text.prompt, self.settings)
        read = read_text(job, text.tokens, job.pair.feature_layers)
        if kind == GREEDY:
            own = sum(top == token for top, token in zip(read.logits.argmax(-1).tolist(), text.tokens, strict=True))
            if (share := own / len(text.tokens)) < SAME_TARGET:
                raise UserError(OTHER_TARGET.format(share, self.name))
        temperature, ends = self.temperature if kind == SAMPLED else 0.0, SHORT_DRAFTS in text.drafts.note
        drawn, likeliest = expected_drafts(job, read, temperature, self.draft, counts_ends=ends)
        return self._joined(drawn), self._joined(likeliest)

    def _joined(self, counts: Counts) -> Counts:
        """The counts by position, or all positions as one: (accepted, drafted)."""
        if self.by_position or not counts:
            return counts
        return ((sum(accepted for accepted, _ in counts), counts[0][1] * self.draft),)

    def _recorded(self, place: int) -> tuple[Counts, Counts]:
        """The counts that are expected of a prompt, by the records."""
        row = self.recorded[self.prompts[place]].row
        return (row["accepted_by_position"] if self.by_position else ((row["accepted"], row["drafted"]),)), ()

    def _try_readings(self) -> None:
        """Which other reading of the drafter's files gives the measured acceptance on the same texts."""
        drafter, probe = self.harness.pair.drafter, self.probes[0]
        if not isinstance(drafter, FeatureDrafter):
            return
        own, others, matches = drafter.conventions, other_readings(drafter), dict[str, float]()
        measured = rate(probe.measured, 0) or 0.0
        try:
            for name, conventions in others.items():
                self.harness.progress(f"trying the reading: {name} ...")
                drafter.conventions = conventions
                counts = [self._replayed(probe.name, text)[0] for text in self.texts[probe.name].values()]
                first = rate(counts, 0) or 0.0
                if min(first, measured) > LEAST_READING and agrees(probe.measured, counts):
                    matches[name] = first
        finally:
            drafter.conventions = own
        self.reading = " ".join(READING.format(name, first) for name, first in matches.items())
        if others and not matches:
            self.reading = f"None of the {len(others)} other readings of the drafter explains it."

    def conclusion(self, rows: Sequence[Row]) -> list[str]:
        if self.off_on:
            missing = NO_DRAFTS if self.cause is DraftCause.OFF else NONE_ON
            return [missing.format(self.name, self.off_on), *self._flags()]
        prompts, tested = len(self.probes[0].measured), [checked(self.found)]
        if self.cause is DraftCause.UNCLEAR or self.shown is None:
            lines = [unclear(self.shown, prompts)]
        elif self.cause is DraftCause.SLOW:
            tokens = sum(self.forwards) / len(self.forwards)
            ratio = with_bounds({"speedup": self.speed.estimate, "interval": (self.speed.low, self.speed.high)})
            against = "" if self.baseline is None else self.baseline.address.name
            lines = [SLOW.format(ratio, against, tokens, tokens / self.speed.estimate)]
            tested.append(SLOW_CHECKED.format(against, ALARM))
        else:
            lines = [sentence(self.cause, self.shown)]
        return [*lines, *([self.reading] if self.reading else []), *tested, *self._flags()]

    def _flags(self) -> list[str]:
        """The settings of other programs for what the server should run."""
        started = self.harness.state.servers.speculation_of(self.name)
        if self.recorded:  # the pair ran on another machine
            return settings_elsewhere(started) if started is not None else []
        pair = self.harness.pair
        made = speculation(pair, self.settings, self.draft, kind=pair.drafter_kind)
        # Texts were sampled even if this session is greedy, and the setting for that is the remedy.
        return settings_elsewhere(replace(made, rule=RULE) if self.cause is DraftCause.GREEDY_DRAFTS else made)


def _arguments(command: Sequence[str]) -> dict[str, Any]:
    """The values of a command line by the names of its flags. Values in JSON are parsed."""
    found: dict[str, Any] = {}
    for flag, value in pairwise(command):
        if flag.startswith("--") and not value.startswith("--"):
            try:
                found[flag.lstrip("-").replace("-", "_")] = json.loads(value) if value.startswith("{") else value
            except ValueError:
                continue
    return found


def _drafts_a_round(texts: Sequence[ServerText]) -> int:
    longest = max(len(text.drafts.by_position) for text in texts)
    rounds = [(text.drafts.drafted, text.drafts.rounds or (text.drafts.forwards or 1) - 1) for text in texts]
    # A position that no round has reached is not among the positions.
    return max(1, longest, round(max(drafted / max(1, count) for drafted, count in rounds)))


def _end_early(texts: Sequence[ServerText], draft: int) -> bool:
    """Whether drafts are shorter than `draft` tokens more often than the ends of texts explain, where the positions of
    such drafts are not known.
    """
    counted = [text.drafts for text in texts if SHORT_DRAFTS in text.drafts.note]
    missing = sum((drafts.rounds or 0) * draft - drafts.drafted for drafts in counted)
    return missing > len(counted) * draft * (draft + 1) / 2


def doctor(argument: str, context: CommandContext) -> Outcome:
    words, values = parse_words(split_words(argument), (*OPTIONS, "expect"), most=2)
    harness, servers = context.harness, context.harness.state.servers
    connection = servers.named(words, EXAMPLE)
    numbers = parse_numbers(values, OPTIONS)
    recorded = _records(values["expect"], context.settings) if "expect" in values else {}
    if not recorded and (harness.loaded is None or harness.pair.drafter is None):
        raise UserError(NO_HALF)
    if not recorded and harness.pair.drafter_tokenizer is not None:
        raise UserError(TOKENIZERS)
    prompts = _prompts(words[1:], recorded)
    examination = ServerExamination(
        *(harness, context.settings, connection),
        servers.connections.get(connection.address.baseline or ""),
        spaced(prompts, numbers["prompts"]),
        length=context.settings.length if recorded else numbers["length"],
        long=numbers["long"],
        recorded=recorded,
    )
    report = TABLE.report(
        *("server doctor", examination.prompts[0], context.settings, examination.rows()),
        conclude=examination.conclusion,
        title=f"/server doctor {words[0]}, {count_of(len(examination.prompts), 'prompt')}",
    )
    return [report]


def _prompts(words: Sequence[str], recorded: Mapping[str, RecordedRun]) -> Sequence[str]:
    if words:
        found = tuple(dict.fromkeys(prompt.text for prompt in read_prompts(path_in(words[0], EXAMPLE))))
        if not (found := tuple(prompt for prompt in found if prompt in recorded or not recorded)):
            raise UserError(f"{words[0]} has no prompt of the records.")
        return found
    return tuple(recorded) or tuple(prompt.text for prompt in plan_prompts(BUILT_IN, ()).measured)


def _records(file: str, settings: Settings) -> dict[str, RecordedRun]:
    """The runs with drafts of a file by prompt, of one strategy. Raises UserError if they cannot be repeated here."""
    read = read_records(path_in(file, EXAMPLE)).runs
    runs = [run for run in read if run.row.get("accepted_by_position") and not run.row.get("history")]
    if not runs:
        raise UserError(NO_POSITIONS.format(file))
    names = {run.row["strategy"] for run in runs}
    chosen = min(names, key=lambda name: (not name.startswith(("speculative", "server")), name))
    found = {run.row["prompt"]: run for run in runs if run.row["strategy"] == chosen}
    here = as_json(settings)
    for run in found.values():
        for name in ("processor", "length"):
            if run.row["settings"].get(name) != here[name]:
                raise UserError(OTHER_SETTINGS.format(file, name, name, run.row["settings"].get(name)))
    return found
