"""/server text: is a server's greedy text the one of its baseline, alone and with other requests at the same time?

The questions are those of /audit and /divergence: is equal input answered equally at all, where do texts differ, and
is that a near-tie? If the session samples, sampled texts are compared, too.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from utils.bounds import WholeRange
from utils.commands.outcomes import Outcome, RunReport
from utils.commands.registry import CommandContext
from utils.commands.servers.text_conclusion import conclusion
from utils.commands.servers.text_prompts import chosen_text, prompts_of
from utils.commands.servers.text_samples import SampleTrial, sample_events
from utils.commands.servers.text_ties import CANDIDATES, Tie, examine
from utils.commands.servers.text_trials import Output, ask, ask_together, complete_together, unique
from utils.comparison.countdown import Countdown
from utils.comparison.reports import Finding, Note, Progress, Report, ReportEvent
from utils.comparison.server_requests import request_maker
from utils.comparison.strategies import is_greedy
from utils.errors import UserError, check_choice
from utils.prompts.prompt_files import spaced
from utils.servers.address_list import TARGET
from utils.servers.completion import ServerCompletion
from utils.servers.connection import Connection
from utils.servers.failures import ServerError
from utils.servers.request import Chat, ServerRequest
from utils.text import count_of

OPTIONS = {
    "repeats": (3, WholeRange(2, 100)),
    "concurrency": (4, WholeRange(1, 64)),
    "limit": (4, WholeRange(1, 1000)),
    "samples": (24, WholeRange(2, 1000)),
}
MOST_EXAMINED = 8  # differences; each needs up to five further requests, those under load one more round
HEADINGS = ("check", "server", "requests", "texts per prompt", "first difference", "gap", "moved by", "cause")
ALONE, LOAD, WHERE = "alone", "load", "difference"
OPTION = re.compile(r"(\w+)=(\S*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Trial:
    """What is compared. baseline: None checks only whether equal requests get equal texts. samples: sampled
    texts of every prompt. repeats: of every prompt in each check. outputs: by check, server and number of the prompt.
    """

    server: Connection
    baseline: Connection | None
    prompts: tuple[str, ...]
    samples: int
    requests: dict[str, list[ServerRequest]]
    repeats: int
    concurrency: int
    outputs: dict[tuple[str, str], list[list[Output]]] = field(default_factory=dict)

    @property
    def connections(self) -> list[Connection]:
        return [self.server] if self.baseline is None else [self.baseline, self.server]

    @property
    def reference(self) -> Connection:
        """Whose texts, alone, the others are compared with."""
        return self.baseline or self.server


def text(argument: str, context: CommandContext) -> Outcome:
    """The subcommand: NAME [FILE] [repeats=3] [concurrency=4] [limit=4]."""
    name, file, options = _parsed(argument)
    servers = context.harness.state.servers
    check_choice(name, tuple(servers.connections), "server")
    server = servers.connections[name]
    if server.address.baseline == TARGET:
        raise UserError(f"The baseline of {name} is the local target; /server text needs one that is a server.")
    baseline = None if server.address.baseline is None else servers.connections[server.address.baseline]
    differing = [] if file else servers.other_texts.get(name, [])
    found = differing or prompts_of(file)
    prompts = spaced(found, options["limit"])
    trial = Trial(server, baseline, prompts, options["samples"], {}, options["repeats"], options["concurrency"])
    compared = "" if baseline is None else f" compared with {baseline.address.name}"
    title = f"/server text {name}{compared}, {chosen_text(prompts, differing)}"
    conclude = partial(conclusion, name, None if baseline is None else baseline.address.name)
    report = Report(
        "server_text", prompts[0], context.settings, HEADINGS, _events(trial, context), conclude, title=title
    )
    return [RunReport(report)]


def _parsed(argument: str) -> tuple[str, str, dict[str, int]]:
    """The server's name, the prompts file or "", and the values of all options."""
    values = {name: default for name, (default, _) in OPTIONS.items()}
    words = []
    for word in argument.split():
        if (option := OPTION.fullmatch(word)) and option[1] in OPTIONS:
            values[option[1]] = OPTIONS[option[1]][1].parse(option[2])
        else:
            words.append(word)
    if not words:
        raise UserError("which server? For example /server text spec, where spec has a baseline.")
    return words[0], " ".join(words[1:]), values


def _events(trial: Trial, context: CommandContext) -> Iterator[ReportEvent]:
    length = context.settings.length
    try:
        for connection in trial.connections:
            trial.requests[connection.address.name] = _requests(connection, trial.prompts, context)
        each = count_of(trial.repeats * len(trial.prompts), "request")
        yield Progress(f"alone: {each} of up to {count_of(length, 'token')} to each server, in turns ...")
        yield from _run_alone(trial)
        yield from (_row(trial, ALONE, connection) for connection in trial.connections)
        if trial.concurrency > 1:
            yield Progress(f"under load: {each} to each server, {trial.concurrency} at once ...")
            for connection in trial.connections:
                _run_together(trial, connection)
                yield _row(trial, LOAD, connection)
        yield from _differences(trial)
        if trial.baseline is not None and not is_greedy(context.settings):
            servers = trial.baseline, trial.server
            sampled = SampleTrial(servers, trial.requests, trial.samples, trial.concurrency, context.settings)
            yield from sample_events(sampled)
    except ServerError:
        for connection in trial.connections:
            connection.close()
        raise


def _requests(connection: Connection, prompts: Sequence[str], context: CommandContext) -> list[ServerRequest]:
    """The greedy requests, with token ids as prompts where the server knows them."""
    made = []
    for prompt in prompts:
        request = request_maker(context.harness, prompt, context.settings)(connection.kind, connection.client)
        request = replace(request, temperature=0.0, top_k=0, top_p=1.0)
        if isinstance(request.prompt, str | Chat):
            ids = connection.kind.tokens(connection.client, request.prompt, special=True)
            request = replace(request, prompt=ids or request.prompt)
        made.append(request)
    return made


def _run_alone(trial: Trial) -> Iterator[Progress]:
    countdown, done, count = Countdown(), 0, trial.repeats * len(trial.prompts)
    for connection in trial.connections:
        trial.outputs[ALONE, connection.address.name] = [[] for _ in trial.prompts]
    for _ in range(trial.repeats):
        for number in range(len(trial.prompts)):
            for connection in trial.connections:
                name = connection.address.name
                output = Output.of(ask(connection, trial.requests[name][number]))
                trial.outputs[ALONE, name][number].append(output)
            done += 1
            yield from countdown.at(done / count, f"alone: {done} of {count_of(count, 'request')} to each server")


def _run_together(trial: Trial, connection: Connection) -> None:
    """All requests, of different prompts side by side."""
    name = connection.address.name
    requests, count = trial.requests[name] * trial.repeats, len(trial.prompts)
    outputs = ask_together(connection, requests, trial.concurrency)
    trial.outputs[LOAD, name] = [outputs[number::count] for number in range(count)]


def _reference(trial: Trial, number: int) -> Output:
    return trial.outputs[ALONE, trial.reference.address.name][number][0]


def _unlike(trial: Trial, check: str, name: str) -> list[tuple[int, Output, int]]:
    """(prompt, text, place) of the first text of each prompt that is not the reference's.

    Under load only texts count that the server does not give alone.
    """
    found = []
    for number, outputs in enumerate(trial.outputs[check, name]):
        reference = _reference(trial, number)
        known = trial.outputs[ALONE, name][number] if check == LOAD else []
        places = ((output, output.difference(reference)) for output in outputs if output not in known)
        differing = next(((output, place) for output, place in places if place is not None), None)
        if differing is not None:
            found.append((number, *differing))
    return found


def _row(trial: Trial, check: str, connection: Connection) -> Finding:
    name = connection.address.name
    texts = max(map(unique, trial.outputs[check, name]))
    differing = len(_unlike(trial, check, name))
    figures: dict[str, Any] = {
        "check": check,
        "server": name,
        "concurrency": trial.concurrency if check == LOAD else 1,
        "prompts": len(trial.prompts),
        "requests": trial.repeats * len(trial.prompts),
        "unique_texts": texts,
        "differing_prompts": differing,
        "tokens": max(len(output.token_ids or ()) for outputs in trial.outputs[check, name] for output in outputs),
    }
    shown = check if check == ALONE else f"{trial.concurrency} at once"
    compared = f"in {differing} of {count_of(len(trial.prompts), 'prompt')}" if differing else "none"
    return Finding((shown, name, str(figures["requests"]), str(texts), compared, "-", "-", "-"), figures)


def _differences(trial: Trial) -> Iterator[ReportEvent]:
    """Where and why texts differ from the reference's: first those alone, then those that only load brings."""
    places = [
        (check, connection.address.name, *unlike)
        for check in (ALONE, LOAD)
        if (check, trial.server.address.name) in trial.outputs
        for connection in trial.connections
        for unlike in _unlike(trial, check, connection.address.name)
    ]
    if len(places) > MOST_EXAMINED:
        yield Note(f"{count_of(len(places) - MOST_EXAMINED, 'further difference')} not examined.")
    examined = places[:MOST_EXAMINED]
    loaded: list[ServerCompletion] = []
    if any(check == LOAD for check, *_ in examined):
        yield Progress("log-probabilities under load ...")
        asked = [replace(one, top_logprobs=CANDIDATES) for one in trial.requests[trial.reference.address.name]]
        loaded = complete_together(trial.reference, asked * trial.repeats, trial.concurrency)
    for check, name, number, ours, place in examined:
        theirs = _reference(trial, number)
        yield Progress(f"examining prompt {number + 1} of {name} ...")
        request = trial.requests[trial.reference.address.name][number]
        same = loaded[number :: len(trial.prompts)] if check == LOAD else []
        tie = examine(trial.reference, request, theirs, ours, loaded=same)
        yield _difference(trial, (check, name, number), place, (tie, ours.unit(theirs)))


def _difference(trial: Trial, where: tuple[str, str, int], place: int, why: tuple[Tie, str]) -> Finding:
    (check, name, number), (tie, unit) = where, why
    figures = {
        "check": WHERE,
        "under": check,
        "server": name,
        "prompt": trial.prompts[number],
        "number": number + 1,
        "first_difference": place,
        "first_difference_in": f"{unit}s",
        "gap": tie.gap,
        "moved": tie.moved,
        "cause": tie.cause.value,
    }
    shown = ("-" if value is None else f"{value:.3g}" for value in (tie.gap, tie.moved))
    label = f"prompt {number + 1}" + (", alone" if check == ALONE else f", {trial.concurrency} at once")
    return Finding((label, name, "-", "-", f"{unit} {place + 1}", *shown, tie.cause.value), figures)
