#!/usr/bin/env python3
"""The program: flags, models, then typed lines, piped lines or -c lines."""

import gc
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator

STARTED = time.monotonic()
# Before torch is imported. Threads that spin for long make a decode step many times slower on a busy machine; threads
# that sleep at once make it twice as slow on an idle one. 10,000 rounds are a fraction of a millisecond.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from utils.config.arguments import parse_arguments
from utils.files import user_folder
from utils.pairs.request import request_from_flags
from utils.screen import CLEAR_LINE, show_importing

if __name__ == "__main__":
    # --help and usage errors are reported before the heavy imports below
    parse_arguments()
    show_importing()
    gc.disable()  # the imports create a million objects that stay; looking through them takes a tenth of the time
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during those imports just ends the program

import argparse
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

from utils.commands import Registry, default_registry
from utils.comparison.records import RecordFile, read_records
from utils.config.settings import Settings, apply_typed, flag_settings
from utils.config.value_types import Limits
from utils.engine.stored_results import ResultFile
from utils.errors import UserError, naming
from utils.pairs.load_pair import load_pair
from utils.pairs.pair import loaded_message
from utils.prompts.prompt_files import Prompt, read_prompts
from utils.repl.line_input import LineHistory, history_path, piped_lines, quiet_keyboard, typed_lines
from utils.repl.loaded_pair import STARTING_ENGINE, SessionTools
from utils.repl.repl_session import ReplSession, Verdict
from utils.repl.status import limits_of
from utils.screen.renderer import OutputError, Renderer, make_renderer

OUTPUT_FAILED = "Standard output cannot be written: {}."
FIRST_TURNS = "Of each conversation of --prompts only the first turn is run: /race FILE and --verdict run all of them."
RESULTS = "engine.json"  # of the engine's self-test, in the cache folder


def first_settings(arguments: argparse.Namespace, limits: Limits) -> Settings:
    """The settings of the config file and of the flags. Raises UserError for an unknown name or an invalid value."""
    flags = {row.name: value for row in flag_settings() if (value := getattr(arguments, row.name)) is not None}
    with naming(f"The config file {arguments.config.file}"):
        return replace(apply_typed(Settings(), arguments.config.settings, limits), **flags)


def start_session(
    arguments: argparse.Namespace, renderer: Renderer, registry: Registry, *, interactive: bool
) -> ReplSession:
    """Load the models, warm them up and start a session. Raises UserError for whatever cannot be loaded or written."""
    records = RecordFile(arguments.json) if arguments.json else None
    first_settings(arguments, Limits())  # reports invalid settings before anything slow
    announce = renderer.announce
    pair = None if arguments.servers_only else load_pair(request_from_flags(arguments), announce)
    if pair is not None and not interactive:
        renderer.note(loaded_message(pair))
    settings = first_settings(arguments, Limits() if pair is None else limits_of(pair))
    results = ResultFile(user_folder("cache") / RESULTS)
    tools = SessionTools(
        registry, renderer, records, interactive, load=load_pair, pairs=arguments.config.pairs, results=results
    )
    if pair is not None:
        announce(STARTING_ENGINE.format(settings.engine))
    session = ReplSession(pair, tools, settings, arguments.servers)
    session.introduce(time.monotonic() - STARTED)
    return session


def serve(session: ReplSession, lines: Iterable[str], prompts: Iterable[Prompt], *, interactive: bool) -> int:
    """Process lines, then prompts, which are never commands. Returns the exit status.

    In an interactive session a failed or interrupted line ends nothing.
    """
    ended = set[Verdict]()
    for verdict in chain(map(session.handle, lines), (session.send(one.text, one.request) for one in prompts)):
        if verdict is Verdict.QUIT:
            break
        if verdict is Verdict.INTERRUPTED and not interactive:
            return verdict
        ended.add(verdict)
    worst = (one for one in (Verdict.FAILED, Verdict.UNDECIDED) if one in ended and not interactive)
    return next(worst, Verdict.DONE)


def lines_for(
    arguments: argparse.Namespace, session: ReplSession, renderer: Renderer, *, interactive: bool
) -> Iterator[str]:
    """The lines of -c, of the keyboard, or of standard input if nothing else says what to run.

    Those of the keyboard about servers are stored in the history once they have succeeded.
    """
    if interactive:
        history = LineHistory(history_path(), renderer.note)
        for line in typed_lines(default_registry(), colour=renderer.colour, history=history, status=session.status):
            yield line
            if line == session.succeeded:
                history.keep()
    elif arguments.lines or arguments.prompt is not None or arguments.prompts:
        yield from arguments.lines
    else:
        yield from piped_lines()


def given_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """The prompts of the command line and of --prompts. Raises UserError for a file that cannot be read."""
    if arguments.gate is not None:
        read_records(Path(arguments.gate))  # read again by /gate
    if arguments.verdict not in (None, "", "builtin"):
        read_prompts(Path(arguments.verdict))  # read again by /verdict; an error must not wait for the models
    prompts = [Prompt(arguments.prompt)] if arguments.prompt is not None else []
    return prompts + (read_prompts(arguments.prompts) if arguments.prompts else [])


def main(argv: list[str] | None = None) -> int:
    """Run the program. Returns 0, 1 if a line failed or nothing could be loaded, 2 for wrong usage, 3 if a gate could
    not decide, 130 if interrupted.
    """
    arguments = parse_arguments(argv)
    on_terminal = all(stream and stream.isatty() for stream in (sys.stdin, sys.stdout))
    interactive = on_terminal and not arguments.lines and not arguments.prompts and arguments.prompt is None
    renderer = make_renderer(interactive=interactive, plain=arguments.no_color)
    if sys.stdout is None:
        renderer.error(OUTPUT_FAILED.format("it is closed"))
        return 1
    try:
        prompts = given_prompts(arguments)  # before anything slow
        if any(prompt.later for prompt in prompts):
            renderer.note(FIRST_TURNS)
        with quiet_keyboard():
            session = start_session(arguments, renderer, default_registry(), interactive=interactive)
        lines = lines_for(arguments, session, renderer, interactive=interactive)
        try:
            return serve(session, lines, prompts, interactive=interactive)
        finally:
            session.close()
    except UserError as error:
        renderer.error(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError as error:  # the reader of our output is gone, or the output cannot be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, OutputError):
            with suppress(OSError):  # messages may go to the same disk
                renderer.error(OUTPUT_FAILED.format(error.strerror))
        return 1


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    show_importing(CLEAR_LINE)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
