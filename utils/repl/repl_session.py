"""One session: it processes lines, which are commands or prompts, applies the effects of commands, and runs prompts and
reports.

Settings, storage and models survive any line that fails. The caller decides where lines come from.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from enum import IntEnum
from functools import cache, partial
from traceback import clear_frames
from typing import Any

from ngram_assisted import NGramStorage
from utils.commands import CommandContext
from utils.commands.learn import drafter_race
from utils.commands.shared import registry
from utils.comparison.arms import Run
from utils.comparison.harness import Harness, LastPrompt, PlannedRun, divergence_of, unlike_target
from utils.comparison.records import Report, Row, report_records, run_records
from utils.comparison.training import Training
from utils.config.settings import Settings
from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.freed_memory import release_memory
from utils.metrics.divergence import Divergence
from utils.models.load_errors import is_out_of_memory
from utils.pairs.pair import Pair
from utils.pairs.request import PairRequest
from utils.prompts.conversation import with_reset_hint
from utils.repl.loaded_pair import STARTING_ENGINE, WARMING_UP, LoadedPair, SessionTools, load_beside
from utils.repl.status import first_screen, model_facts, server_screen, status_line
from utils.screen.renderer import Renderer
from utils.screen.run_view import PromptView, RunView, show_comparison, show_report
from utils.servers.address import ServerAddress
from utils.text import encodable, quoted_text, unescape

TURN_NOT_KEPT = "This turn is not part of the conversation, because not every strategy finished it."
NOT_EXPLAINED = "The reason why the texts differ could not be computed:"
OUT_OF_MEMORY = "Out of memory: try a shorter /length, a shorter prompt, or a smaller or quantized model."
NOTHING_FINISHED = "Stopped before anything was finished, so there is nothing to report."
MAX_NESTED_FILES = 8
# Typed without a slash they are also commands; hardly anyone wants a model to answer them.
LONE_WORDS = {"exit": "/quit", "quit": "/quit", "help": "/help", "?": "/help"}


class Verdict(IntEnum):
    """How a line ended. All but the last value are exit statuses, too."""

    DONE = 0
    FAILED = 1
    UNDECIDED = 3
    INTERRUPTED = 130
    QUIT = -1


def explain_error(renderer: Renderer, error: Exception) -> None:
    """Show one sentence for an error that the user can fix, and a traceback for a bug."""
    if isinstance(error, UserError):
        renderer.error(str(error))
        return
    if is_out_of_memory(error):
        renderer.error(OUT_OF_MEMORY)
        clear_frames(error.__traceback__)  # their local variables hold the tensors that fill the memory
        release_memory()
    else:
        renderer.crash()


class ReplSession:
    """Processes lines with the loaded pair and the servers. Results of prompts and reports are shown and stored."""

    def __init__(
        self, pair: Pair | None, tools: SessionTools, settings: Settings, servers: Sequence[ServerAddress] = ()
    ) -> None:
        """Without models `pair` is None, and the session only talks to servers. Raises UserError if the engine cannot
        be used.
        """
        self._tools, self._renderer = tools, tools.renderer
        self.succeeded = ""  # the last command, if it did what it says
        self._nested_files = 0  # /run files that are being processed
        self._loaded = LoadedPair(pair, tools, settings, defers_costs=tools.interactive)
        self.harness.state.servers.use(servers)

    @property
    def harness(self) -> Harness:
        return self._loaded.harness

    @property
    def settings(self) -> Settings:
        return self._loaded.settings

    def introduce(self, seconds: float = 0.0) -> None:
        """Show what is loaded, and in how many seconds. The warm-up runs behind the prompt, or before the first run."""
        renderer, pair, warming = self._renderer, self.harness.loaded, self._loaded.warming
        if not self._tools.interactive:
            if pair is not None:
                self._loaded.introduce()
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
        self._use_training(None)
        self.harness.state.servers.close()

    def status(self) -> str:
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

    def send(self, text: str, request: str = "") -> Verdict:
        """Run a prompt without changes, even if it looks like a command. `request` has further fields of its own."""
        return self._guarded(partial(self._run_prompt, request=request), text)

    def _guarded(self, action: Callable[[str], Verdict], text: str, *, at_once: bool = False) -> Verdict:
        """Run an action such that errors do not end the session. `at_once` is True if it uses no models."""
        training = None if at_once else self.harness.state.training
        try:
            if not at_once:  # nothing else may use the models during a warm-up behind the prompt
                if self._loaded.warming.is_alive():
                    self._renderer.progress(WARMING_UP)
                self._loaded.warming.wait()
            with nullcontext() if training is None else training.paused():
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
        commands, verdict = self._tools.registry, Verdict.DONE
        context = CommandContext(
            self.settings,
            commands,
            self.harness,
            self._loaded.limits,
            facts=lambda: model_facts(self.harness.loaded, self.settings, self.harness.state.servers.addresses),
            pairs=self._tools.pairs,
            page=self._renderer.page,
        )
        for effect in commands.run(line, context):
            verdict = self._apply(effect)
        self.succeeded = line if verdict is Verdict.DONE else ""
        return verdict

    def _apply(self, effect: registry.Effect) -> Verdict:
        renderer = self._renderer
        match effect:
            case registry.Reply(text):
                renderer.reply(text)
            case registry.ShowRows(rows, ()):
                renderer.rows(rows)
            case registry.ShowRows(rows, headings):
                renderer.table(headings, rows)
            case registry.Action.CLEAR_SCREEN:
                renderer.clear()
            case registry.ChangeSettings(changed, reply):
                self._loaded.change(changed)
                if reply:
                    renderer.reply(reply)
            case registry.Action.RETEST_ENGINE:
                renderer.progress(STARTING_ENGINE.format(self.settings.engine))
                renderer.reply(self._loaded.retest_engine())
            case registry.Action.UNDO_SETTINGS:
                renderer.reply(self._loaded.undo())
            case registry.UseServers(addresses):
                self.harness.state.servers.use(addresses)
            case NGramStorage():
                self.harness.state.storage = effect
            case registry.UseTraining(start):
                self._use_training(start)
            case registry.RaceDrafters():
                return self._race_drafters(effect)
            case registry.Action.FORGET_CONVERSATIONS:
                self.harness.state.conversations.forget()
            case PairRequest():
                # If they cannot be loaded or prepared, the session stays as it is. Nothing else may hold the old pair.
                self._loaded = load_beside(effect, self._loaded, self._tools)
                release_memory()
            case registry.RunLines(lines):
                return self._run_lines(lines)
            case Report():
                self._finish_warm_up()
                return self._report(effect)
            case registry.Action.QUIT:
                return Verdict.QUIT
        return Verdict.DONE

    def _finish_warm_up(self) -> None:
        if self._loaded.warming.is_planned:
            self._renderer.progress(WARMING_UP)
        self._loaded.warming.finish()

    def _run_prompt(self, text: str, request: str = "") -> Verdict:
        self._finish_warm_up()
        training = self.harness.state.training
        if training is not None and not training.is_running and not training.was_raced:
            # An error of the training must not cost the prompt.
            race = drafter_race(self.harness, self.settings)
            if self._guarded(lambda _: self._race_drafters(race), text) is Verdict.INTERRUPTED:
                return Verdict.INTERRUPTED
        settings = self.settings
        return self._answer(text, replace(settings, request=request) if request else settings)

    def _use_training(self, start: Callable[[], Training] | None) -> None:
        state = self.harness.state
        if state.training is not None:
            state.training.close()
        state.training = None if start is None else start()

    def _race_drafters(self, race: registry.RaceDrafters) -> Verdict:
        """Wait for the training, race, and use the new drafter if it has won."""
        state = self.harness.state
        assert state.training is not None
        try:
            verdict = self._apply(race.report)
        except Exception:  # the training has failed, or the records of a finished race cannot be written
            self._end_training(race)
            raise
        if verdict is Verdict.INTERRUPTED:
            state.training.was_raced |= not state.training.is_running
        else:
            self._end_training(race)
        return verdict

    def _end_training(self, race: registry.RaceDrafters) -> None:
        if (pair := race.winner()) is not None:
            self._loaded.use_drafter(pair)
        self._use_training(None)

    def _run_lines(self, lines: Sequence[str]) -> Verdict:
        """Process lines as if they were typed, until one quits or is interrupted."""
        if self._nested_files >= MAX_NESTED_FILES:
            raise UserError(f"At most {MAX_NESTED_FILES} files may /run each other: does one of them run itself?")
        self._nested_files += 1
        ended = set[Verdict]()
        try:
            for line in lines:
                self._renderer.note(f"> {line}")
                ended.add(verdict := self.handle(line))
                if verdict in (Verdict.QUIT, Verdict.INTERRUPTED):
                    return verdict
        finally:
            self._nested_files -= 1
        return next((one for one in (Verdict.FAILED, Verdict.UNDECIDED) if one in ended), Verdict.DONE)

    def _answer(self, text: str, settings: Settings) -> Verdict:
        """Run a prompt, and keep the turn if every arm finishes it. Raises UserError for a prompt that is refused."""
        # Bytes of the command line that are not UTF-8 are lone surrogates here, which tokenizers refuse.
        text = encodable(text)
        # Before the storage is emptied, so that a refused prompt changes nothing.
        planned = self.harness.plan(text, settings)
        self.harness.state.prompts.append(text)
        if settings.reset_in_between:
            self.harness.state.storage.reset()
            self.harness.state.caches.texts.clear()
        self._renderer.prompt(text, echo=not self._tools.interactive)
        verdict = Verdict.FAILED  # unless the runs return a verdict, so an exception counts as failed
        try:
            verdict = self._run_and_compare(text, planned, settings)
        finally:
            if settings.keeps_conversation and verdict is Verdict.DONE:
                self.harness.keep_turn()
            elif settings.keeps_conversation:
                self._renderer.note(TURN_NOT_KEPT)
        return verdict

    def _run_and_compare(self, text: str, planned: Sequence[PlannedRun], settings: Settings) -> Verdict:
        runs: list[Run] = []
        interrupted = self._run_all(text, planned, settings, runs)
        # Before the comparison, which runs the target again and may be interrupted.
        state = self.harness.state
        last = state.last = LastPrompt.of(text, settings, planned, runs)
        for _, run, comparison in last.servers:
            if run.address is not None and not last.histories[run.name]:
                state.servers.note_text(run.address.name, text, comparison.same)
        self._compare(last, explain=not interrupted)
        if interrupted:
            return Verdict.INTERRUPTED
        return Verdict.DONE if len(runs) == len(planned) else Verdict.FAILED

    def _run_all(self, text: str, planned: Sequence[PlannedRun], settings: Settings, runs: list[Run]) -> bool:
        """Run the arms in order, and add each run to `runs`. Returns whether Ctrl-C ended them."""
        tokenizer = self.harness.pair.tokenizer if self.harness.has_pair else None
        prompt = PromptView(self._renderer, tokenizer, settings)
        refused: dict[str, str] = {}  # the first arm that was refused for each reason, which is shown once
        try:
            for arm, history in planned:
                view = RunView(prompt, arm)
                try:
                    run = arm.run(text, settings, history, view)
                    runs.append(run)  # before its last lines, which may fail
                    view.end(run)
                except Exception as error:
                    view.failed()
                    shown = with_reset_hint(error, history)
                    first = refused.setdefault(str(shown), arm.name) if isinstance(shown, UserError) else arm.name
                    if first == arm.name:
                        explain_error(self._renderer, shown)
                    else:
                        self._renderer.error(f"Not run, for the same reason as {first}.")
                    continue
                if run.finish is FinishReason.INTERRUPTED:
                    return True
        except KeyboardInterrupt:
            return True
        return False

    def _compare(self, last: LastPrompt, *, explain: bool) -> None:
        """Show the table, and a line for each text that differs from the target's. The records are always stored."""
        causes: dict[str, Divergence] = {}
        try:
            show_comparison(self._renderer, last, self._explain(last, causes) if explain else ())
        except KeyboardInterrupt:
            self._renderer.note("The comparison was stopped; the runs are kept.")
            raise
        except Exception as error:
            self._renderer.note(NOT_EXPLAINED)
            explain_error(self._renderer, error)
        finally:
            self.harness.state.causes = causes
            self._add(partial(run_records, last, causes, self.harness.loaded))

    def _explain(self, last: LastPrompt, causes: dict[str, Divergence]) -> Iterator[tuple[str, Divergence]]:
        """Compute the cause of each difference, and add it to `causes` at once."""
        for strategy, run in unlike_target(last):
            self._renderer.count(f"{strategy.name}: comparing its logits with target-only ...")
            causes[strategy.name] = divergence_of(last, strategy, run, self.harness.state.rounding)
            yield strategy.name, causes[strategy.name]

    def _report(self, report: Report) -> Verdict:
        """Run a report. After Ctrl-C the rows so far are shown and recorded."""
        rows: list[Row] = []
        finished = False
        try:
            rows.extend(report.rows)  # Ctrl-C cannot come between two rows, and what came before it is kept
            finished = True
        except KeyboardInterrupt:
            self._renderer.note("Stopped. Finished so far:" if rows else NOTHING_FINISHED)
        finally:
            self._renderer.end_progress()
            if rows:  # also after an error, which is raised again afterwards
                self._conclude(report, rows, finished=finished)
        return Verdict(report.status(rows)) if finished else Verdict.INTERRUPTED

    def _conclude(self, report: Report, rows: Sequence[Row], *, finished: bool) -> None:
        pair = self.harness.loaded
        other = None if pair is None else pair.engine.faster_baseline()
        # Servers have their own baselines.
        own = any(row.get("speedup") is not None and "baseline" not in row for row in rows)
        lines = [*report.conclude(rows), *([other.sentence] if other is not None and own else [])]
        records = report_records(report, rows, lines, pair, finished=finished)
        try:
            show_report(self._renderer, report, rows, lines)
        finally:
            self._add(lambda: records)

    def _add(self, records: Callable[[], list[dict[str, Any]]]) -> None:
        """Store a result, whose records are made once: for the file, or when they are exported."""
        self.harness.state.records = cache(records)
        if self._tools.records is not None:
            self._tools.records.append(self.harness.state.records())
