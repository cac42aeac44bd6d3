"""Arms: what can run a prompt, a local strategy or a server. Both return a Run.

An arm shows nothing and compares nothing. A prompt is sent to a server as token ids only if the server's tokenizer
yields the same ids as the local one. Otherwise the request has the messages of a chat, or plain text with /chat off.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

from ngram_assisted import STORAGES, NGramStorage
from utils.comparison.strategies import Job, Strategy, is_greedy
from utils.config.settings import Settings
from utils.decode.engine_forward import prepare_run, reported_reading
from utils.decode.model_info import context_length, vocabulary_size
from utils.decode.noise import fix_seeds
from utils.decode.steps import FinishReason, Step
from utils.errors import UserError
from utils.metrics import results
from utils.metrics.divergence import Cause, Divergence, TokenCandidate
from utils.pairs.drafter_kinds import DrafterCaches
from utils.pairs.pair import Pair
from utils.prompts.conversation import Turns, conversation_messages, prompt_ids
from utils.prompts.request_fields import SENT
from utils.servers.address import TARGET, ServerAddress, other_machine
from utils.servers.client import ServerClient
from utils.servers.connection import Connection, RequestFor
from utils.servers.kinds.completion import Chat, Piece, ServerAcceptance, ServerCompletion, ServerRequest
from utils.servers.kinds.server_kind import ServerKind
from utils.text import decode, token_piece, visible

PREFIX = "server "  # of the name of a server in tables of strategies
CONTEXT = 32  # characters before a difference that are shown with it
REASONS = {
    Cause.SAMPLING: "both drew from the same distribution, and /verify coupled gives the same text",
    Cause.ROUNDING: "a rounding tie: the target's two highest logits are {gap:.2g} apart, and verify passes of other "
    "widths move them by up to {drift:.2g}",
    Cause.QUANTIZATION: "under bnb-int8 verify passes of other widths move the logits by up to {drift:.2g}",
    Cause.UNEXPLAINED: "the reason is unknown, please report it with the records of /export bug.json",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One finished or interrupted run of an arm.

    `baseline` names the arm to compare it with, if any. `seconds` includes the prefill, or is the time of the whole
    request. A figure that was not measured or does not apply is None. A local run has a `generation` with its rounds;
    the answer of a server has a `completion` and the `address` of the server.
    """

    name: str
    baseline: str | None
    text: str
    tokens: tuple[int, ...] | None
    finish: FinishReason
    seconds: float
    first_seconds: float | None
    new_tokens: int | None
    decode_tokens_per_second: float | None
    prompt_tokens: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    forced: int | None = None
    rounds: int | None = None
    target_forwards: int | None = None
    accepted_by_position: tuple[tuple[int, int], ...] | None = None
    generation: results.Generation | None = None
    completion: ServerCompletion | None = None
    address: ServerAddress | None = None

    @classmethod
    def of_strategy(cls, strategy: Strategy, job: Job, generation: results.Generation) -> Self:
        drafts = strategy.drafts
        return cls(
            strategy.name,
            strategy.baseline,
            decode(job.pair.tokenizer, generation.tokens),
            tuple(generation.tokens),
            generation.finish,
            generation.seconds,
            generation.first_seconds,
            len(generation.tokens),
            generation.decode_tokens_per_second,
            prompt_tokens=len(job.prompt),
            drafted=generation.drafted if drafts else None,
            accepted=generation.accepted if drafts else None,
            forced=generation.forced if drafts else None,
            rounds=len(generation.steps) if drafts else None,
            target_forwards=generation.target_forwards if strategy.uses_target else None,
            accepted_by_position=tuple(generation.accepted_by_position) if drafts else None,
            generation=generation,
        )

    @classmethod
    def of_server(cls, address: ServerAddress, answer: ServerCompletion) -> Self:
        """The answer of a server. Its drafts are unknown unless they belong to this request alone."""
        baseline, found = address.baseline, answer.acceptance
        drafts: dict[str, Any] = {}
        if found is not None and found.valid:
            drafts = {name: getattr(found, name) for name in ("drafted", "accepted", "rounds")}
            drafts |= {"target_forwards": found.forwards, "accepted_by_position": found.by_position}
        return cls(
            PREFIX + address.name,
            baseline if baseline in (None, TARGET) else PREFIX + baseline,
            answer.text,
            answer.token_ids,
            answer.finish,
            answer.seconds,
            answer.first_seconds,
            answer.token_count,
            answer.decode_tokens_per_second,
            prompt_tokens=answer.prompt_tokens,
            completion=answer,
            address=address,
            **drafts,
        )

    @property
    def is_local(self) -> bool:
        return self.address is None

    @property
    def acceptance(self) -> ServerAcceptance | None:
        """What a server reported about its drafts, even if it does not belong to this request alone."""
        return None if self.completion is None else self.completion.acceptance

    @property
    def other_tokens(self) -> int | None:
        """The tokens that a server generated for other requests meanwhile, or None if that is unknown."""
        return None if self.completion is None else self.completion.other_tokens

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens per second of the whole run, the prefill included."""
        return self.new_tokens / self.seconds if self.new_tokens is not None and self.seconds else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None

    @property
    def drafts_per_round(self) -> float | None:
        return self.drafted / self.rounds if self.drafted is not None and self.rounds else None

    @property
    def tokens_per_target_forward(self) -> float | None:
        return self.new_tokens / self.target_forwards if self.new_tokens is not None and self.target_forwards else None


def compare_run(run: Run, runs: Iterable[Run], settings: Settings, *, same_request: bool = True) -> results.Comparison:
    """Compare a run with its baseline's among `runs`.

    Without a finished run of the baseline, the result is empty. `same_request` is True if both had the same prompt and
    noise; if not, only their speeds are compared.
    """
    other = next((one for one in runs if one.name == run.baseline), None)
    if other is run:  # before the check for interrupts: an interrupted target still equals itself
        return results.Comparison(1.0, same=True, decode_speedup=None if run.decode_tokens_per_second is None else 1.0)
    compared = results.Comparison()
    if other is None or FinishReason.INTERRUPTED in (run.finish, other.finish):
        return compared
    if (run.is_local and other.is_local) or not other_machine(run.address, other.address):
        compared = results.Comparison(
            speedup=_ratio(run.tokens_per_second, other.tokens_per_second),
            decode_speedup=_ratio(run.decode_tokens_per_second, other.decode_tokens_per_second),
        )
    # The noise of a server is its own, so that only its greedy texts can be equal.
    if not same_request or not (run.is_local or is_greedy(settings)):
        return compared
    difference, unit = results.first_difference(run.text, other.text), results.CHARACTER
    # A server's ids may be those of another tokenizer than the local target's.
    if run.is_local == other.is_local and run.tokens is not None and other.tokens is not None:
        difference, unit = results.first_difference(run.tokens, other.tokens), results.TOKEN
    return replace(compared, same=difference is None, first_difference=difference, unit=unit)


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def relation(run: Run, earlier: Sequence[Run]) -> tuple[Run, str]:
    """Which run a run's text is compared with, and how they relate, in words that end in a colon if a text follows.

    It is compared with one of the same text, or else with its baseline's, or else with the first. `earlier` has at
    least one run; their texts are on the screen. Positions count tokens of local runs and characters of servers.
    """
    ours, unit = _units(run), results.TOKEN if run.is_local else results.CHARACTER
    # The baseline's text comes first, because the other texts should equal it.
    candidates = sorted(earlier, key=lambda one: one.name != run.baseline)
    other = next((one for one in candidates if _units(one) == ours), candidates[0])
    theirs, name = _units(other), "" if other is earlier[0] else f" {other.name}"
    as_name = f" as{name}" if name else ""
    place = results.first_difference(ours, theirs)
    if place is None:
        return other, f"= same text{as_name}"
    if place == len(ours):
        return other, f"the same{as_name} up to {unit} {place}, where it ends"
    if place == len(theirs):
        return other, f"the same{as_name}, and longer from {unit} {place + 1}:"
    return other, f"differs{f' from{name}' if name else ''} from {unit} {place + 1}:"


def _units(run: Run) -> Sequence[object]:
    """The tokens of a local run, or the characters of a server's text."""
    return run.tokens if run.is_local and run.tokens is not None else visible(run.text)


def start_of_context(text: str, difference: int) -> int:
    """The index from which a few words of the line before a difference are shown."""
    start = max(0, difference - CONTEXT, text.rfind("\n", 0, difference) + 1)
    # Start at a word, unless the word fills the whole context.
    if 0 < start < difference and not text[start - 1].isspace():
        blank = text.find(" ", start, difference)
        start = start if blank < 0 else blank + 1
    return start


def text_figures(compared: Iterable[tuple[int, bool | None]]) -> dict[str, Any]:
    """The number of prompts with the baseline's text in every repeat, and the numbers of the others.

    `compared` has the number of each prompt and whether its texts are equal, or None if they were not compared.
    """
    same: dict[int, bool] = {}
    for number, is_same in compared:
        if is_same is not None:
            same[number] = is_same and same.get(number, True)
    return {
        "compared_texts": len(same),
        "same_texts": sum(same.values()),
        "other_texts_at_prompts": [number for number, is_same in same.items() if not is_same],
    }


def _choice(tokenizer: Any, candidate: TokenCandidate | None) -> str:
    """A token as a readable piece with its probability. None is the end of a text."""
    if candidate is None:
        return "the end of the text"
    return f"{token_piece(tokenizer, candidate.token)} (p {candidate.probability:.2g})"


def divergence_sentence(divergence: Divergence, tokenizer: Any) -> str:
    """What follows a strategy's name: its token at the first difference, the target's preference, and the cause."""
    reason = REASONS[divergence.cause].format(gap=divergence.gap, drift=divergence.rounding or 0)
    ours, theirs = (_choice(tokenizer, candidate) for candidate in (divergence.ours, divergence.theirs))
    return f"differs at token {divergence.position + 1}: it has {ours}, target-only {theirs}; {reason}."


COLOURS = ("bright_blue", "bright_green", "bright_yellow", "bright_magenta", "bright_cyan")  # of servers
NO_TEXT = "the prompt is empty."


class RunWatcher(Protocol):
    """Receives a run while it grows: steps of a local strategy, or pieces of a server's answer."""

    def reading(self, done: int, total: int) -> None: ...

    def step(self, step: Step, timing: results.RoundTiming, traces: Sequence[results.DraftTrace] = ()) -> None: ...

    def piece(self, piece: Piece) -> None: ...


@dataclass(frozen=True, slots=True)
class LocalArm:
    """A strategy on the loaded models. `name` is that of its row in tables, `title` and `colour` are those of its text.

    With a `job`, it runs that prompt with the job's storage and caches. Without one, every run has its own, and only
    the layer cuts in `cut_models` are shared. If `timed`, the parts of every round are timed.
    """

    strategy: Strategy
    pair: Pair
    cut_models: dict[Any, Any] = field(default_factory=dict)
    job: Job | None = None
    timed: bool = False

    @property
    def name(self) -> str:
        return self.strategy.name

    @property
    def title(self) -> str:
        return self.strategy.title

    @property
    def colour(self) -> str:
        return self.strategy.colour

    def run(self, text: str, settings: Settings, history: Turns = (), watch: RunWatcher | None = None) -> Run:
        """Run a prompt that follows earlier turns. Ctrl-C ends the run, which is returned with
        FinishReason.INTERRUPTED. Raises UserError without a complete answer.

        Observers add a little time, so a run is observed only if it is watched.
        """
        job = self.job
        if job is None:
            ids = ids_of(self.pair, text, settings, history)
            storage, caches = empty_storage(settings, self.pair), DrafterCaches(cut_models=self.cut_models)
            job = Job(ids, self.pair, settings, storage, caches=caches, history=history)
        last, bound = len(job.prompt) + settings.length, context_length(job.pair.target)
        last = last if bound is None else min(last, bound)
        prepare_run((job.pair.target, job.pair.drafter), len(job.prompt), last)
        job.grammar()  # compiled before the clock runs
        # For each run, so that results do not depend on other runs.
        fix_seeds(settings.seed)
        stopwatch = results.Stopwatch() if self.timed or watch is not None else None
        # Only this rule accepts a draft by its own p/q.
        by_ratio, traced = settings.verify == "rejection", watch is not None and settings.debug == "full"
        tracer = results.DraftTracer(accepts_by_ratio=by_ratio) if traced else None
        steps = self.strategy.steps(replace(job, stopwatch=stopwatch, tracer=tracer))
        if watch is None:
            generation = results.collect(steps, stopwatch=stopwatch)
        else:
            with reported_reading(watch.reading):
                generation = results.collect(steps, watch.step, stopwatch=stopwatch, tracer=tracer)
        return Run.of_strategy(self.strategy, job, generation)


@dataclass(frozen=True, slots=True)
class ServerArm:
    """A server at a place in the list of servers. `pair` has the loaded models, or is None."""

    connection: Connection
    pair: Pair | None = None
    place: int = 0
    strategy: None = None

    @property
    def name(self) -> str:
        return PREFIX + self.connection.address.name

    @property
    def title(self) -> str:
        return f"Server {self.connection.address.name}"

    @property
    def colour(self) -> str:
        return COLOURS[self.place % len(COLOURS)]

    def run(self, text: str, settings: Settings, history: Turns = (), watch: RunWatcher | None = None) -> Run:
        make = request_maker(self.pair, text, settings, history)
        answer = self.connection.ask(make) if watch is None else self.connection.ask(make, watch.piece)
        return Run.of_server(self.connection.address, answer)


Arm = LocalArm | ServerArm


class ComparedRun(NamedTuple):
    """A run, its arm, and its comparison with its baseline's run."""

    arm: Arm
    run: Run
    comparison: results.Comparison


def complete(run: Run) -> Run:
    """The run, unless Ctrl-C has ended it: then KeyboardInterrupt is raised, because a report must end."""
    if run.finish is FinishReason.INTERRUPTED:
        raise KeyboardInterrupt
    return run


def empty_storage(settings: Settings, pair: Pair | None) -> NGramStorage:
    spec, vocabulary = settings.ngram_storage, 1 if pair is None else vocabulary_size(pair.target)
    return STORAGES[spec.kind](spec.order, vocabulary, settings.ngram_limit)


def ids_of(pair: Pair, text: str, settings: Settings, history: Turns = ()) -> list[int]:
    """The token ids of a prompt that follows earlier turns. Raises UserError for an empty prompt."""
    return prompt_ids(
        *(pair.tokenizer, text),
        chat=settings.uses_chat,
        system=settings.system,
        special=settings.special,
        history=history,
        request=settings.request,
    )


def request_maker(pair: Pair | None, text: str, settings: Settings, history: Turns = ()) -> RequestFor:
    """A function that makes the request for a server kind. Raises UserError for an empty prompt."""
    if not text:
        raise UserError(NO_TEXT)
    processor = settings.processor
    fields = json.loads(settings.request or "{}")
    messages = conversation_messages(text, settings.system, history, fields)
    further = {name: fields[name] for name in SENT if name in fields}

    def make(kind: ServerKind, server: ServerClient) -> ServerRequest:
        prompt: str | tuple[int, ...] | Chat = Chat(tuple(messages), further) if settings.uses_chat else text
        known: dict[str, Any] = {}
        # Only messages can be sent with tools or a format.
        if pair is not None and kind.takes_token_ids and not further:
            ours = tuple(pair.tokenizer(text, add_special_tokens=False)["input_ids"])
            if kind.tokens(server, text) == ours:  # the tokenizers are the same
                prompt = tuple(ids_of(pair, text, settings, history))
                known = {"vocabulary": vocabulary_size(pair.target)}
        return ServerRequest(
            prompt,
            settings.length,
            temperature=processor.effective_temperature,
            top_k=processor.top_k or 0,
            top_p=1.0 if processor.top_p is None else processor.top_p,
            seed=settings.seed,
            **known,
        )

    return make
