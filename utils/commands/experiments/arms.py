"""What runs a prompt: a local strategy or a server. Experiments treat both alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from utils.comparison.harness import Harness
from utils.comparison.job import Job
from utils.comparison.server_requests import request_maker
from utils.comparison.server_runs import ServerRun, row_name
from utils.comparison.strategies import Strategy, is_greedy
from utils.config.settings import Settings
from utils.decode.model_session import ModelSession
from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.metrics.results import Generation, first_difference
from utils.metrics.stopwatch import Stopwatch
from utils.metrics.totals import Totals
from utils.prompts.conversation import Turn, Turns
from utils.prompts.prompt_files import Prompt
from utils.servers.address import TARGET
from utils.servers.connection import Connection
from utils.text import decode


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One answer. `tokens` is None if a server returns no ids. `drafts_unknown` is True if a server's figures are not
    its own for this answer. `generation` is the run of a local strategy.
    """

    text: str
    tokens: Sequence[int] | None
    totals: Totals
    first_seconds: float | None
    decode_tokens_per_second: float | None
    drafts_unknown: bool = False
    generation: Generation | None = None

    @classmethod
    def local(cls, run: Generation, text: str, *, drafts: bool, uses_target: bool) -> "ArmRun":
        totals = Totals.of_run(run)
        totals = totals if drafts else replace(totals, drafted=None, accepted=None)
        totals = totals if uses_target else replace(totals, forwards=None)
        return cls(text, run.tokens, totals, run.first_seconds, run.decode_tokens_per_second, generation=run)

    @classmethod
    def server(cls, run: ServerRun) -> "ArmRun":
        found, totals = run.answer.acceptance, Totals(run.new_tokens, run.seconds)
        if found is not None and found.valid:
            positions = tuple(accepted for accepted, _ in found.by_position)
            known = positions if found.by_position or not found.drafted else None
            counts = (found.drafted, found.accepted, found.forwards, found.rounds, known)
            totals = Totals(run.new_tokens, run.seconds, *counts)
        unknown = found is not None and not found.valid
        ids = run.answer.completion.token_ids
        return cls(run.text, ids, totals, run.first_seconds, run.decode_tokens_per_second, drafts_unknown=unknown)

    def differs_from(self, other: "ArmRun") -> bool:
        """Whether the texts differ: by token if both are known, otherwise by character."""
        if self.tokens is not None and other.tokens is not None:
            return first_difference(self.tokens, other.tokens) is not None
        return self.text != other.text


class Arm(Protocol):
    """A local strategy or a server. `baseline` is the name of the arm that it is compared with, or None."""

    @property
    def name(self) -> str: ...

    @property
    def baseline(self) -> str | None: ...

    def run(self, text: str, settings: Settings, history: Turns = ()) -> ArmRun:
        """One answer. Raises UserError without one, and KeyboardInterrupt on Ctrl-C."""
        ...

    def compares_texts(self, settings: Settings) -> bool:
        """Whether its texts can equal the baseline's."""
        ...

    def shares_host(self, other: "Arm") -> bool:
        """Whether speeds of both can be compared."""
        ...


@dataclass(frozen=True, slots=True)
class LocalArm:
    """A strategy of the loaded pair. `job` has the prompt and the conversation if they are fixed."""

    harness: Harness
    strategy: Strategy
    job: Job | None = None
    stopwatch: Callable[[], Stopwatch | None] = lambda: None

    @property
    def name(self) -> str:
        return self.strategy.name

    @property
    def baseline(self) -> str | None:
        return self.harness.baseline.name

    def run(self, text: str, settings: Settings, history: Turns = ()) -> ArmRun:
        if self.job is not None:
            ids, history = self.job.prompt, self.job.history
        else:
            ids = self.harness.prompt_ids(text, settings, history)
        run = self.harness.run_alone(ids, self.strategy, settings, history=history, stopwatch=self.stopwatch())
        shown = decode(self.harness.pair.tokenizer, run.tokens)
        strategy = self.strategy
        return ArmRun.local(run, shown, drafts=strategy.drafts, uses_target=strategy.uses_target)

    def compares_texts(self, settings: Settings) -> bool:
        return self.strategy.lossless

    def shares_host(self, other: Arm) -> bool:
        return isinstance(other, LocalArm) or other.shares_host(self)


@dataclass(frozen=True, slots=True)
class ServerArm:
    """A server of the session."""

    harness: Harness
    connection: Connection

    @property
    def name(self) -> str:
        return row_name(self.connection.address.name)

    @property
    def baseline(self) -> str | None:
        name = self.connection.address.baseline
        return name if name in (None, TARGET) else row_name(str(name))

    def run(self, text: str, settings: Settings, history: Turns = ()) -> ArmRun:
        answer = self.connection.ask(request_maker(self.harness, text, settings, history))
        run = ServerRun(self.connection.address, answer)
        # A stream turns Ctrl-C into a partial answer, but a report must end.
        if run.finish is FinishReason.INTERRUPTED:
            raise KeyboardInterrupt
        return ArmRun.server(run)

    def compares_texts(self, settings: Settings) -> bool:
        return is_greedy(settings)

    def shares_host(self, other: Arm) -> bool:
        address = self.connection.address
        return address.host == other.connection.address.host if isinstance(other, ServerArm) else address.is_local


def local_arms(harness: Harness, settings: Settings, job: Job | None = None) -> list[Arm]:
    """The enabled strategies. Raises UserError if there is none."""
    return [LocalArm(harness, strategy, job) for strategy in harness.enabled(settings)]


def server_arms(harness: Harness, servers: Sequence[Connection]) -> list[Arm]:
    """The servers, after the local target if one of them is compared with it."""
    needs_target = harness.has_pair and any(server.address.baseline == TARGET for server in servers)
    own = [LocalArm(harness, harness.baseline)] if needs_target else []
    return [*own, *(ServerArm(harness, server) for server in servers)]


def check_prompt(arms: Sequence[Arm], prompt: Prompt, settings: Settings) -> None:
    """Refuse a prompt that the target cannot take, once instead of by every strategy. Raises UserError."""
    if (arm := next((arm for arm in arms if isinstance(arm, LocalArm) and arm.job is None), None)) is not None:
        ids = arm.harness.prompt_ids(prompt.text, settings)
        ModelSession(arm.harness.pair.target, use_cache=False).begin(ids)


def all_turns(arm: Arm, prompt: Prompt, settings: Settings) -> tuple[ArmRun, ...]:
    """The answers to all turns of a prompt, as the conversations of Spec-Bench and SPEED-Bench are run.

    Every arm continues with its own answers, and every turn has a prefill of the whole conversation so far.
    """
    runs: list[ArmRun] = []
    history: Turns = ()
    for text in (prompt.text, *prompt.later) if settings.uses_chat else (prompt.text,):
        try:
            runs.append(arm.run(text, settings, history))
        except UserError as error:
            raise UserError(f"Turn {len(runs) + 1}: {error}") if runs else error from error
        history = (*history, Turn(text, runs[-1].text))
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class PairedRuns:
    """All turns of a prompt by one arm, and by its baseline. `theirs` is None without the baseline's answers.

    `same` is None if the texts were not compared, and False if one of them differs.
    """

    arm: Arm
    ours: tuple[ArmRun, ...]
    theirs: tuple[ArmRun, ...] | None
    compares_speeds: bool
    compares_texts: bool

    @classmethod
    def of(cls, arm: Arm, runs: Sequence[tuple[Arm, tuple[ArmRun, ...]]], settings: Settings) -> "PairedRuns":
        """`runs` are those of all arms, with this one."""
        ours = next(turns for one, turns in runs if one is arm)
        found = next(((one, turns) for one, turns in runs if one.name == arm.baseline), None)
        if found is None:
            return cls(arm, ours, None, compares_speeds=False, compares_texts=False)
        speeds, texts = arm.shares_host(found[0]), arm.compares_texts(settings)
        return cls(arm, ours, found[1], compares_speeds=speeds, compares_texts=texts)

    @property
    def totals(self) -> Totals:
        return pooled_totals(self.ours)

    @property
    def baseline_totals(self) -> Totals | None:
        return None if self.theirs is None else pooled_totals(self.theirs)

    @property
    def speedup(self) -> float | None:
        if self.theirs is self.ours:
            return 1.0
        if self.theirs is None or not self.compares_speeds:
            return None
        ours, theirs = self.totals.tokens_per_second, pooled_totals(self.theirs).tokens_per_second
        return ours / theirs if ours is not None and theirs else None

    @property
    def decode_speedup(self) -> float | None:
        if self.theirs is None or not self.compares_speeds:
            return None
        ours, theirs = self.ours[0].decode_tokens_per_second, self.theirs[0].decode_tokens_per_second
        return ours / theirs if ours is not None and theirs else None

    @property
    def same(self) -> bool | None:
        if self.theirs is None or not self.compares_texts:
            return None
        return not any(ours.differs_from(theirs) for ours, theirs in zip(self.ours, self.theirs, strict=False))

    @property
    def first_text_is_same(self) -> bool | None:
        """The same for the first turn."""
        if self.theirs is None or not self.compares_texts:
            return None
        return not self.ours[0].differs_from(self.theirs[0])


def pooled_totals(runs: Sequence[ArmRun]) -> Totals:
    """Several answers of one arm as one.

    Drafts are unknown if nothing is known or if an answer's figures are not its own. An answer without figures among
    others with figures had no drafts, and as many forward passes as tokens.
    """
    if any(run.drafts_unknown for run in runs):
        return Totals.of([Totals(run.totals.tokens, run.totals.seconds) for run in runs])
    if not any(run.totals.drafted is not None for run in runs):
        return Totals.of([run.totals for run in runs])
    return Totals.of([_with_counts(run.totals) for run in runs])


def _with_counts(totals: Totals) -> Totals:
    if totals.drafted is not None:
        return totals
    return replace(totals, drafted=0, accepted=0, forwards=totals.tokens)
