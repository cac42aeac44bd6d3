"""Run: what a strategy or a server generated for one prompt, and how it compares with the run of its baseline.

Tables, verdicts, records and exports are made from runs. Speeds are compared on the same host only. Texts of local
strategies are compared by token, those of servers under greedy decoding only: by token if both servers return ids,
otherwise by character.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from utils.comparison.job import Job
from utils.comparison.strategies import Strategy, is_greedy
from utils.config.settings import Settings
from utils.decode.steps import FinishReason
from utils.metrics.results import CHARACTER, TOKEN, Comparison, Generation, first_difference
from utils.servers.address import TARGET, ServerAddress, other_machine
from utils.servers.kinds.completion import ServerAcceptance, ServerCompletion
from utils.text import decode

PREFIX = "server "


def row_name(name: str) -> str:
    """The name of a server in tables of strategies."""
    return PREFIX + name


@dataclass(frozen=True, slots=True)
class Run:
    """One finished or interrupted run of an arm.

    `name` is that of the arm, and `baseline` names the arm to compare it with, if any. `seconds` includes the prefill,
    or is the time of the whole request. Figures that are unknown, or that do not apply, are None: `tokens` are token
    ids, `rounds` are verify passes with their drafts, and `accepted_by_position` is as in Generation. A local run has a
    `generation` with its rounds; the answer of a server has a `completion` and the `address` of the server.
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
    rounds: int | None = None
    target_forwards: int | None = None
    accepted_by_position: tuple[tuple[int, int], ...] | None = None
    generation: Generation | None = None
    completion: ServerCompletion | None = None
    address: ServerAddress | None = None

    @classmethod
    def of_strategy(cls, strategy: Strategy, job: Job, generation: Generation) -> Self:
        """The run of a local strategy."""
        drafts = strategy.drafts
        return cls(
            strategy.name,
            TARGET,
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
            rounds=len(generation.steps) if drafts else None,
            target_forwards=generation.target_forwards if strategy.uses_target else None,
            accepted_by_position=tuple(generation.accepted_by_position) if drafts else None,
            generation=generation,
        )

    @classmethod
    def of_server(cls, address: ServerAddress, answer: ServerCompletion) -> Self:
        """The answer of a server. Its drafts are unknown unless they belong to this request alone."""
        baseline = address.baseline
        run = cls(
            row_name(address.name),
            baseline if baseline in (None, TARGET) else row_name(baseline),
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
        )
        found = answer.acceptance
        if found is None or not found.valid:
            return run
        return replace(
            run,
            drafted=found.drafted,
            accepted=found.accepted,
            rounds=found.rounds,
            target_forwards=found.forwards,
            accepted_by_position=found.by_position,
        )

    @property
    def is_local(self) -> bool:
        """Whether a strategy of this program generated it."""
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


def compare_run(run: Run, runs: Iterable[Run], settings: Settings, *, same_request: bool = True) -> Comparison:
    """Compare a run with its baseline's among `runs`.

    Without a finished run of the baseline, the result has only the baseline's name. `same_request` is True if both had
    the same prompt and noise; if not, only their speeds are compared.
    """
    other = next((one for one in runs if one.name == run.baseline), None)
    empty = Comparison(baseline=run.baseline)
    if other is None:
        return empty
    if other is run:  # before the check for interrupts: an interrupted target still equals itself
        decoding = None if run.decode_tokens_per_second is None else 1.0
        return replace(empty, speedup=1.0, same=True, decode_speedup=decoding, baseline_tokens=run.new_tokens)
    if FinishReason.INTERRUPTED in (run.finish, other.finish):
        return empty
    compared = replace(empty, baseline_tokens=other.new_tokens)
    is_local = run.address is None and other.address is None
    if is_local or not other_machine(run.address, other.address):
        compared = replace(
            compared,
            speedup=_ratio(run.tokens_per_second, other.tokens_per_second),
            decode_speedup=_ratio(run.decode_tokens_per_second, other.decode_tokens_per_second),
        )
    # The noise of a server is its own, so that only its greedy texts can be equal.
    if not same_request or not (run.is_local or is_greedy(settings)):
        return compared
    texts, unit = _texts(run, other)
    difference = first_difference(*texts)
    return replace(compared, same=difference is None, first_difference=difference, unit=unit)


def _texts(run: Run, other: Run) -> tuple[tuple[Sequence[object], Sequence[object]], str]:
    """What is compared, and its unit. A server's ids may be those of another tokenizer than the local target's."""
    if run.is_local == other.is_local and run.tokens is not None and other.tokens is not None:
        return (run.tokens, other.tokens), TOKEN
    return (run.text, other.text), CHARACTER


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None
