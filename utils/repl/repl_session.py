"""One session: it processes lines, which are commands or prompts, and applies the effects of commands.

Settings, storage and models survive any line that fails. The caller decides where lines come from. The other modules of
this package load pairs, change settings, and run prompts and reports.
"""

from collections.abc import Callable, Sequence

from utils.commands import CommandContext
from utils.commands.shared.registry import (
    Action,
    ChangeSettings,
    Effect,
    Reply,
    RunLines,
    RunReport,
    ShowRows,
    UsePair,
    UseServers,
    UseStorage,
)
from utils.comparison.harness import Harness
from utils.config.settings import Settings
from utils.errors import UserError
from utils.freed_memory import release_memory
from utils.pairs.pair import Pair
from utils.repl.loaded_pair import STARTING_ENGINE, WARMING_UP, LoadedPair, SessionTools, load_beside
from utils.repl.runner import Runner, Verdict, explain_error
from utils.repl.status import first_screen, model_facts, server_screen, status_line
from utils.servers.address import ServerAddress
from utils.text import quoted_text, unescape

MAX_NESTED_FILES = 8
# Typed without a slash they are also commands; hardly anyone wants a model to answer them.
LONE_WORDS = {"exit": "/quit", "quit": "/quit", "help": "/help", "?": "/help"}


class ReplSession:
    """Processes lines with the loaded pair."""

    def __init__(
        self, pair: Pair | None, tools: SessionTools, settings: Settings, servers: Sequence[ServerAddress] = ()
    ) -> None:
        """Without models `pair` is None, and the session only talks to servers. Raises UserError if the engine cannot
        be used.
        """
        self._tools, self._renderer = tools, tools.renderer
        self.succeeded = ""  # the last command, if it did what it says
        self._nested_files = 0  # /run files that are being processed
        self._loaded = LoadedPair.prepare(pair, tools, settings, defers_costs=tools.interactive)
        self.harness.state.servers.use(servers)

    @property
    def pair(self) -> Pair:
        """The loaded models. Raises UserError if no models are loaded."""
        return self.harness.pair

    @property
    def harness(self) -> Harness:
        return self._loaded.harness

    @property
    def settings(self) -> Settings:
        return self._loaded.settings.current

    def introduce(self, seconds: float = 0.0) -> None:
        """Show what is loaded. The warm-up runs behind the prompt, or else before the first run.

        `seconds` is the duration of the start, for the first screen of an interactive session.
        """
        renderer, pair, warming = self._renderer, self.harness.loaded, self._loaded.warming
        if not self._tools.interactive:
            if pair is not None:
                self._loaded.introduce(renderer.note)
                warming.is_planned = True
            return
        if pair is None:
            lines = server_screen(self.harness.state.servers.addresses, self.settings, renderer.width)
        else:
            lines = first_screen(pair, self.settings, seconds, renderer.width)
        for line in lines:
            renderer.reply(line)
        if pair is not None:
            for line in pair.notes:
                renderer.note(line)
            warming.start()

    def close(self) -> None:
        """End the work behind the prompt, and close the connections to servers."""
        self._loaded.warming.stop()
        self.harness.state.servers.close()

    def status(self) -> str:
        """The text of the toolbar."""
        return status_line(self.harness.loaded, self.settings, self.harness.state)

    def handle(self, line: str) -> Verdict:
        r"""Process a typed line: a command, a prompt (in which \n and \t are a newline and a tab), or nothing.

        A text in three quotation marks is a prompt exactly as it is.
        """
        if not line.strip():
            return Verdict.DONE
        if (text := quoted_text(line)) is not None:
            return self.send(text) if text.strip() else Verdict.DONE
        if line.lstrip().startswith("/"):
            return self._guarded(self._run_command, line, at_once=self._tools.registry.is_at_once(line))
        word = line.strip().lower()
        if word in LONE_WORDS and not line[0].isspace():
            return self._guarded(self._run_command, LONE_WORDS[word], at_once=True)
        # A lone word after a blank is sent without the blank.
        return self._guarded(self._run_prompt, unescape(line.strip() if word in LONE_WORDS else line))

    def send(self, text: str) -> Verdict:
        """Run a prompt without changes, even if it looks like a command."""
        return self._guarded(self._run_prompt, text)

    def _guarded(self, action: Callable[[str], Verdict], text: str, *, at_once: bool = False) -> Verdict:
        """Run an action such that errors do not end the session. `at_once` is True if it uses no models."""
        try:
            if not at_once:  # nothing else may use the models during a warm-up behind the prompt
                if self._loaded.warming.is_running:
                    self._renderer.progress(WARMING_UP)
                self._loaded.warming.wait()
            return action(text)
        except KeyboardInterrupt:
            self._renderer.note("Interrupted.")
            return Verdict.INTERRUPTED
        # Nobody reads the output any more, so no error can be shown. The entry point ends the program.
        except BrokenPipeError:
            raise
        except Exception as error:
            explain_error(self._renderer, error)
        finally:
            self._renderer.end_progress()
        return Verdict.FAILED

    def _run_command(self, line: str) -> Verdict:
        """Run a command and apply its effects in order. The verdict is that of the last effect."""
        registry, verdict = self._tools.registry, Verdict.DONE
        context = CommandContext(
            self.settings,
            registry,
            self.harness,
            self._loaded.limits,
            facts=lambda: model_facts(self.harness.loaded, self.settings, self.harness.state.servers.addresses),
            pairs=self._tools.pairs,
            page=self._renderer.page,
        )
        for effect in registry.run(line, context):
            verdict = self._apply(effect)
        self.succeeded = line if verdict is Verdict.DONE else ""
        return verdict

    def _apply(self, effect: Effect) -> Verdict:
        renderer, settings = self._renderer, self._loaded.settings
        match effect:
            case Reply(text):
                renderer.reply(text)
            case ShowRows(rows, ()):
                renderer.rows(rows)
            case ShowRows(rows, headings):
                renderer.table(headings, rows)
            case Action.CLEAR_SCREEN:
                renderer.clear()
            case ChangeSettings(changed, reply):
                settings.change(changed)
                if reply:
                    renderer.reply(reply)
            case Action.RETEST_ENGINE:
                renderer.progress(STARTING_ENGINE.format(self.settings.engine))
                renderer.reply(settings.retest_engine())
            case Action.UNDO_SETTINGS:
                renderer.reply(settings.undo())
            case UseServers(addresses):
                self.harness.state.servers.use(addresses)
            case UseStorage(storage):
                self.harness.state.storage = storage
            case Action.FORGET_CONVERSATIONS:
                self.harness.state.conversations.forget()
            case UsePair(request):
                # If they cannot be loaded or prepared, the session stays as it is.
                self._loaded = load_beside(request, self._loaded, self._tools)
                release_memory()
            case RunLines(lines):
                return self._run_lines(lines)
            case RunReport(report):
                self._finish_warm_up()
                try:
                    return self._runner.report(report)
                finally:
                    settings.follow_drafter()  # /pair doctor may have changed how the drafter is read
            case Action.QUIT:
                return Verdict.QUIT
        return Verdict.DONE

    @property
    def _runner(self) -> Runner:
        return Runner(self.harness, self._renderer, self._tools.records, echo=not self._tools.interactive)

    def _finish_warm_up(self) -> None:
        """Finish the warm-up before a measurement."""
        if self._loaded.warming.is_planned:
            self._renderer.progress(WARMING_UP)
        self._loaded.warming.finish()

    def _run_prompt(self, text: str) -> Verdict:
        self._finish_warm_up()
        return self._runner.prompt(text, self.settings)

    def _run_lines(self, lines: Sequence[str]) -> Verdict:
        """Process lines as if they were typed, until one quits or is interrupted."""
        if self._nested_files >= MAX_NESTED_FILES:
            raise UserError(f"At most {MAX_NESTED_FILES} files may /run each other: does one of them run itself?")
        self._nested_files += 1
        failed = False
        try:
            for line in lines:
                self._renderer.note(f"> {line}")
                verdict = self.handle(line)
                if verdict in (Verdict.QUIT, Verdict.INTERRUPTED):
                    return verdict
                failed = failed or verdict is Verdict.FAILED
        finally:
            self._nested_files -= 1
        return Verdict.FAILED if failed else Verdict.DONE
