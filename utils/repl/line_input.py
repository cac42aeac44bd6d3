"""Reads lines: from an interactive prompt with history, completion and a toolbar, or from a pipe.

Enter sends a line. Alt-Enter begins a new one, and so does Enter inside a block that starts with three quotation marks.
Pasted text may have several lines. Ctrl-X Ctrl-E opens the text in $EDITOR. A file keeps typed lines from one session
to the next. While a line is processed, the terminal does not echo.
"""

import atexit
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from types import FrameType

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.key_binding.bindings.completion import generate_completions
from prompt_toolkit.output import ColorDepth

from utils.commands import Registry
from utils.files import PRIVATE_FILE, user_folder
from utils.repl.status import SEPARATOR
from utils.text import QUOTES, quoted_text

PRIVATE_FOLDER = 0o700
# Signals that end the program without running `finally` blocks.
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class SlashCompleter(Completer):
    """Completes the name of a command after the slash, then the words of its argument or a file name."""

    def __init__(self, commands: Registry) -> None:
        self._visible = commands.visible()
        self._commands = {command.name: command for command in commands}
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        typed = document.text_before_cursor
        if not typed.startswith("/"):
            return
        name, space, argument = typed[1:].partition(" ")
        if not space:
            for command in self._visible:
                if command.name.startswith(name.lower()):
                    yield Completion(command.name, start_position=-len(name), display_meta=command.summary)
        elif name.lower() in self._commands:
            command = self._commands[name.lower()]
            for word, meaning in command.words.items():
                if word.startswith(argument) and word != argument:
                    yield Completion(word, start_position=-len(argument), display_meta=meaning)
            if argument.startswith(command.files):
                last = Document(argument.rpartition(" ")[2])
                yield from self._files.get_completions(last, complete_event)


def split_lines(typed: str) -> list[str]:
    """The lines to process: a text of several lines is one prompt, several commands stay separate."""
    # Not splitlines(): other separators may occur inside a text, which must not become a command.
    lines = [line for line in typed.split("\n") if line.strip()]
    if len(lines) < 2 or quoted_text(typed) is not None:
        return [typed]
    # Pasted commands run one by one. Anything else is one prompt, quoted in case it begins with a slash.
    return lines if all(line.startswith("/") for line in lines) else [f"{QUOTES}{typed}{QUOTES}"]


def is_open_block(typed: str) -> bool:
    return typed.lstrip().startswith(QUOTES) and quoted_text(typed) is None


def key_bindings() -> KeyBindings:
    """Enter sends, except in an open block; Alt-Enter begins a new line; Tab completes."""
    keys = KeyBindings()

    # With multiline=True prompt_toolkit's own binding of Enter would begin a new line.
    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        if is_open_block(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    # Terminals send Alt-Enter as Escape followed by Enter.
    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("tab")
    def complete(event: KeyPressEvent) -> None:
        buffer, state = event.current_buffer, event.current_buffer.complete_state
        if state and len(state.completions) == 1:
            # prompt_toolkit's own binding would restore the typed text at the next Tab.
            buffer.apply_completion(state.completions[0])
        else:
            generate_completions(event)

    return keys


def history_path() -> Path:
    """`$XDG_STATE_HOME/speculative-decoding/history`, by default below ~/.local/state."""
    return user_folder("state") / "history"


class LineHistory(FileHistory):
    """The history of typed lines, in a file that only its owner can read.

    If it cannot be written, `warn` receives a message, and the session keeps its own lines.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        super().__init__(str(path))
        self._held = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
            path.touch(mode=PRIVATE_FILE)
            # touch sets the mode of new files only.
            path.chmod(PRIVATE_FILE)
        except OSError as error:
            warn(f"The history file {path} cannot be written ({error.strerror}); this session keeps its own lines.")

    def load_history_strings(self) -> Iterable[str]:
        with suppress(OSError):
            # A list, because the file would otherwise be read, and fail, outside the block.
            return list(super().load_history_strings())
        return []

    def store_string(self, string: str) -> None:
        """Store a typed text. What names a server may hold a key in a wrong place, so it waits for `keep`."""
        lines = [line.strip().lower() for line in string.split("\n")]
        of_server = any(line.startswith("/server") or (line.startswith("/") and "://" in line) for line in lines)
        self._held = string if of_server and len(lines) == 1 else ""
        if not of_server:
            with suppress(OSError):
                super().store_string(string)

    def keep(self) -> None:
        """Store the last line about a server, which did what it says."""
        held, self._held = self._held, ""
        if held:
            with suppress(OSError):
                super().store_string(held)


def wrap_status(status: str, width: int) -> str:
    """The parts of a status line on as many lines as this width needs. Parts are not broken."""
    lines: list[str] = []
    for part in status.split(SEPARATOR):
        if lines and len(lines[-1]) + len(SEPARATOR) + len(part) <= width:
            lines[-1] += SEPARATOR + part
        else:
            lines.append(part)
    return "\n".join(lines)


def typed_lines(
    commands: Registry, *, colour: bool, history: History, status: Callable[[], str] = lambda: ""
) -> Iterator[str]:
    """Typed lines, until Ctrl-D. Ctrl-C drops the current line. `status` returns the text of the toolbar."""
    session: PromptSession[str] = PromptSession(
        completer=SlashCompleter(commands),
        history=history,
        auto_suggest=AutoSuggestFromHistory(),
        # prompt_toolkit reserves eight lines for the menu where this is true; /help needs them on a small screen.
        complete_while_typing=Condition(lambda: get_app().current_buffer.text.startswith("/")),
        multiline=True,
        enable_open_in_editor=True,
        key_bindings=key_bindings(),
        prompt_continuation=lambda width, number, wrapped: " " * width if wrapped else "." * (width - 1) + " ",
        bottom_toolbar=lambda: wrap_status(status(), get_app().output.get_size().columns) or None,
        # Otherwise prompt_toolkit would decide on colours by itself.
        color_depth=None if colour else ColorDepth.DEPTH_1_BIT,
    )
    while True:
        try:
            lines = split_lines(session.prompt("> "))
            with quiet_keyboard():
                yield from lines
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def piped_lines() -> Iterator[str]:
    """The lines of standard input, without byte order marks of files. The last one may lack its newline."""
    if isinstance(sys.stdin, TextIOWrapper):
        # A byte that is not UTF-8 must not end the program in the middle of the input. Only "\n" ends a line.
        sys.stdin.reconfigure(errors="replace", newline="\n")
    for line in sys.stdin or ():  # None if standard input is closed
        yield line.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")


@contextmanager
def quiet_keyboard() -> Iterator[None]:
    """Turn off the echo while the block runs, if standard input is a terminal that echoes.

    So typed keys do not mix with the answers. They stay in the terminal's input for the next prompt. The echo comes
    back when the block ends, when a signal ends the program, and when it crashes. While the program is suspended, the
    shell is responsible.
    """
    try:
        keyboard = sys.stdin.fileno()
        echoes = termios.tcgetattr(keyboard)[3] & termios.ECHO
    except (AttributeError, OSError, ValueError, termios.error):
        echoes = 0
    if not echoes:
        yield
        return
    restore = partial(_set_echo, keyboard, on=True)

    def end(number: int, frame: FrameType | None) -> None:
        restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before = {number: signal.signal(number, end) for number in ENDING}
    atexit.register(restore)  # a generator that is not finished may never run its `finally`
    try:
        _set_echo(keyboard, on=False)
        yield
    finally:
        restore()
        atexit.unregister(restore)
        for number, handler in before.items():
            signal.signal(number, handler)


def _set_echo(keyboard: int, *, on: bool) -> None:
    # Changing the terminal would stop a process in the background.
    if os.tcgetpgrp(keyboard) == os.getpgrp():
        state = termios.tcgetattr(keyboard)
        state[3] = state[3] | termios.ECHO if on else state[3] & ~termios.ECHO
        # Not TCSAFLUSH, which would discard typed keys.
        termios.tcsetattr(keyboard, termios.TCSANOW, state)
