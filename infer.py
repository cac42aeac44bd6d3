#!/usr/bin/env python3
"""The program: flags, models, the table of strategies, then typed lines, piped lines or -c lines.

The only module that sees everything. What a strategy is made of stands here as a row; how it decodes stands in sampling and
ngram_assisted, how it looks in utils.screen.renderer, what a line does in utils.repl.repl_session.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import attrgetter

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # before torch: spinning threads make a step many times slower on a busy machine

from utils.config.arguments import parse_arguments

if __name__ == "__main__":
    parse_arguments()  # --help and usage errors answer before the heavy imports below
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while those last, Ctrl-C just ends

import argparse

from ngram_assisted import STORAGES, NGramStorage, load_storage, save_storage
from sampling import RULES, BeamWidth, autoregressive_steps, beam_search_steps, speculative_steps
from utils.commands import Registry, default_registry
from utils.comparison.counterfactual import foresee
from utils.comparison.harness import Probes, StorageTools
from utils.comparison.model_drafters import MODEL_KINDS, draft_seconds, free_drafter
from utils.comparison.records import RecordFile
from utils.comparison.strategies import Job, Strategy, kind_of
from utils.comparison.text_drafters import MATCH_KINDS, storage_drafter
from utils.config.settings import Settings, configured
from utils.config.value_types import Limits
from utils.decode.steps import Step
from utils.distributed import heard, is_first, part, share, together
from utils.errors import UserError
from utils.pairs.load_pair import Pair, load_pair
from utils.pairs.request import pair_request
from utils.prompts.prompt_files import read_prompts
from utils.repl.line_input import piped_lines, typed_lines
from utils.repl.repl_session import PREPARING, Tools, Workbench
from utils.repl.runner import Verdict
from utils.repl.status import limits_of
from utils.screen.line_history import LineHistory, history_path
from utils.screen.renderer import Renderer, make_renderer

DRAFTERS = (*MODEL_KINDS, *MATCH_KINDS)


def _speculative(job: Job) -> Iterator[Step]:
    rule = RULES[job.settings.verify]
    drafter, target = job.watched(*kind_of(job.drafter, DRAFTERS).make(job, rule))
    yield from speculative_steps(job.prompt, drafter, target, job.decoding, gamma=job.settings.most_drafts, rule=rule)


def _ngram(job: Job) -> Iterator[Step]:
    rule = RULES[job.settings.verify]
    drafter, target = job.watched(*storage_drafter(job, rule))
    yield from speculative_steps(job.prompt, drafter, target, job.decoding, gamma=job.settings.most_drafts, rule=rule)


def _target(job: Job) -> Iterator[Step]:
    yield from autoregressive_steps(job.prompt, job.session("target", rewinds=False), job.decoding)


def _drafter(job: Job) -> Iterator[Step]:
    yield from autoregressive_steps(job.prompt, free_drafter(job), job.decoding)


def _beam(job: Job) -> Iterator[Step]:
    yield from beam_search_steps(
        job.prompt, job.session("target", rewinds=False), job.decoding, BeamWidth(num_beams=job.settings.beams)
    )


LOADED_KIND: Callable[[Pair], str | None] = attrgetter("drafter_kind")

STRATEGIES = (
    Strategy(
        "speculative", "Speculative", "magenta", "speculative", _speculative, LOADED_KIND, drafts=True, kinds=DRAFTERS
    ),
    Strategy(
        "ngram",
        "N-gram assisted (NASD)",
        "yellow",
        "ngram",
        _ngram,
        lambda pair: "ngram",
        drafts=True,
        make=storage_drafter,
    ),
    Strategy("target", "Target only", "cyan", "target", _target),
    Strategy(
        "drafter", "Drafter only", "green", "drafter", _drafter, LOADED_KIND, uses_target=False, needs_drafter=True
    ),
    Strategy("beam", "Beam search", "blue", "beams", _beam, draws=False),
)


def make_storage(settings: Settings, vocabulary: int) -> NGramStorage:
    """An empty n-gram storage as the settings describe it."""
    return STORAGES[settings.ngram_storage.kind](settings.ngram_storage.order, vocabulary, settings.ngram_limit)


STORAGE = StorageTools(make_storage, save_storage, load_storage)


def first_settings(arguments: argparse.Namespace, limits: Limits) -> Settings:
    """Those of the config file, and of the flags that are settings too. Raises UserError for a name or value that is none."""
    given = {name: value for name in ("seed", "engine", "threads") if (value := getattr(arguments, name)) is not None}
    return replace(configured(Settings(), arguments.config.settings, limits), **given)


def assemble(arguments: argparse.Namespace, renderer: Renderer, registry: Registry, *, interactive: bool) -> Workbench:
    """Load the models, warm them up and lay out the session. Raises UserError where something cannot be loaded or written."""
    records = RecordFile(arguments.json) if arguments.json and (is_first() or not together()) else None
    first_settings(arguments, Limits())  # what is wrong with them is said before anything slow
    pair = load_pair(pair_request(arguments), renderer.note)
    settings = first_settings(arguments, limits_of(pair))
    probes, pairs = Probes(draft_seconds, foresee), arguments.config.pairs
    tools = Tools(STRATEGIES, registry, renderer, STORAGE, records, interactive, probes, load_pair, pairs)
    renderer.note(PREPARING.format(settings.engine))
    workbench = Workbench(pair, tools, settings)
    workbench.introduce()
    return workbench


Work = tuple[Callable[[str], Verdict], str]


def work_of(workbench: Workbench, lines: Iterable[str], prompts: Iterable[str]) -> Iterator[Work]:
    """What to do, in order: lines first, then prompts that are never commands."""
    yield from ((workbench.handle, line) for line in lines)
    yield from ((workbench.send, prompt) for prompt in prompts)


def serve(work: Iterator[Work], *, interactive: bool) -> int:
    """Do the work; the exit status. Interactively neither a failed nor an interrupted line ends anything."""
    failed = False
    for act, text in work:
        verdict = act(text)
        if verdict is Verdict.QUIT:
            break
        if verdict is Verdict.INTERRUPTED and not interactive:
            return 130
        failed = failed or verdict is Verdict.FAILED
    return 1 if failed and not interactive else 0


def main(argv: list[str] | None = None) -> int:
    """Run the program; the exit status: 0, 1 if a line failed or nothing could be loaded, 2 usage, 130 interrupted."""
    arguments = parse_arguments(argv)
    interactive = (
        not arguments.lines
        and not arguments.prompts
        and all(stream and stream.isatty() for stream in (sys.stdin, sys.stdout))
    )
    renderer = make_renderer(interactive=interactive, plain=arguments.no_color, silent=not is_first())
    registry = default_registry()
    try:
        prompts = share([prompt.text for prompt in read_prompts(arguments.prompts)]) if arguments.prompts else []
        workbench = assemble(arguments, renderer, registry, interactive=interactive)
        lines: Iterable[str] = arguments.lines
        if interactive:
            renderer.note("Type a prompt, or /help for the commands; /quit or Ctrl-D leaves.")
            history = LineHistory(history_path(), renderer.note)
            lines = typed_lines(registry, colour=renderer.colour, history=history, status=workbench.status)
        elif not lines and not arguments.prompts:
            lines = piped_lines()
        return serve(work_of(workbench, heard(lines), prompts), interactive=interactive)
    except UserError as error:
        renderer.error(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(part(main()))
