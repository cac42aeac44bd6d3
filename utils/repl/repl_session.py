"""Workbench: one session. It takes lines, carries out commands, and has the enabled strategies run on every prompt.

It knows neither a terminal (lines come from whoever reads them) nor a decoder (strategies are handed in); everything it has to say goes
to the renderer. Settings, storage and models outlive any failed line.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from utils.commands import Outcome, Registry, Situation
from utils.commands.registry import Action
from utils.comparison import warm_up as preparing
from utils.comparison.asking import asked
from utils.comparison.harness import Asked, Bench, Probes, StorageTools
from utils.comparison.records import RecordFile
from utils.comparison.strategies import Strategy
from utils.comparison.warm_up import measured
from utils.config.settings import Settings, fitted, setting_fields, shown
from utils.errors import UserError
from utils.freed_memory import give_back_memory
from utils.pairs.known_pairs import PAIRS, PairSpec
from utils.pairs.request import PairRequest
from utils.prompts.chat_template import has_chat_template
from utils.prompts.conversation import counted
from utils.repl.runner import Runner, Verdict, explain_error
from utils.repl.status import drafters_left, facts_of, limits_of, status_of
from utils.screen.renderer import Renderer
from utils.text import encodable, unescaped

MOST_NESTED = 8
PREPARING = "preparing and testing the engine ({}) ..."
NOT_KEPT = "This turn is no part of the conversation: not every strategy has finished it."
NO_TEMPLATE = "chat: off (this tokenizer has no chat template; prompts are sent as they stand)"


@dataclass(frozen=True, slots=True)
class Tools:
    """What a session is made of besides its models: the strategies, the commands, the screen, how to build a storage, where records go.

    load: other models, as a request asks for them; pairs: those known by name.
    interactive: whether the prompts are typed on the screen that shows the answers.
    """

    strategies: Sequence[Strategy]
    registry: Registry
    renderer: Renderer
    storages: StorageTools
    records: RecordFile | None = None
    interactive: bool = True
    probes: Probes = field(default_factory=Probes)
    load: Callable[[PairRequest, Callable[[str], None]], Any] | None = None
    pairs: Mapping[str, PairSpec] = field(default_factory=lambda: PAIRS)


class Workbench:
    """A loaded pair, the settings of the moment and the n-gram storage."""

    def __init__(self, pair: Any, tools: Tools, settings: Settings) -> None:
        self._tools, self._renderer = tools, tools.renderer
        self._past: list[Settings] = []
        self._nested = 0  # files of lines that are being run
        self._take(pair, settings)

    def _take(self, pair: Any, settings: Settings) -> None:
        """Go on with a pair, and with such settings as it allows."""
        self._pair, self._limits = pair, limits_of(pair)
        self._bench = Bench(
            pair, self._tools.strategies, self._tools.storages, self._limits.vocabulary, self._tools.probes
        )
        self._runner = Runner(self._bench, self._renderer, self._tools.records)
        self.settings = self._allowed(
            fitted(replace(settings, length=min(settings.length, self._limits.context)), self._limits)
        )
        self._bench.compute(settings)
        with suppress(UserError):  # a pair that cannot draft will say so when it is asked to
            self.settings = measured(self._bench, self.settings)
        if settings.chat and not self.settings.chat:
            self._renderer.note(NO_TEMPLATE)
        self._bench.memory.storage = self._bench.new_storage(self.settings)

    def load(self, request: PairRequest) -> None:
        """Go on with other models. Raises what loading and preparing them raises; all is then as it was."""
        assert self._tools.load is not None
        before, threads = (self._pair, self._limits, self._bench, self._runner, self.settings), torch.get_num_threads()
        pair = self._tools.load(request, self._renderer.note)
        kept, turns = (
            bool(self._bench.memory.storage) and not self.settings.reset_in_between,
            len(self._bench.memory.conversations),
        )
        try:
            self._renderer.note(PREPARING.format(self.settings.engine))
            kinds = drafters_left(self.settings.drafter_kind, pair)
            self._take(pair, replace(self.settings, drafter_kind=kinds, costs=None))
            self.introduce()
        except BaseException:
            self._pair, self._limits, self._bench, self._runner, self.settings = before
            torch.set_num_threads(threads)  # the old engine was tested with these
            raise
        if kept:
            self._renderer.note("The n-gram storage begins anew: what it held was the old target's.")
        if turns:
            self._renderer.note(f"The conversation begins anew: {counted(turns)} forgotten.")
        self._past.clear()  # costs and kinds of drafters were the old pair's
        del before
        give_back_memory()

    def introduce(self) -> None:
        """Say what is loaded and how it is computed, and warm it up."""
        for note in (f"engine: {self._pair.engine.state.sentence()}", *self._pair.notes):
            self._renderer.note(note)
        self._renderer.note(f"warming up {self._pair.target_name}, drafter: {self._pair.drafter_name or 'none'} ...")
        self.warm_up()

    def warm_up(self) -> None:
        """Have every strategy run once, so that no measured run pays for a first use."""
        preparing.warm_up(self._bench, self.settings)

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
            explain_error(self._renderer, error)
        return Verdict.FAILED

    def _command(self, line: str) -> Verdict:
        situation = Situation(
            self.settings, self._tools.registry, self._bench, self._limits, facts_of(self._pair), self._tools.pairs
        )
        return self._apply(self._tools.registry.run(line, situation))

    def _apply(self, outcome: Outcome) -> Verdict:
        reply = outcome.reply
        if outcome.settings is not None:
            allowed = self._allowed(outcome.settings)
            if allowed != outcome.settings:
                reply = NO_TEMPLATE
            before = self.settings
            self._change(allowed)
            self._past += [before] if before != self.settings else []
        if outcome.storage is not None:
            self._bench.memory.storage = outcome.storage
        if reply:
            self._renderer.reply(reply)
        if outcome.rows:
            self._renderer.rows(outcome.rows)
        if outcome.columns:
            self._renderer.columns(outcome.columns)
        if outcome.action is Action.CLEAR:
            self._renderer.clear()
        if outcome.action is Action.UNDO:
            self._undo()
        if outcome.action is Action.RESET:
            self._bench.memory.conversations.forget()
        if outcome.lines:
            return self._run(outcome.lines)
        if outcome.prompt is not None:
            return self._prompt(outcome.prompt)
        if outcome.load is not None:
            self.load(outcome.load)
        if outcome.report is not None:
            return self._runner.report(outcome.report)
        return Verdict.QUIT if outcome.action is Action.QUIT else Verdict.DONE

    def _undo(self) -> None:
        if not self._past:
            raise UserError("Nothing was changed yet that could be taken back.")
        now, before = self.settings, fitted(self._past.pop(), self._limits)
        self._change(before)
        names = [name for name, entry in setting_fields().items() if shown(now, entry) != shown(self.settings, entry)]
        told = [f"{name}: {shown(self.settings, entry)}" for name, entry in setting_fields().items() if name in names]
        self._renderer.reply("; ".join(told) or "nothing is different")

    def _run(self, lines: Sequence[str]) -> Verdict:
        """Lines as if they were typed; the first that ends anything ends this too."""
        if self._nested >= MOST_NESTED:
            raise UserError("Files that run one another go no deeper: does one of them run itself?")
        self._nested += 1
        failed = False
        try:
            for line in lines:
                self._renderer.note(f"> {line}")
                verdict = self.handle(line)
                if verdict in (Verdict.QUIT, Verdict.INTERRUPTED):
                    return verdict
                failed = failed or verdict is Verdict.FAILED
        finally:
            self._nested -= 1
        return Verdict.FAILED if failed else Verdict.DONE

    def status(self) -> str:
        """The state of things in one line."""
        memory = self._bench.memory
        return status_of(self._pair, self.settings, memory.last, len(memory.conversations))

    def _change(self, settings: Settings) -> None:
        if settings.drafter_kind != self.settings.drafter_kind:
            settings = measured(self._bench, settings)  # refused before anything is changed
        if settings.ngram_storage != self.settings.ngram_storage:
            self._bench.memory.storage = self._bench.new_storage(settings)
        self._bench.memory.storage.limit = settings.ngram_limit
        if (settings.engine, settings.threads) != (self.settings.engine, self.settings.threads):
            self._bench.compute(settings)
            self._renderer.note(f"engine: {self._pair.engine.state.sentence()}")
            settings = replace(settings, costs=None)
        if settings.costs is None:
            with suppress(UserError):  # a pair that cannot draft will say so when it is asked to
                settings = measured(self._bench, settings)
        if not settings.turns and (said := self._bench.memory.conversations):
            self._renderer.note(f"The conversation is over: {counted(len(said))} forgotten.")
            said.forget()
        self.settings = settings

    def _allowed(self, settings: Settings) -> Settings:
        return (
            settings if not settings.chat or has_chat_template(self._pair.tokenizer) else replace(settings, chat=False)
        )

    def _prompt(self, text: str) -> Verdict:
        text = encodable(text)
        told = asked(self._bench, text, self.settings, self._renderer.note)
        if self.settings.reset_in_between:
            self._bench.memory.storage.reset()
            self._bench.memory.kept.texts.clear()
        if not self._tools.interactive:
            self._renderer.prompt(text)
        return self._turn(text, told) if self.settings.keeps_turns else self._runner.prompt(text, told)

    def _turn(self, text: str, told: Sequence[Asked]) -> Verdict:
        """A prompt that goes on with the conversations, if every strategy finishes it."""
        verdict = Verdict.FAILED
        try:
            verdict = self._runner.prompt(text, told)
        finally:
            if verdict is Verdict.DONE:
                self._bench.keep_turn()
            else:
                self._renderer.note(NOT_KEPT)
        return verdict
