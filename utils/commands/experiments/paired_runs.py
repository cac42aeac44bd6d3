"""The answers of an arm to all turns of a prompt, with those of its baseline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from utils.comparison.arms import Arm, ServerArm, complete
from utils.comparison.harness import Harness
from utils.comparison.runs import Run, compare_run
from utils.config.settings import Settings
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.metrics.results import Comparison
from utils.metrics.totals import Totals
from utils.prompts.conversation import Turn, Turns
from utils.prompts.prompt_files import Prompt
from utils.servers.address import TARGET
from utils.servers.connection import Connection


def local_arms(harness: Harness, settings: Settings) -> list[Arm]:
    """The enabled strategies. Raises UserError if there is none."""
    return [harness.arm(strategy) for strategy in harness.enabled(settings)]


def server_arms(harness: Harness, servers: Sequence[Connection]) -> list[Arm]:
    """The servers, after the local target if one of them is compared with it."""
    needs_target = harness.has_pair and any(server.address.baseline == TARGET for server in servers)
    own = [harness.arm(harness.baseline)] if needs_target else []
    return [*own, *(ServerArm(server, harness.loaded) for server in servers)]


def check_prompt(harness: Harness, prompt: Prompt, settings: Settings) -> None:
    """Refuse a prompt that the target cannot take, once instead of by every strategy. Raises UserError."""
    ids = harness.prompt_ids(prompt.text, settings)
    ModelSession(harness.pair.target, use_cache=False).begin(ids)


def all_turns(arm: Arm, prompt: Prompt, settings: Settings, history: Turns = ()) -> tuple[Run, ...]:
    """The answers to all turns of a prompt, as the conversations of Spec-Bench and SPEED-Bench are run.

    Every arm continues with its own answers, and every turn has a prefill of the whole conversation so far. Raises
    UserError without an answer, and KeyboardInterrupt on Ctrl-C.
    """
    runs: list[Run] = []
    for text in (prompt.text, *prompt.later) if settings.uses_chat else (prompt.text,):
        try:
            runs.append(complete(arm.run(text, settings, history)))
        except UserError as error:
            raise UserError(f"Turn {len(runs) + 1}: {error}") if runs else error from error
        history = (*history, Turn(text, runs[-1].text))
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class PairedRuns:
    """All turns of a prompt by one arm, and by its baseline. `theirs` is None without the baseline's answers, and then
    there are no comparisons.
    """

    arm: Arm
    ours: tuple[Run, ...]
    theirs: tuple[Run, ...] | None
    comparisons: tuple[Comparison, ...] = ()

    @classmethod
    def of(cls, arm: Arm, runs: Sequence[tuple[Arm, tuple[Run, ...]]], settings: Settings) -> "PairedRuns":
        """`runs` are those of all arms, with this one."""
        ours = next(turns for one, turns in runs if one is arm)
        theirs = next((turns for _, turns in runs if turns[0].name == ours[0].baseline), None)
        if theirs is None:
            return cls(arm, ours, None)
        pairs = zip(ours, theirs, strict=False)
        return cls(arm, ours, theirs, tuple(compare_run(run, (run, other), settings) for run, other in pairs))

    @property
    def totals(self) -> Totals:
        return pooled_totals(self.ours)

    @property
    def baseline_totals(self) -> Totals | None:
        return None if self.theirs is None else pooled_totals(self.theirs)

    @property
    def speedup(self) -> float | None:
        """The ratio of tokens per second over all turns, if the speeds can be compared."""
        if self.theirs is None or self.comparisons[0].speedup is None:
            return None
        ours, theirs = self.totals.tokens_per_second, pooled_totals(self.theirs).tokens_per_second
        return ours / theirs if ours is not None and theirs else None

    @property
    def decode_speedup(self) -> float | None:
        return self.comparisons[0].decode_speedup if self.comparisons else None

    @property
    def same(self) -> bool | None:
        """Whether all texts are the baseline's, or None if they were not compared."""
        if not self.comparisons or self.comparisons[0].same is None:
            return None
        return not any(comparison.same is False for comparison in self.comparisons)


def pooled_totals(runs: Sequence[Run]) -> Totals:
    """Several answers of one arm as one.

    Drafts are unknown if nothing is known or if an answer's figures are not its own. An answer without figures among
    others with figures had no drafts, and as many forward passes as tokens.
    """
    if any(run.acceptance is not None and not run.acceptance.valid for run in runs):
        return Totals.of([Totals(run.new_tokens, run.seconds) for run in runs])
    totals = [_totals(run) for run in runs]
    if any(one.drafted is not None for one in totals):
        totals = [
            one if one.drafted is not None else replace(one, drafted=0, accepted=0, forwards=one.tokens)
            for one in totals
        ]
    return Totals.of(totals)


def _totals(run: Run) -> Totals:
    positions = run.accepted_by_position
    # A server may count accepted drafts, but not by position.
    known = positions is not None and (positions or not run.drafted)
    return Totals(
        run.new_tokens,
        run.seconds,
        run.drafted,
        run.accepted,
        run.target_forwards,
        run.rounds,
        tuple(accepted for accepted, _ in positions or ()) if known else None,
    )
