"""Workbench: one session. It takes lines, carries out commands, runs every enabled strategy on a prompt and compares the runs.

It knows neither a terminal (lines come from whoever reads them) nor a decoder (strategies are handed in); everything it has to say goes
to the renderer. Settings, storage and models outlive any failed line.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from utils.caching import ModelSession, context_length
from utils.commands import Outcome, Registry, Situation
from utils.commands.registry import Action
from utils.errors import UserError
from utils.events import FinishReason
from utils.kinds import Limits, StorageSpec
from utils.models.failures import is_out_of_memory
from utils.models.prompting import has_chat_template, prompt_ids
from utils.printing import Renderer, RunView
from utils.records import RecordFile, record_of
from utils.results import Generation, collect, compare
from utils.seeding import fix_seeds
from utils.settings import Settings
from utils.strategies import Job, Strategy
from utils.text import encodable, unescaped

Result = tuple[Strategy, Generation]
NO_TEMPLATE = "chat: off (this tokenizer has no chat template; prompts are sent as they stand)"


class Verdict(Enum):
    """How a line went."""

    DONE = auto()
    FAILED = auto()
    INTERRUPTED = auto()
    QUIT = auto()


@dataclass(frozen=True, slots=True)
class Tools:
    """What a session is made of besides its models: the strategies, the commands, the screen, how to build a storage, where records go.

    interactive: whether the prompts are typed on the screen that shows the answers.
    """

    strategies: Sequence[Strategy]
    registry: Registry
    renderer: Renderer
    make_storage: Callable[[StorageSpec, int], Any]
    records: RecordFile | None = None
    interactive: bool = True


class Workbench:
    """A loaded pair, the settings of the moment and the n-gram storage."""

    def __init__(self, pair: Any, tools: Tools, settings: Settings, limits: Limits) -> None:
        self._pair, self._tools, self._limits = pair, tools, limits
        self._renderer = tools.renderer
        self.settings = self._allowed(settings)
        if settings.chat and not self.settings.chat:
            self._renderer.note(NO_TEMPLATE)
        self._storage = tools.make_storage(self.settings.ngram_storage, limits.vocabulary)

    def warm_up(self) -> None:
        """Run every strategy that the models allow for a few tokens, so that no measured run pays for a first use."""
        settings = replace(self.settings, length=min(4, self._limits.context), beams=2)
        storage = self._tools.make_storage(settings.ngram_storage, self._limits.vocabulary)
        job = Job(prompt=[0, 0, 0, 0], pair=self._pair, settings=settings, storage=storage)
        for strategy in self._runnable(self._tools.strategies):
            with suppress(UserError):  # it will be said when it is asked for
                if collect(strategy.steps(job)).finish is FinishReason.INTERRUPTED:
                    raise KeyboardInterrupt

    def handle(self, line: str) -> Verdict:
        """Carry out one typed line: a command, a prompt (in which \\n and \\t stand for newline and tab), or nothing."""
        if not line.strip():
            return Verdict.DONE
        if line.lstrip().startswith("/"):
            return self._guarded(self._command, line)
        return self._guarded(self._prompt, unescaped(line))

    def send(self, text: str) -> Verdict:
        """Run a prompt as it stands, never as a command."""
        return self._guarded(self._prompt, text)

    def _guarded(self, work: Callable[[str], Verdict], text: str) -> Verdict:
        """Whatever happens in a line, the session lives on."""
        try:
            return work(text)
        except KeyboardInterrupt:
            self._renderer.note("Interrupted.")
            return Verdict.INTERRUPTED
        except BrokenPipeError:
            raise
        except Exception as error:
            self._explain(error)
        return Verdict.FAILED

    def _explain(self, error: Exception) -> None:
        """A sentence for what a user can mend, a traceback for a bug."""
        if isinstance(error, UserError):
            self._renderer.error(str(error))
        elif is_out_of_memory(error):
            self._renderer.error("Out of memory: try a shorter /length, a shorter prompt, or a smaller or quantized model.")
        else:
            self._renderer.crash()

    def _command(self, line: str) -> Verdict:
        situation = Situation(self.settings, self._tools.registry, self._limits, self._facts())
        return self._apply(self._tools.registry.run(line, situation))

    def _apply(self, outcome: Outcome) -> Verdict:
        reply = outcome.reply
        if outcome.settings is not None:
            allowed = self._allowed(outcome.settings)
            if allowed != outcome.settings:
                reply = NO_TEMPLATE
            self._change(allowed)
        if reply:
            self._renderer.reply(reply)
        if outcome.rows:
            self._renderer.rows(outcome.rows)
        if outcome.action is Action.CLEAR:
            self._renderer.clear()
        if outcome.prompt is not None:
            return self._prompt(outcome.prompt)
        return Verdict.QUIT if outcome.action is Action.QUIT else Verdict.DONE

    def _change(self, settings: Settings) -> None:
        if settings.ngram_storage != self.settings.ngram_storage:
            self._storage = self._tools.make_storage(settings.ngram_storage, self._limits.vocabulary)
        self.settings = settings

    def _allowed(self, settings: Settings) -> Settings:
        return settings if not settings.chat or has_chat_template(self._pair.tokenizer) else replace(settings, chat=False)

    def _prompt(self, text: str) -> Verdict:
        text = encodable(text)
        ids = prompt_ids(self._pair.tokenizer, text, chat=self.settings.chat, system=self.settings.system)
        ModelSession(self._pair.target, rewinds=False).begin(ids)  # an unusable prompt is refused once, not by every strategy
        chosen = self._chosen(len(ids))
        if self.settings.reset_in_between:
            self._storage.reset()
        if not self._tools.interactive:
            self._renderer.prompt(text)
        job = Job(prompt=ids, pair=self._pair, settings=self.settings, storage=self._storage)
        results: list[Result] = []
        interrupted = self._run_all(chosen, job, results)
        self._report(results, job, text)
        if interrupted:
            return Verdict.INTERRUPTED
        return Verdict.DONE if len(results) == len(chosen) else Verdict.FAILED

    def _chosen(self, prompt_tokens: int) -> list[Strategy]:
        """The strategies that are on and can run; a note for each reason to draft nothing."""
        wanted = [strategy for strategy in self._tools.strategies if strategy.is_on(self.settings)]
        chosen = self._runnable(wanted)
        if len(chosen) < len(wanted):
            self._renderer.note("No drafter is loaded: strategies that need one are left out (--drafter loads one).")
        if not chosen:
            raise UserError("No strategy is left to run; turn one on, for example with /target on.")
        bound = context_length(self._pair.drafter) if any(strategy.needs_drafter for strategy in chosen) else None
        if bound is not None and prompt_tokens >= bound:
            self._renderer.note(f"The prompt has {prompt_tokens} tokens and the drafter a context of {bound}: it will draft nothing.")
        return chosen

    def _runnable(self, strategies: Sequence[Strategy]) -> list[Strategy]:
        return [strategy for strategy in strategies if self._pair.drafter is not None or not strategy.needs_drafter]

    def _run_all(self, strategies: list[Strategy], job: Job, results: list[Result]) -> bool:
        """One run after the other from the same seed, each added to `results`; whether Ctrl-C ended it. A run that fails says why."""
        try:
            for strategy in strategies:
                self._renderer.title(strategy.title, strategy.colour)
                fix_seeds(job.settings.seed)
                view = RunView(self._renderer, job.pair.tokenizer, strategy.colour, rounds=job.settings.debug and strategy.drafts)
                try:
                    run = collect(strategy.steps(job), view.show)
                except Exception as error:
                    self._explain(error)
                    continue
                results.append((strategy, run))
                view.end()
                self._renderer.figures(run, forwards=strategy.uses_target)
                if run.finish is FinishReason.INTERRUPTED:
                    return True
        except KeyboardInterrupt:
            return True
        return False

    def _report(self, results: list[Result], job: Job, prompt: str) -> None:
        """Records first: they are kept even if the table is interrupted."""
        target = next((run for strategy, run in results if strategy.name == "target"), None)
        compared = [(strategy, run, compare(run, target)) for strategy, run in results]
        if self._tools.records is not None:
            self._tools.records.append([record_of(strategy, job, run, comparison, prompt=prompt) for strategy, run, comparison in compared])
        if compared:
            self._renderer.comparison(compared)

    def _facts(self) -> tuple[tuple[str, str], ...]:
        pair = self._pair
        return (
            ("target model", pair.target_name),
            ("drafter model", f"{pair.drafter_name} ({pair.drafter_kind})" if pair.drafter is not None else "none"),
            ("device, dtype", f"{pair.device}, {pair.dtype}"),
            ("context", f"{self._limits.context} tokens"),
            ("vocabulary", f"{self._limits.vocabulary} ids"),
        )
