"""/server text: equal servers, servers that differ, that are not deterministic, and that depend on the load."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen
from servers.loopback import Faults, Loopback
from servers.loopback_values import Answer
from servers.server_sessions import server_session

from utils.commands.servers.text_ties import Cause, Tie, examine, judge
from utils.commands.servers.text_trials import Output
from utils.decode.steps import FinishReason
from utils.servers.address import ServerAddress
from utils.servers.completion import Arrival, Piece, ServerCompletion
from utils.servers.engines.logprobs import Position
from utils.servers.engines.vllm import VllmKind
from utils.servers.request import ServerRequest

VLLM = (200, "application/json", '{"data": [{"id": "tiny", "owned_by": "vllm"}]}')
LINE = "/server text spec repeats=2 concurrency=3 limit=2"


@dataclass(slots=True)
class Odd(Loopback):
    """A server whose third token is another one under a condition: always, on every second request, under load, or for
    prompts about pears.
    """

    when: str = ""
    count: int = 0

    def answer(self, body: Any) -> Answer:
        # No zero-argument super() in a class with slots.
        answer = Loopback.answer(self, body)
        self.count += 1
        odd = {
            "always": True,
            "sometimes": self.count % 2 == 0,
            "busy": self._at_once > 1,
            "pears": "pears" in str(body),
        }
        if not odd.get(self.when):
            return answer
        ids, pieces = list(answer.ids), list(answer.pieces)
        ids[2], pieces[2] = 7, " other"
        return replace(answer, ids=ids, pieces=pieces)


def checked(view: Screen, base: str = "", spec: str = "", line: str = LINE) -> tuple[str, Odd]:
    """What the screen shows of a check of two servers, and the second one."""
    pages: Any = {"/v1/models": VLLM}
    faults = Faults(chunk_delay=0.01)
    with Odd(when=base, pages=pages, faults=faults) as plain, Odd(when=spec, pages=pages, faults=faults) as fast:
        addresses = ServerAddress("base", plain.url), ServerAddress("spec", fast.url, baseline="base")
        session = server_session(view, *addresses)
        session.handle(line)
        return " ".join(view.take()[0].split()), fast


def test_equal_servers(view: Screen) -> None:
    shown, server = checked(view)
    assert (
        "The text of spec is that of base: equal for 2 prompts (4 requests to each server of up to 6 tokens)" in shown
    )
    assert "With 3 requests at once the texts stay the same." in shown
    assert len(server.posts()) >= 8 and server.most_at_once > 1
    assert all(request.body["temperature"] == 0 for request in server.posts() if "max_tokens" in request.body)


def test_a_server_with_another_text(view: Screen) -> None:
    shown, _ = checked(view, spec="always")
    assert "The text of spec is not that of base for 2 of 2 prompts" in shown
    assert "token 3" in shown and "deterministic" not in shown.lower()
    # It is the same text under load, so load changes nothing.
    assert "With 3 requests at once the texts stay the same." in shown and ", 3 at once" not in shown


@pytest.mark.parametrize("which", ["base", "spec"])
def test_a_server_that_is_not_deterministic_alone(view: Screen, which: str) -> None:
    shown, _ = checked(view, **{which: "sometimes"}, line="/server text spec repeats=3 concurrency=1 limit=1")
    assert f"Not deterministic: {which} answered" in shown and "is that of" not in shown


def test_a_baseline_that_depends_on_the_load(view: Screen) -> None:
    shown, _ = checked(view, base="busy")
    assert "The text of spec is that of base" in shown
    assert "base does so without speculation" in shown


def test_a_server_without_a_baseline(view: Screen) -> None:
    with Odd(pages={"/v1/models": VLLM}) as server:
        server_session(view, ServerAddress("spec", server.url)).handle(LINE)
    assert "Deterministic: 4 requests for 2 prompts" in " ".join(view.take()[0].split())


@pytest.mark.parametrize("race", [False, True])
def test_prompts_whose_texts_differed_are_the_ones_that_are_examined(view: Screen, tmp_path: Path, race: bool) -> None:
    prompts = ["About apples", "About pears", "About figs", "More pears"]
    (tmp_path / "p.txt").write_text("\n".join(prompts))
    pages: Any = {"/v1/models": VLLM}
    with Odd(pages=pages) as plain, Odd(when="pears", pages=pages) as fast:
        addresses = ServerAddress("base", plain.url), ServerAddress("spec", fast.url, baseline="base")
        session = server_session(view, *addresses)
        for line in [f"/race 1 {tmp_path / 'p.txt'}"] if race else prompts:
            session.handle(line)
        fast.when = ""  # the second time all texts are equal
        before, count = view.take(), len(fast.posts())
        session.handle("/server text spec repeats=2 concurrency=1")
        asked = str([request.body for request in fast.posts()[count:]])
        assert "About pears" in asked and "More pears" in asked and "apples" not in asked and "figs" not in asked
        assert "is that of base" in "".join(view.take()), before
        session.handle("About pears")
        count = len(fast.posts())
        session.handle("/server text spec repeats=2 concurrency=1")
        asked = str([request.body for request in fast.posts()[count:]])
        assert "More pears" in asked and "About pears" not in asked


@pytest.mark.parametrize("argument", ["", "nobody", "spec repeats=1", "spec concurrency=x", "spec no-such-file.txt"])
def test_bad_arguments_get_one_sentence(view: Screen, argument: str) -> None:
    session = server_session(view, ServerAddress("spec", "http://127.0.0.1:9"))
    session.handle(f"/server text {argument}")
    shown = "".join(view.take())
    assert "Traceback" not in shown and 0 < len(shown.splitlines()) < 8


def test_a_server_that_dies_under_load_leaves_no_threads(view: Screen) -> None:
    before = threading.active_count()
    with Odd(pages={"/v1/models": VLLM}) as plain, Odd(pages={"/v1/models": VLLM}) as fast:
        fast.faults = Faults(die_after=2)
        addresses = ServerAddress("base", plain.url), ServerAddress("spec", fast.url, baseline="base")
        server_session(view, *addresses).handle(LINE)
    shown = "".join(view.take())
    assert "spec" in shown and "is that of" not in shown
    assert threading.active_count() <= before + 4  # the loopback servers' own, which end by themselves


def at(*pairs: tuple[int, float]) -> Position:
    return Position(pairs[0][0], pairs[0][1], pairs)


def test_a_gap_that_another_computation_moves_by_half_is_a_tie() -> None:
    last, earlier = at((1, -0.70), (2, -0.73)), at((5, -0.1), (6, -3.0))
    tie = judge(last, [(earlier, at((5, -0.12), (6, -3.0))), (last, last)], (1, 2))
    assert tie == Tie(Cause.TIE, pytest.approx(0.03), pytest.approx(0.02))
    steady = judge(last, [(earlier, at((5, -0.11), (6, -3.0))), (last, last)], (1, 2))
    assert steady.cause is Cause.BUG and steady.moved == pytest.approx(0.01)
    assert judge(last, [(last, last)], (1, 2), flips=True).cause is Cause.TIE


def test_a_token_that_is_no_candidate_is_no_tie() -> None:
    last, again = at((1, -0.1), (3, -4.0)), at((1, -0.1), (3, -4.01))
    tie = judge(last, [(last, again)], (1, 2))
    assert tie.cause is Cause.BUG and tie.gap == pytest.approx(3.9)
    assert judge(Position(1, 0.0), [(Position(1, 0.0), again)], (1, 2)) == Tie(Cause.UNKNOWN)
    assert judge(at((1, -0.1)), [], (1, 2)) == Tie(Cause.UNKNOWN)


class Model:
    """A connection to a model in which token 2 follows with -0.70, and token 1 with -0.68, or -0.71 in a prefill."""

    kind = VllmKind()

    def __init__(self, step: float = 0.02, noise: float = 0.03) -> None:
        self.client, self.step, self.noise = self, step, noise
        self.prompts: list[tuple[int, ...]] = []

    def complete(self, request: ServerRequest, kind: VllmKind) -> ServerCompletion:
        assert isinstance(request.prompt, tuple)
        self.prompts.append(request.prompt)
        events = []
        for place in range(request.max_tokens):
            prefill = -self.noise if place == 0 and len(request.prompt) > 2 else 0.0
            top = {"token_id:1": -0.7 + self.step + prefill, "token_id:2": -0.7}
            logprobs = {"tokens": ["token_id:1"], "token_logprobs": [-0.68], "top_logprobs": [top]}
            events.append({"choices": [{"text": "a", "logprobs": logprobs}]})
        arrivals = tuple(Arrival(0.1, Piece("a", (1,))) for _ in events)
        return ServerCompletion("a", arrivals, FinishReason.LENGTH, "length", 0.1, events=tuple(events))


def test_the_baseline_is_asked_for_the_same_positions_in_prefills() -> None:
    theirs, ours = Output("aaa", (1, 1, 1)), Output("aab", (1, 1, 2))
    request, model = ServerRequest((8, 9), 3), Model()
    tie = examine(model, request, theirs, ours)  # type: ignore[arg-type]
    assert tie.cause is Cause.TIE and tie.gap == pytest.approx(0.02) and tie.moved == pytest.approx(0.03)
    assert model.prompts == [(8, 9), (8, 9), (8, 9, 1), (8, 9, 1, 1)]
    exact = examine(Model(step=0.5, noise=0.01), request, theirs, ours)  # type: ignore[arg-type]
    assert exact.cause is Cause.BUG
    ended = examine(model, request, theirs, Output("aa", (1, 1)))  # type: ignore[arg-type]
    assert ended.cause is Cause.BUG
    assert examine(model, request, Output("aaa", None), ours).cause is Cause.UNKNOWN  # type: ignore[arg-type]
    flipping = examine(Model(step=0.02, noise=0.2), request, theirs, ours)  # type: ignore[arg-type]
    assert flipping.cause is Cause.TIE


def under_load(ids: tuple[int, ...], moved: Sequence[float]) -> ServerCompletion:
    """An answer whose log-probabilities are those of `Model`, moved by so much at each position."""
    events = []
    for by in moved:
        top = {"token_id:1": -0.68 + by, "token_id:2": -0.7}
        logprobs = {"tokens": ["token_id:1"], "token_logprobs": [-0.68], "top_logprobs": [top]}
        events.append({"choices": [{"text": "a", "logprobs": logprobs}]})
    arrivals = tuple(Arrival(0.1, Piece("a", (token,))) for token in ids)
    return ServerCompletion("a" * len(ids), arrivals, FinishReason.LENGTH, "length", 0.1, events=tuple(events))


@pytest.mark.parametrize(
    ("ids", "moved", "counted"),
    [
        ((1, 1, 1, 1), (0, 0.04, 0, 0), 0.04),  # before the difference
        ((1, 1, 1, 1), (0, 0, 0.04, 0), 0.04),  # where this answer has the baseline's token
        ((1, 1, 2, 1), (0, 0.01, 0.9, 0.9), 0.01),  # the difference itself says nothing about rounding
        ((1, 2, 1, 1), (0.01, 0.9, 0.9, 0.9), 0.01),  # nor do contexts that are not the same
        ((1, 1, 1, 1), (0, 0.01, 0, 0.9), 0.01),  # nor what comes after the difference
        ((1, 1, 1), (0.9, 0, 0, 0), 0.0),  # log-probabilities of other tokens
    ],
)
def test_the_baseline_under_load_shows_how_far_batches_move_it(
    ids: tuple[int, ...], moved: Sequence[float], counted: float
) -> None:
    theirs, ours = Output("aaaa", (1, 1, 1, 1)), Output("aaba", (1, 1, 2, 1))
    model: Any = Model(step=0.02, noise=0.0)
    tie = examine(model, ServerRequest((8, 9), 4), theirs, ours, loaded=[under_load(ids, moved)])
    assert tie.moved == pytest.approx(counted, abs=1e-9)
    assert tie.cause is (Cause.TIE if counted > 0.01 else Cause.BUG)


def test_outputs_without_ids_are_compared_by_characters() -> None:
    one, other = Output("abc", (1, 2)), Output("abd", None)
    assert (one.difference(other), one.unit(other)) == (2, "character")
    assert one.difference(Output("xyz", (1, 2))) is None  # the ids decide where both have them
