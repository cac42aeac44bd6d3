"""Arms: what can run a prompt, a local strategy or a server. Both return a Run.

An arm shows nothing and compares nothing. A prompt is sent to a server as token ids only if the server's tokenizer
yields the same ids as the local one. Otherwise the request has the messages of a chat, or plain text with /chat off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from ngram_assisted import STORAGES, NGramStorage
from utils.comparison.job import Job
from utils.comparison.runs import PREFIX, Run, row_name
from utils.comparison.strategies import Strategy
from utils.config.settings import Settings
from utils.decode.engine_forward import reported_reading
from utils.decode.model_info import vocabulary_size
from utils.decode.noise import fix_seeds
from utils.decode.steps import FinishReason, Step
from utils.errors import UserError
from utils.metrics.draft_trace import DraftTrace, DraftTracer
from utils.metrics.results import Comparison, collect
from utils.metrics.stopwatch import RoundTiming, Stopwatch
from utils.pairs.drafter_kinds import DrafterCaches
from utils.pairs.pair import Pair
from utils.prompts.conversation import Turns, prompt_ids, to_messages
from utils.servers.client import ServerClient
from utils.servers.connection import Connection, RequestFor
from utils.servers.kinds.completion import Chat, Piece, ServerRequest
from utils.servers.kinds.server_kind import ServerKind

COLOURS = ("bright_blue", "bright_green", "bright_yellow", "bright_magenta", "bright_cyan")  # of servers
NO_TEXT = "the prompt is empty."


class RunWatcher(Protocol):
    """Receives a run while it grows: steps of a local strategy, or pieces of a server's answer."""

    def reading(self, done: int, total: int) -> None: ...

    def step(self, step: Step, timing: RoundTiming | None, traces: Sequence[DraftTrace] = ()) -> None: ...

    def piece(self, piece: Piece) -> None: ...


class Arm(Protocol):
    """A local strategy or a server.

    `name` is that of its row in tables, `title` and `colour` are those of its text. `strategy` is None for a server.
    """

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def colour(self) -> str: ...

    @property
    def strategy(self) -> Strategy | None: ...

    def run(self, text: str, settings: Settings, history: Turns = (), watch: RunWatcher | None = None) -> Run:
        """Run a prompt that follows earlier turns. Ctrl-C ends the run, which is returned with
        FinishReason.INTERRUPTED. Raises UserError without a complete answer.
        """
        ...


class ComparedRun(NamedTuple):
    """A run, its arm, and its comparison with its baseline's run."""

    arm: Arm
    run: Run
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class LocalArm:
    """A strategy on the loaded models.

    With a `job`, it runs that prompt with the job's storage and caches. Without one, every run has a storage and texts
    of its own, and only the layer cuts in `cut_models` are shared. If `timed`, the parts of every round are timed.
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
        """As Arm.run. Observers add a little time, so a run is observed only if it is watched."""
        job = self.job
        if job is None:
            ids = ids_of(self.pair, text, settings, history)
            job = new_job(ids, self.pair, settings, history, cut_models=self.cut_models)
        # For each run, so that results do not depend on other runs.
        fix_seeds(settings.seed)
        stopwatch = Stopwatch() if self.timed or watch is not None else None
        # Only this rule accepts a draft by its own p/q.
        by_ratio, traced = settings.verify == "rejection", watch is not None and settings.debug == "full"
        tracer = DraftTracer(accepts_by_ratio=by_ratio) if traced else None
        steps = self.strategy.steps(replace(job, stopwatch=stopwatch, tracer=tracer))
        if watch is None:
            generation = collect(steps, stopwatch=stopwatch)
        else:
            with reported_reading(watch.reading):
                generation = collect(steps, watch.step, stopwatch=stopwatch, tracer=tracer)
        return Run.of_strategy(self.strategy, job, generation)


@dataclass(frozen=True, slots=True)
class ServerArm:
    """A server. `pair` has the loaded models, or is None; `place` is the server's place in the list of servers."""

    connection: Connection
    pair: Pair | None = None
    place: int = 0

    @property
    def name(self) -> str:
        return row_name(self.connection.address.name)

    @property
    def title(self) -> str:
        return f"Server {self.name.removeprefix(PREFIX)}"

    @property
    def colour(self) -> str:
        return COLOURS[self.place % len(COLOURS)]

    @property
    def strategy(self) -> None:
        return None

    def run(self, text: str, settings: Settings, history: Turns = (), watch: RunWatcher | None = None) -> Run:
        """As Arm.run."""
        make = request_maker(self.pair, text, settings, history)
        answer = self.connection.ask(make) if watch is None else self.connection.ask(make, watch.piece)
        return Run.of_server(self.connection.address, answer)


def complete(run: Run) -> Run:
    """The run, unless Ctrl-C has ended it: then KeyboardInterrupt is raised, because a report must end."""
    if run.finish is FinishReason.INTERRUPTED:
        raise KeyboardInterrupt
    return run


def new_job(
    prompt: list[int], pair: Pair, settings: Settings, history: Turns = (), *, cut_models: dict[Any, Any]
) -> Job:
    """A job with an n-gram storage and texts of its own. It shares only the target's layer cuts with other jobs."""
    storage = empty_storage(settings, pair)
    return Job(prompt, pair, settings, storage, caches=DrafterCaches(cut_models=cut_models), history=history)


def empty_storage(settings: Settings, pair: Pair | None) -> NGramStorage:
    """An empty n-gram storage of the kind, order and size in the settings."""
    spec, vocabulary = settings.ngram_storage, 1 if pair is None else vocabulary_size(pair.target)
    return STORAGES[spec.kind](spec.order, vocabulary, settings.ngram_limit)


def ids_of(pair: Pair, text: str, settings: Settings, history: Turns = ()) -> list[int]:
    """The token ids of a prompt that follows earlier turns. Raises UserError for an empty prompt."""
    return prompt_ids(
        pair.tokenizer, text, chat=settings.uses_chat, system=settings.system, special=settings.special, history=history
    )


def request_maker(pair: Pair | None, text: str, settings: Settings, history: Turns = ()) -> RequestFor:
    """A function that makes the request for a server kind. Raises UserError for an empty prompt."""
    if not text:
        raise UserError(NO_TEXT)
    processor = settings.processor
    system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    messages = (*system, *to_messages(history), {"role": "user", "content": text})

    def make(kind: ServerKind, server: ServerClient) -> ServerRequest:
        prompt: str | tuple[int, ...] | Chat = Chat(messages) if settings.uses_chat else text
        known: dict[str, Any] = {}
        if pair is not None and kind.takes_token_ids and _same_tokenizer(pair.tokenizer, text, kind, server):
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


def _same_tokenizer(tokenizer: Any, text: str, kind: ServerKind, server: ServerClient) -> bool:
    """Whether the server and the local tokenizer yield the same ids for the prompt."""
    return kind.tokens(server, text) == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
