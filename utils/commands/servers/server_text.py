"""/server text: does a server's greedy text equal its baseline's, alone and with concurrent requests?

The questions are those of /audit and /texts: are equal requests answered equally, where do texts differ, and is that a
rounding tie? A tie is shown without probabilities: the baseline itself yields either token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf
from typing import NamedTuple

from utils.bounds import WholeRange
from utils.commands.shared.registry import CommandContext, Outcome, path_in
from utils.commands.shared.result_tables import ResultColumn, ResultTable, Row, figure
from utils.comparison.arms import request_maker
from utils.comparison.harness import Harness
from utils.comparison.records import Countdown
from utils.errors import UserError
from utils.metrics.results import CHARACTER, TOKEN, first_difference
from utils.prompts.prompt_files import read_prompts, spaced
from utils.servers.address import TARGET, parse_numbers, parse_words
from utils.servers.connection import Connection
from utils.servers.kinds.completion import Chat, ServerRequest
from utils.servers.kinds.server_kind import ServerError
from utils.servers.load_slice import run_slice
from utils.text import count_of, split_words

OPTIONS = {
    "repeats": (3, WholeRange(2, 100)),
    "concurrency": (4, WholeRange(1, 64)),
    "limit": (4, WholeRange(1, 1000)),
}
MOST_EXAMINED = 8  # differences; each needs one more request
ALONE, LOAD, WHERE = "alone", "load", "difference"
TIE, UNKNOWN = "rounding tie", "unknown"  # why a text differs from the baseline's; only a tie can be shown
REASONS = {
    TIE: "{} takes the other token itself if it computes the same tokens as part of a prompt, so either token can win.",
    UNKNOWN: "{} was not seen to take the other token; it may be a rounding tie all the same. Check that both servers "
    "have the same weights, number format and sampling defaults; if so, and if there are many differences, report them "
    "to the server's authors.",
}
EXAMPLE = "/server text spec, where spec has a baseline"
OWN_PROMPTS = (
    "Repeat this list three times: apples, pears, plums, figs.",
    "Write a short story about a lighthouse keeper and a storm.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in a few sentences why the sky is blue.",
)


def _label(row: Row) -> str:
    under = "alone" if row["concurrency"] == 1 else f"{row['concurrency']} at once"
    return f"prompt {row['number']}, {under}" if row["check"] == WHERE else under


def _place(row: Row) -> str:
    if row["check"] == WHERE:
        return f"{row['first_difference_in'].removesuffix('s')} {row['first_difference'] + 1}"
    count = row["differing_prompts"]
    return f"in {count} of {count_of(row['prompts'], 'prompt')}" if count else "none"


TABLE = ResultTable(
    ResultColumn("check", _label),
    figure("server", "server"),
    figure("requests", "requests"),
    figure("texts per prompt", "unique_texts"),
    ResultColumn("first difference", _place),
    figure("cause", "cause"),
)


class Output(NamedTuple):
    """The text of an answer, and its token ids if the server returns them."""

    text: str
    token_ids: tuple[int, ...] | None

    def difference(self, other: "Output") -> tuple[int, str] | None:
        """The index of the first difference or None, in tokens if both have ids, otherwise in characters."""
        if self.token_ids is not None and other.token_ids is not None:
            place, unit = first_difference(self.token_ids, other.token_ids), TOKEN
        else:
            place, unit = first_difference(self.text, other.text), CHARACTER
        return None if place is None else (place, unit)


@dataclass(slots=True)
class TextTrial:
    """The texts of a server beside its baseline's. Without one, equal requests are only compared with each other.

    `connections` are the baseline, if there is one, and the server; the texts of the first one without other requests
    are the reference. `requests` has the greedy requests of each, one for each prompt. `outputs` are keyed by check and
    server and indexed by prompt.
    """

    connections: Sequence[Connection]
    prompts: Sequence[str]
    requests: dict[str, list[ServerRequest]]
    repeats: int
    concurrency: int
    outputs: dict[tuple[str, str], list[list[Output]]] = field(default_factory=dict)

    def rows(self, context: CommandContext) -> Iterator[Row]:
        harness = context.harness
        each = f"{count_of(self.repeats * len(self.prompts), 'request')} of up to {context.settings.length} tokens"
        try:
            for connection in self.connections:
                made = [_greedy_request(connection, prompt, context) for prompt in self.prompts]
                self.requests[connection.address.name] = made
            harness.progress(f"alone: {each} to each server, in turns ...")
            self._run_alone(harness)
            yield from (self._row(ALONE, connection.address.name) for connection in self.connections)
            for connection in self.connections if self.concurrency > 1 else ():
                name, count = connection.address.name, len(self.prompts)
                harness.progress(f"under load: {each} to {name}, {self.concurrency} at once ...")
                outputs = _outputs(connection, self.requests[name] * self.repeats, self.concurrency)
                self.outputs[LOAD, name] = [outputs[number::count] for number in range(count)]
                yield self._row(LOAD, name)
            yield from self._differences(harness)
        except UserError:
            for connection in self.connections:
                connection.close()
            raise

    def _run_alone(self, harness: Harness) -> None:
        countdown, turns = Countdown(harness.progress), list(product(range(self.repeats), range(len(self.prompts))))
        for done, (_, number) in enumerate(turns):
            countdown.at(done / len(turns), f"alone: {done} of {len(turns)} requests to each server")
            for connection in self.connections:
                name = connection.address.name
                of_prompts = self.outputs.setdefault((ALONE, name), [[] for _ in self.prompts])
                of_prompts[number] += _outputs(connection, self.requests[name][number : number + 1])

    def _unlike(self, check: str, name: str) -> list[tuple[int, Output, int, str]]:
        """(prompt, text, position, unit) of the first text of each prompt that differs from the reference.

        Under load, only texts count that the server does not generate alone.
        """
        found = []
        for number, outputs in enumerate(self.outputs[check, name]):
            reference = self.outputs[ALONE, self.connections[0].address.name][number][0]
            known = self.outputs[ALONE, name][number] if check == LOAD else []
            differing = ((one, place) for one in outputs if one not in known and (place := one.difference(reference)))
            found += [(number, one, *place) for one, place in list(differing)[:1]]
        return found

    def _row(self, check: str, name: str) -> Row:
        outputs = self.outputs[check, name]
        return {
            "check": check,
            "server": name,
            "concurrency": self.concurrency if check == LOAD else 1,
            "prompts": len(self.prompts),
            "requests": self.repeats * len(self.prompts),
            "unique_texts": max(len(set(of_prompt)) for of_prompt in outputs),
            "differing_prompts": len(self._unlike(check, name)),
            "tokens": max(len(output.token_ids or ()) for of_prompt in outputs for output in of_prompt),
        }

    def _differences(self, harness: Harness) -> Iterator[Row]:
        """Where and why texts differ from the reference: first those given alone, then those under load only."""
        places = [(*key, *unlike) for key in self.outputs for unlike in self._unlike(*key)]
        if len(places) > MOST_EXAMINED:
            harness.note(f"{count_of(len(places) - MOST_EXAMINED, 'further difference')} not examined.")
        for check, name, number, ours, place, unit in places[:MOST_EXAMINED]:
            harness.progress(f"examining prompt {number + 1} of {name} ...")
            yield {
                "check": WHERE,
                "under": check,
                "server": name,
                "concurrency": self.concurrency if check == LOAD else 1,
                "prompt": self.prompts[number],
                "number": number + 1,
                "first_difference": place,
                "first_difference_in": f"{unit}s",
                "cause": self.cause(number, ours, place) if unit == TOKEN else UNKNOWN,
            }

    def cause(self, number: int, ours: Output, place: int) -> str:
        """A tie if the reference itself yields the other token when it computes the same tokens in a prefill.

        A prefill and decode steps round differently, as a verify pass does.
        """
        request, ids = self.requests[self.connections[0].address.name][number], ours.token_ids or ()
        if not isinstance(request.prompt, tuple) or not ids[place:]:
            return UNKNOWN
        prefill = replace(request, prompt=(*request.prompt, *ids[:place]), max_tokens=1)
        try:
            (again,) = _outputs(self.connections[0], [prefill])
        except UserError:  # for example if the context is one token too long
            return UNKNOWN
        return TIE if again.token_ids == ids[place : place + 1] else UNKNOWN


def _greedy_request(connection: Connection, prompt: str, context: CommandContext) -> ServerRequest:
    """A greedy request, with token ids as the prompt if the server supports them."""
    request = request_maker(context.harness.loaded, prompt, context.settings)(connection.kind, connection.client)
    sent = request.prompt
    if isinstance(sent, str | Chat):
        sent = connection.kind.tokens(connection.client, sent, special=True) or sent
    return replace(request, prompt=sent, temperature=0.0, top_k=0, top_p=1.0)


def _outputs(connection: Connection, requests: Sequence[ServerRequest], concurrency: int = 1) -> list[Output]:
    """The answers in the order of the requests, each of which has its own timeouts. Raises UserError if one fails."""
    answered = run_slice(connection, requests, concurrency=concurrency, limit=inf)
    if answered.failures:
        raise ServerError(answered.failures[0])
    answers = sorted(answered.requests, key=lambda one: one.number)
    return [Output(one.completion.text, one.completion.token_ids) for one in answers if one.completion is not None]


def text(argument: str, context: CommandContext) -> Outcome:
    words, values = parse_words(split_words(argument), tuple(OPTIONS), most=2)
    options, servers = parse_numbers(values, OPTIONS), context.harness.state.servers
    address = servers.named(words, EXAMPLE).address
    name, other = address.name, address.baseline
    if other == TARGET:
        raise UserError(f"The baseline of {name} is the local target; /server text needs one that is a server.")
    differing = [] if len(words) > 1 else servers.other_texts.get(name, [])
    of_file = [prompt.text for prompt in read_prompts(path_in(words[1], EXAMPLE))] if len(words) > 1 else ()
    prompts = spaced(of_file or differing or OWN_PROMPTS, options["limit"])
    connections = [servers.connections[one] for one in (other, name) if one is not None]
    trial = TextTrial(connections, prompts, {}, options["repeats"], options["concurrency"])
    sent = count_of(len(prompts), "prompt") + " on which the texts differed" * bool(differing)
    report = TABLE.report(
        *("server_text", prompts[0], context.settings, trial.rows(context)),
        conclude=partial(conclusion, name, other),
        title=f"/server text {name}{f' compared with {other}' * bool(other)}, {sent}",
    )
    return [report]


def conclusion(name: str, baseline: str | None, figures: Sequence[Row]) -> list[str]:
    """The sentences, the most important one first."""
    rows: dict[tuple[str, str], Row] = {(row["check"], row["server"]): row for row in figures}
    found = [row for row in figures if row["check"] == WHERE]
    alone = [row for (check, _), row in rows.items() if check == ALONE]
    if len(alone) < (1 if baseline is None else 2):
        return []  # interrupted before the first comparison
    causes = {row["cause"] for row in found}
    reasons = [f"{cause}: {REASONS[cause].format(baseline or name)}" for cause in REASONS if cause in causes]
    if unsteady := [str(row["server"]) for row in alone if row["unique_texts"] != 1]:
        return [
            f"Not deterministic: {' and '.join(unsteady)} answered equal requests with different texts, although no "
            "other request was sent. So a difference cannot be attributed to speculation.",
            *reasons,
        ]
    return [_same_text(name, baseline, rows[ALONE, name], found), *_under_load(name, baseline, rows), *reasons]


def _same_text(name: str, baseline: str | None, row: Row, found: Sequence[Row]) -> str:
    requests, prompts = count_of(row["requests"], "request"), count_of(row["prompts"], "prompt")
    if baseline is None:
        return (
            f"Deterministic: {requests} for {prompts} got equal texts from {name}. With baseline=SERVER in "
            "its /server add, they are compared with those without speculation."
        )
    if not row["differing_prompts"]:
        length = f" of up to {count_of(row['tokens'], 'token')}" if row["tokens"] else ""
        return f"The text of {name} is that of {baseline}: equal for {prompts} ({requests} to each server{length})."
    causes = [one["cause"] for one in found if one["under"] == ALONE and one["server"] == name]
    counted = ", ".join(f"{causes.count(cause)} {cause}" for cause in REASONS if cause in causes)
    differing = f"The text of {name} is not that of {baseline} for {row['differing_prompts']} of {prompts}"
    return f"{differing}: {counted}." if counted else f"{differing}."


def _under_load(name: str, baseline: str | None, rows: dict[tuple[str, str], Row]) -> list[str]:
    loaded = {server: row for (check, server), row in rows.items() if check == LOAD}
    if name not in loaded:
        return []
    at_once = f"With {loaded[name]['concurrency']} requests at once"
    changed = {server: row["differing_prompts"] for server, row in loaded.items() if row["differing_prompts"]}
    if not changed:
        return [f"{at_once} the texts stay the same."]
    counts = " and ".join(f"{server} for {count_of(count, 'prompt')}" for server, count in changed.items())
    sentence = f"{at_once} texts differ from those given alone: {counts}."
    if baseline in changed:
        sentence += f" {baseline} does so without speculation: its results depend on the batch."
    return [sentence]
