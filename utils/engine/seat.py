"""Seat: which engine computes the models, at most one at a time, and what has been tested of it."""

from collections.abc import Callable, Mapping, Sequence
from datetime import date

from utils.engine.layer_engine import LayerEngine, ParkingEngine, Report, unreported
from utils.engine.selftest import WIDTHS

PLAIN = "plain"
MAX_REASON = 200  # characters of an error message
Attempt = Callable[[LayerEngine], str]  # installs an engine; returns why that failed


class Seat:
    """The engines of a pair by name. `name` is the one that is installed; initially the plain one.

    However an installation ends, by an error or by Ctrl-C, either the requested engine is installed or the plain one.
    """

    def __init__(self, engines: Mapping[str, LayerEngine]) -> None:
        self.engines = engines
        self.name = PLAIN
        self._tested: dict[str, set[int]] = {}  # numbers of threads with which the self-test passed
        self._layouts: dict[str, Mapping[str, int]] = {}  # of engines that have been installed
        self._below = PLAIN  # the engine under the present one, during trials

    @property
    def engine(self) -> LayerEngine:
        return self.engines[self.name]

    def tested_counts(self) -> set[int]:
        """Return the numbers of threads with which the installed engine passed its self-test."""
        return self._tested.get(self.name, set())

    def is_verified(self, threads: int) -> bool:
        """Return whether the installed engine keeps a promise that was tested with this number of threads."""
        return bool(self.engine.promise) and threads in self.tested_counts()

    def install(self, name: str, thread_counts: Sequence[int], report: Report = unreported) -> str:
        """Install an engine, in layouts that suit these numbers of threads. Returns why that failed.

        What it promises is tested by `test_threads`. An engine that has been installed before gets a short test.
        """
        if name == self.name or self._switch(name):
            return ""
        if name in self._layouts:
            return self.install_tested(name, self._layouts[name], self._tested.get(name, set()))

        def attempt(engine: LayerEngine) -> str:
            return engine.install(thread_counts, lambda text: report(f"engine {name}: {text}"))

        return self._seated(name, attempt, set())

    def install_tested(self, name: str, layouts: Mapping[str, int], tested_counts: set[int]) -> str:
        """Install an engine that passed its test before, with one verify width as a check. Returns why that failed."""
        # Another width on another day.
        width = WIDTHS[date.today().toordinal() % (len(WIDTHS) - 1)]
        return self._seated(name, lambda engine: engine.install_tested(layouts, width), tested_counts)

    def test_threads(self, count: int, report: Report = unreported) -> str:
        """Test the installed engine with a number of threads unless that was done. Returns why it failed."""
        try:
            failure = "" if count in self.tested_counts() else self.engine.self_test(count, report)
        except Exception as error:  # as in an installation
            failure = reason_of(error)
        if not failure:
            self._tested.setdefault(self.name, set()).add(count)
        return failure

    def can_switch(self, names: Sequence[str]) -> bool:
        """Whether `install` uses any of these engines at once: installed, parked or below the present one."""
        below = self._below if self.name in self._parking() else self.name
        return all(name in (self.name, below) or self._is_parked(name) for name in names)

    def can_park(self, name: str) -> bool:
        """Whether this engine can be parked."""
        return name in self._parking()

    def begin_trials(self, memory: Callable[[], int]) -> None:
        """Keep engines that were compiled until `end_trials`, so that trials can alternate between engines."""
        for engine in self._parking().values():
            engine.begin_trials(memory)

    def end_trials(self) -> str:
        """Release all engines but the installed one. Returns why that one had to be removed as well."""
        name, failure = self.name, ""
        if self._below != PLAIN:
            self.remove()
            failure = self.install(name, ())
        for engine in self._parking().values():
            engine.end_trials()
        return failure

    def remove(self) -> None:
        """Put the plain layers back."""
        self.engine.remove()  # before the one below it
        for engine in self.engines.values():
            engine.remove()
        self.name = self._below = PLAIN

    def discard(self) -> None:
        """Put the plain layers back in place of an engine that has failed its test."""
        self._tested.pop(self.name, None)
        self._layouts.pop(self.name, None)
        self.remove()

    def forget_tests(self) -> None:
        """Test each engine anew when it is installed next."""
        self._tested.clear()
        self._layouts.clear()

    def _switch(self, name: str) -> bool:
        """Change to an engine that is parked, or below the present one. Returns whether it is."""
        if name == self._below:
            self.engine.remove()
            self.name, self._below = name, PLAIN
        elif self._is_parked(name):
            self._parking()[name].resume()
            self.name, self._below = name, self.name
        else:
            return False
        return True

    def _is_parked(self, name: str) -> bool:
        # Two of them would not know which forward pass was there before.
        others = {*self._parking()} - {name}
        return name in self._parking() and self._parking()[name].is_parked() and self.name not in others

    def _parking(self) -> dict[str, ParkingEngine]:
        return {name: engine for name, engine in self.engines.items() if isinstance(engine, ParkingEngine)}

    def _seated(self, name: str, attempt: Attempt, tested_counts: set[int]) -> str:
        self.remove()
        try:
            failure = attempt(self.engines[name])
        # Whatever the code of an engine or of a model raises is a reason to use another engine, not to crash.
        except Exception as error:
            failure = reason_of(error)
        except BaseException:
            self.remove()
            raise
        if failure:
            self.remove()
            self._tested.pop(name, None)
            self._layouts.pop(name, None)
            return failure
        self.name = name
        self._tested[name], self._layouts[name] = set(tested_counts), self.engine.layouts
        return ""


def reason_of(error: Exception) -> str:
    """Return an error as a reason: its first line that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # OpenVINO begins with the lines of its source code.
    messages = [line for line in lines if not line.startswith(("Exception from ", "Check '"))]
    return next(iter([*messages, *lines]), type(error).__name__)[:MAX_REASON]
