"""Runs of servers and how they compare with their baselines.

A server is compared only with the baseline in its address, and its speed only on the same host. Texts are compared
under greedy decoding: by token if both servers return ids, otherwise by character.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from utils.comparison.strategies import is_greedy
from utils.config.settings import Settings
from utils.decode.steps import FinishReason
from utils.metrics.results import Comparison, Generation, first_difference
from utils.prompts.conversation import Turns
from utils.servers.address import TARGET, ServerAddress
from utils.servers.connection import ServerAnswer

PREFIX = "server "
COLOURS = ("bright_blue", "bright_green", "bright_yellow", "bright_magenta", "bright_cyan")
TOKEN, CHARACTER = "token", "character"


def row_name(name: str) -> str:
    """The name of a server in tables of strategies."""
    return PREFIX + name


@dataclass(frozen=True, slots=True)
class ServerRun:
    """One answer of a server, with the figures for tables and records. Unknown figures are None."""

    address: ServerAddress
    answer: ServerAnswer

    @property
    def name(self) -> str:
        return row_name(self.address.name)

    @property
    def text(self) -> str:
        return self.answer.completion.text

    @property
    def finish(self) -> FinishReason:
        return self.answer.completion.finish

    @property
    def seconds(self) -> float:
        return self.answer.completion.seconds

    @property
    def new_tokens(self) -> int | None:
        return self.answer.completion.token_count

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens per second of the whole request, the prompt included."""
        count = self.new_tokens
        return count / self.seconds if count and self.seconds else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        return self.answer.completion.decode_tokens_per_second

    @property
    def first_seconds(self) -> float | None:
        return self.answer.completion.first_seconds

    @property
    def drafted(self) -> int | None:
        found = self.answer.acceptance
        return found.drafted if found is not None and found.valid else None

    @property
    def accepted(self) -> int | None:
        found = self.answer.acceptance
        return found.accepted if found is not None and found.valid else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None

    @property
    def rounds(self) -> int | None:
        found = self.answer.acceptance
        return found.rounds if found is not None and found.valid else None

    @property
    def drafts_per_round(self) -> float | None:
        return self.drafted / self.rounds if self.drafted is not None and self.rounds else None

    @property
    def tokens_per_target_forward(self) -> float | None:
        found = self.answer.acceptance
        return found.tokens_per_forward(self.new_tokens) if found is not None and found.valid else None


@dataclass(frozen=True, slots=True)
class ServerComparison:
    """A server's run compared with its baseline's.

    `baseline` is the name of that row and `baseline_tokens` its number of new tokens. `speedup` is a ratio of tokens
    per second, and `decode_speedup` excludes the first token. `same` and `first_difference` are as in Comparison;
    `unit` is what the index counts.
    """

    baseline: str | None = None
    speedup: float | None = None
    decode_speedup: float | None = None
    same: bool | None = None
    first_difference: int | None = None
    unit: str = TOKEN
    baseline_tokens: int | None = None

    @property
    def text(self) -> str:
        """The cell of the table."""
        if self.unit == CHARACTER and self.first_difference is not None:
            return f"differs at character {self.first_difference + 1}"
        return Comparison(same=self.same, first_difference=self.first_difference).text


class ComparedServer(NamedTuple):
    """A server's run and its comparison with its baseline's."""

    run: ServerRun
    comparison: ServerComparison


@dataclass(frozen=True, slots=True)
class LocalRun:
    """The local target's run, as a baseline for servers, with its decoded text."""

    run: Generation
    text: str


@dataclass(frozen=True, slots=True)
class ServerPrompt:
    """The runs of one prompt on servers.

    `planned` names the rows that should run. `histories` has the conversation before the prompt for each row.
    """

    text: str
    settings: Settings
    planned: tuple[str, ...]
    histories: Mapping[str, Turns]
    compared: tuple[ComparedServer, ...]

    @classmethod
    def of(
        cls,
        text: str,
        settings: Settings,
        runs: Sequence[ServerRun],
        *,
        histories: Mapping[str, Turns],
        target: LocalRun | None = None,
    ) -> "ServerPrompt":
        """Compare each run with its baseline's. `histories` covers all planned servers."""
        compared = tuple(ComparedServer(run, compare_run(run, runs, target, settings)) for run in runs)
        return cls(text, settings, tuple(histories), histories, compared)


def compare_run(
    run: ServerRun, runs: Sequence[ServerRun], target: LocalRun | None, settings: Settings
) -> ServerComparison:
    """Compare a run with its baseline's, which is in `runs` or is the local target's.

    Without a finished run of the baseline, the result has only the baseline's name.
    """
    name = run.address.baseline
    if name is None:
        return ServerComparison()
    if run.finish is FinishReason.INTERRUPTED:
        return ServerComparison(name if name == TARGET else row_name(name))
    greedy = is_greedy(settings)
    if name == TARGET:
        return ServerComparison(TARGET) if target is None else _with_target(run, target, greedy=greedy)
    other = next((one for one in runs if one.address.name == name), None)
    if other is None or other.finish is FinishReason.INTERRUPTED:
        return ServerComparison(row_name(name))
    same_host = run.address.host == other.address.host
    ours, theirs = run.answer.completion.token_ids, other.answer.completion.token_ids
    by_tokens = ours is not None and theirs is not None
    texts: tuple[Sequence[object], Sequence[object]] = (
        (ours, theirs) if ours is not None and theirs is not None else (run.text, other.text)
    )
    compared = _compared(
        row_name(name),
        _ratio(run.tokens_per_second, other.tokens_per_second) if same_host else None,
        _ratio(run.decode_tokens_per_second, other.decode_tokens_per_second) if same_host else None,
        texts=texts if greedy else None,
        unit=TOKEN if by_tokens else CHARACTER,
    )
    return replace(compared, baseline_tokens=other.new_tokens)


def _with_target(run: ServerRun, target: LocalRun, *, greedy: bool) -> ServerComparison:
    if target.run.finish is FinishReason.INTERRUPTED:
        return ServerComparison(TARGET)
    local = run.address.is_local
    compared = _compared(
        TARGET,
        _ratio(run.tokens_per_second, target.run.tokens_per_second) if local else None,
        _ratio(run.decode_tokens_per_second, target.run.decode_tokens_per_second) if local else None,
        texts=(run.text, target.text) if greedy else None,
        unit=CHARACTER,
    )
    return replace(compared, baseline_tokens=len(target.run.tokens))


def _compared(
    baseline: str,
    speedup: float | None,
    decode_speedup: float | None,
    *,
    texts: tuple[Sequence[object], Sequence[object]] | None,
    unit: str,
) -> ServerComparison:
    if texts is None:
        return ServerComparison(baseline, speedup, decode_speedup)
    difference = first_difference(*texts)
    return ServerComparison(baseline, speedup, decode_speedup, difference is None, difference, unit)


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None
