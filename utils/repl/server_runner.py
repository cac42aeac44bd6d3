"""Runs a prompt on the servers of the session, one after the other, and shows the answers.

A server that fails shows one sentence and has no run. The other servers still run.
"""

from dataclasses import dataclass, field
from typing import Protocol

from utils.comparison.harness import Harness
from utils.comparison.last_prompt import LastPrompt
from utils.comparison.server_requests import request_maker
from utils.comparison.server_runs import COLOURS, LocalRun, ServerPrompt, ServerRun, row_name
from utils.config.settings import Settings
from utils.decode.steps import FinishReason
from utils.prompts.conversation import Turns
from utils.screen.renderer import Renderer
from utils.screen.server_view import ServerView
from utils.servers.address import TARGET
from utils.servers.connection import Connection
from utils.text import decode


class Refusals(Protocol):
    """Shows why a row of the comparison did not run."""

    def explain(self, name: str, error: Exception) -> None: ...


@dataclass(slots=True)
class ServerRunner:
    """Runs one prompt on the servers. `runs` has the finished answers, and the last one may be interrupted."""

    harness: Harness
    renderer: Renderer
    settings: Settings
    refusals: Refusals
    runs: list[ServerRun] = field(default_factory=list)

    def run(self, text: str) -> bool:
        """Send the prompt to all servers. Returns whether Ctrl-C ended the series."""
        try:
            for index, connection in enumerate(self.harness.state.servers):
                view = ServerView(
                    self.renderer,
                    row_name(connection.address.name),
                    COLOURS[index % len(COLOURS)],
                    list(self.runs),
                )
                if self._ask(text, connection, view) is FinishReason.INTERRUPTED:
                    return True
        except KeyboardInterrupt:
            return True
        return False

    def _ask(self, text: str, connection: Connection, view: ServerView) -> FinishReason | None:
        """Send the prompt to one server. Returns how its answer ended, or None if it failed."""
        name = row_name(connection.address.name)
        view.begin()
        try:
            maker = request_maker(self.harness, text, self.settings, self._history(name))
            run = ServerRun(connection.address, connection.ask(maker, view.show))
        except Exception as error:
            view.failed()
            self.refusals.explain(name, error)
            return None
        self.runs.append(run)
        view.end(run)
        return run.finish

    def _history(self, name: str) -> Turns:
        """The conversation that a server continues, which is its own after the first turn."""
        if not self.settings.keeps_conversation:
            return ()
        baseline = self.harness.baseline.name
        return self.harness.state.conversations.history(name, baseline)

    def prompt(self, text: str, last: LastPrompt | None) -> ServerPrompt | None:
        """The runs, compared with their baselines, or None without servers. `last` has the local runs of the prompt."""
        names = [row_name(connection.address.name) for connection in self.harness.state.servers]
        if not names:
            return None
        histories = {name: self._history(name) for name in names}
        prompt = ServerPrompt.of(text, self.settings, self.runs, histories=histories, target=_local(last))
        for run, comparison in prompt.compared:
            if not histories[run.name]:
                self.harness.state.servers.note_text(run.address.name, text, comparison.same)
        return prompt


def _local(last: LastPrompt | None) -> LocalRun | None:
    """The target's own run as the baseline "target" of servers."""
    if last is None or last.target is None or not any(entry.strategy.name == TARGET for entry in last.compared):
        return None
    return LocalRun(last.target, decode(last.job.pair.tokenizer, last.target.tokens))
