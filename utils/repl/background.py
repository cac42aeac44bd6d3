"""The warm-up of a loaded pair. It runs behind the prompt or before the first run, but never within a measured run.

While it runs behind the prompt, nothing else may use the models: every line waits for it first.
"""

from collections.abc import Callable
from threading import Event, Thread

import torch

POLL = 0.05  # seconds; waiting in short pieces lets Ctrl-C in


class BackgroundTask:
    """Work that is done once: in a thread after `start`, or in the first call of `finish` after `plan`.

    `work` receives a function that returns True if it should end early.
    """

    def __init__(self, work: Callable[[Callable[[], bool]], None]) -> None:
        self._work = work
        self._thread: Thread | None = None
        self._stopped = Event()
        self._error: BaseException | None = None
        self._is_planned = False

    @property
    def is_running(self) -> bool:
        """Whether a thread is working."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_planned(self) -> bool:
        """Whether `finish` has work to do."""
        return self._is_planned

    def plan(self) -> None:
        """Postpone the work to the next call of `finish`."""
        self._is_planned = True

    def start(self) -> None:
        """Start the thread."""
        # A daemon, so that a thread that hangs does not keep the program alive.
        self._thread = Thread(target=self._run, args=(torch.get_num_threads(),), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the thread, if there is one. Raises the thread's error once."""
        thread, error = self._thread, None
        while thread is not None and thread.is_alive():
            thread.join(POLL)
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait for the thread, or do the planned work."""
        self.wait()
        if self._is_planned:
            self._work(lambda: False)
            self._is_planned = False  # after the work, so that interrupted work starts again

    def stop(self) -> None:
        """End the thread as soon as possible."""
        self._stopped.set()
        thread = self._thread
        while thread is not None and thread.is_alive():
            thread.join(POLL)

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # a new thread may start with another number
        try:
            self._work(self._stopped.is_set)
        except BaseException as error:
            self._error = error
