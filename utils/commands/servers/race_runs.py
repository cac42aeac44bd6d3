"""The answers of servers to one prompt, with all turns of its conversation. /race and /verdict share this."""

from collections.abc import Sequence
from dataclasses import replace

from utils.commands.servers.race_figures import ServerResult
from utils.comparison.harness import Harness
from utils.comparison.server_requests import request_maker
from utils.comparison.server_runs import LocalRun, ServerRun, compare_run, row_name
from utils.comparison.warm_up import shortened
from utils.config.settings import Settings
from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.prompts.conversation import Turn, Turns
from utils.prompts.prompt_files import Prompt
from utils.servers.address_list import TARGET
from utils.servers.connection import Connection, RequestFor
from utils.text import decode

MOST_FAILURES = 2  # prompts in a row without an answer: after them a server is taken to be gone
NO_ANSWER = "no server has answered any of the prompts."
Numbered = tuple[int, Prompt]  # a prompt with its number in the file, from 1
Arm = Connection | None  # what takes its turn: a server, or None for the local target


def with_target(harness: Harness, servers: Sequence[Connection]) -> list[Arm]:
    """The servers, after the local target if one of them is compared with it."""
    is_baseline = harness.has_pair and any(server.address.baseline == TARGET for server in servers)
    return [None, *servers] if is_baseline else [*servers]


def warm_up_arms(harness: Harness, settings: Settings, numbered: Numbered, arms: Sequence[Arm]) -> None:
    """A short answer of each arm, because the first one may be slow."""
    prompt_results(harness, shortened(settings), (numbered[0], replace(numbered[1], later=())), arms)


def prompt_results(
    harness: Harness, settings: Settings, numbered: Numbered, order: Sequence[Arm]
) -> tuple[list[ServerResult], set[str]]:
    """The answers to all turns of one prompt, and a sentence for each server that gave none.

    Every server continues its own answers. The local target answers the first turn only, in its place in the order.
    Texts are compared only where the conversations before them are equal.
    """
    number, prompt = numbered
    results: list[ServerResult] = []
    notes: set[str] = set()
    histories: dict[str, Turns] = {row_name(arm.address.name): () for arm in order if arm}  # of those that answer
    for turn, text in enumerate((prompt.text, *prompt.later) if settings.uses_chat else (prompt.text,)):
        target: LocalRun | None = None
        runs: list[ServerRun] = []
        for server in order:
            if server is None:
                target = None if turn else _target(harness, settings, text)
                continue
            if (name := row_name(server.address.name)) not in histories:
                continue
            try:
                runs.append(_ask(server, request_maker(harness, text, settings, histories[name])))
            except UserError as error:
                del histories[name]
                notes.add(f"{name}: prompt {number} is left out. {error}")
        for run in runs:
            comparison = compare_run(run, runs, target, settings)
            if comparison.baseline in histories and histories[comparison.baseline] != histories[run.name]:
                comparison = replace(comparison, same=None, first_difference=None)
            results.append(ServerResult(number, prompt.task, run, comparison))
            if not turn:
                harness.state.servers.note_text(run.address.name, text, comparison.same)
        histories |= {run.name: (*histories[run.name], Turn(text, run.text)) for run in runs}
    return results, notes


def _ask(server: Connection, request_for: RequestFor) -> ServerRun:
    """One answer. Raises KeyboardInterrupt on Ctrl-C and UserError if there is none."""
    run = ServerRun(server.address, server.ask(request_for))
    # A stream turns Ctrl-C into a partial answer; a report must end instead.
    if run.finish is FinishReason.INTERRUPTED:
        raise KeyboardInterrupt
    return run


def _target(harness: Harness, settings: Settings, text: str) -> LocalRun:
    """The local target's run."""
    run = harness.run_alone(harness.prompt_ids(text, settings), harness.baseline, settings)
    return LocalRun(run, decode(harness.pair.tokenizer, run.tokens))
