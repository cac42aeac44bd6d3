"""Seat: which engine computes the models, at most one at a time, and what has been tested of it."""

from collections.abc import Callable, Mapping, Sequence
from datetime import date

from utils.engine.layer_engine import LayerEngine, Report, unreported
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
        self._layouts: dict[str, Mapping[str, int]] = {}

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
        """Install an engine and test it. Returns why that failed.

        An engine that has passed its test before gets the short one.
        """
        if name == self.name:
            return ""
        if name in self._tested:
            return self.install_tested(name, self._layouts.get(name, {}), self._tested[name])

        def attempt(engine: LayerEngine) -> str:
            return engine.install(thread_counts, lambda text: report(f"engine {name}: {text}"))

        return self._seated(name, attempt, set(thread_counts))

    def install_tested(self, name: str, layouts: Mapping[str, int], tested_counts: set[int]) -> str:
        """Install an engine that passed its test before, with one verify width as a check. Returns why that failed."""
        # Another width on another day.
        width = WIDTHS[date.today().toordinal() % (len(WIDTHS) - 1)]
        return self._seated(name, lambda engine: engine.install_tested(layouts, width), tested_counts)

    def test_threads(self, count: int, report: Report = unreported) -> str:
        """Test the installed engine with a number of threads unless that was done. Returns why it failed."""
        failure = "" if count in self.tested_counts() else self.engine.self_test(count, report)
        if not failure:
            self._tested.setdefault(self.name, set()).add(count)
        return failure

    def remove(self) -> None:
        """Put the plain layers back."""
        for engine in self.engines.values():
            engine.remove()
        self.name = PLAIN

    def forget_tests(self) -> None:
        """Test each engine anew when it is installed next."""
        self._tested.clear()

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
