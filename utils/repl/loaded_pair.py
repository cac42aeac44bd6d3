"""A loaded pair and all that belongs to it: its limits, the harness that runs strategies on it, and its settings.

/load builds a new LoadedPair beside the current one, so that the session is unchanged if anything fails.
"""

from collections.abc import Callable
from dataclasses import dataclass

from utils.comparison.harness import Harness
from utils.comparison.warm_up import warm_up
from utils.config.settings import Settings
from utils.config.value_types import Limits
from utils.pairs.pair import Pair
from utils.repl.session_settings import SessionSettings
from utils.repl.status import limits_of
from utils.repl.tools import SessionTools

STARTING_ENGINE = "preparing and testing the engine ({}) ..."


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """Everything that lives as long as the pair. Only `settings` changes."""

    pair: Pair
    limits: Limits
    harness: Harness
    settings: SessionSettings

    @classmethod
    def prepare(cls, pair: Pair, tools: SessionTools, settings: Settings) -> "LoadedPair":
        """Start the engine and fit the settings to the models. Raises UserError if the engine cannot be used."""
        pair.engine.results, pair.engine.report = tools.results, tools.renderer.count
        limits = limits_of(pair)
        harness = Harness.of(pair, settings, tools.strategies)
        return cls(pair, limits, harness, SessionSettings(harness, limits, settings, tools.renderer.note))

    def introduce(self, note: Callable[[str], None]) -> None:
        """Report what is loaded and which engine computes it, and warm it up."""
        for line in (f"engine: {self.pair.engine.state.sentence()}", *self.pair.notes):
            note(line)
        note(f"warming up {self.pair.target_name}, drafter: {self.pair.drafter_name or 'none'} ...")
        self.warm_up()

    def warm_up(self) -> None:
        """Run every strategy once, so that no measured run pays for a first use."""
        warm_up(self.harness, self.settings.current)
